//! What only a destination has, and what becomes of that where its user consents to give it up.
//!
//! It is given up where the loss is known, by both ends: the source's end finds the last epoch in common by the
//! lives of both, and asks the replica's end, which holds the disk, to give up what was written since (`demote.rs`, `give_up`). That
//! saves it as a delta if it is to be saved, and makes the disk a replica at that epoch, whose unsure set are the blocks written since.
//! So what follows is an ordinary tracked delta: what the new source has written since, and the unsure set. A replica that was a source
//! is promoted for that, and demoted again; where a crash leaves it promoted, the same command finds a source. Where it is not known what
//! was written, the epoch is unknown too, and all is compared.

use replica::Role;
use source::{Gap, Handle};

use crate::conflict::{Conflict, Diverged, Divergence};
use crate::error::SyncError;
use crate::options::{GiveUp, SyncOptions};
use crate::plan::facts::facts;
use crate::plan::{Knowledge, SourceFacts, choose, refuse_diverged, refuse_emptied, refuse_other_content};
use crate::report::{GivenUpWrites, Summary};
use crate::transfer::Transfer;
use crate::wire::messages::{Apart, StatusReply};

/// What a sync with consent does to its destination first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The destination has nothing that the source has not.
    Nothing,
    /// What was written to it since then is given up there: it records that, and is a replica afterwards.
    Since(Apart),
    /// What it has is in no record, so all of it is compared.
    Compared,
}

/// What has to be given up.
///
/// # Errors
/// Refused if it is to be saved, and nothing tells what it is.
pub(crate) fn loss(
    facts: &SourceFacts<'_>,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<Loss, Conflict> {
    let Some(how) = &options.give_up else { return Ok(Loss::Nothing) };
    let saves = matches!(how, GiveUp::Save(_));
    let (loss, why) = match refuse_diverged(facts, status, options) {
        Err(Conflict::Diverged(diverged)) => diverged.loss(),
        Err(Conflict::Foreign { .. }) => (Loss::Compared, REPLICA),
        Err(other) => return Err(other),
        // Its numbers fit, and its ids do not.
        Ok(()) if matches!(facts.history, Knowledge::Foreign(_)) => (Loss::Compared, REPLICA),
        // What it has that this content has not, nothing tells.
        Ok(()) if saves && matches!(facts.history, Knowledge::Lost(Gap::OtherContent(_))) => {
            (Loss::Compared, REPLICA)
        }
        Ok(()) if saves => given_up_before(status),
        Ok(()) => (Loss::Nothing, ""),
    };
    match loss {
        Loss::Compared | Loss::Since(Apart { since: None }) if saves => {
            Err(Conflict::Unsaveable { name: facts.name.to_owned(), why: why.to_owned() })
        }
        loss => Ok(loss),
    }
}

const REPLICA: &str = "it is a replica, and only a source records what is written to it";
const TOO_FAR: &str = "its history does not go back to an epoch that both have";
const NO_RECORD: &str = "some of what was written to it is in no record";
const GIVEN_UP: &str = "it was given up before, and a sync has begun to overwrite it";

/// What was given up by an earlier command, without saving it, is saved as long as it is there.
fn given_up_before(status: &StatusReply) -> (Loss, &'static str) {
    let Role { demoted, .. } = &status.replica.role;
    let unsaved = demoted.as_ref().is_some_and(|demoted| demoted.saved.is_none());
    match status.replica.epoch.filter(|_| unsaved && !status.replica.unsure.is_empty()) {
        Some(epoch) if status.demotes_anew.contains(&epoch) => {
            (Loss::Since(Apart { since: Some(epoch.number) }), "")
        }
        Some(_) => (Loss::Compared, GIVEN_UP),
        None => (Loss::Nothing, ""),
    }
}

impl Diverged {
    /// What is lost where the source is kept, and why it could not be saved.
    pub(crate) fn loss(&self) -> (Loss, &'static str) {
        match self.divergence {
            Divergence::TwoSources { there, .. } => {
                let why = if there.reaches { NO_RECORD } else { TOO_FAR };
                (Loss::Since(Apart { since: self.common.filter(|_| there.tells()) }), why)
            }
            Divergence::OtherBranch { demoted: true, .. } => match self.common {
                None => (Loss::Compared, TOO_FAR),
                since => (Loss::Since(Apart { since }), TOO_FAR),
            },
            _ => (Loss::Compared, REPLICA),
        }
    }
}

/// What there is to say where nothing had to be given up, although its user consented.
pub(crate) fn said_of_nothing(status: &StatusReply, how: &GiveUp) -> String {
    let saved = status.replica.role.demoted.as_ref().and_then(|demoted| demoted.saved.as_ref());
    match (saved, how) {
        (Some(file), _) => format!("what was given up there is saved in {}", file.display()),
        (None, GiveUp::Save(file)) => {
            format!("nothing there had to be given up, so {} was not written", file.display())
        }
        (None, GiveUp::Discard) => "nothing there had to be given up".into(),
    }
}

impl Transfer<'_> {
    /// Has the destination give up what was written to it since then. What it is afterwards, and what it gave up.
    pub(crate) fn give_up(&self, apart: Apart) -> Result<(StatusReply, GivenUpWrites), SyncError> {
        let status = self.ask_to_give_up(apart)?;
        let epoch = status.replica.epoch;
        let given_up = GivenUpWrites {
            since: epoch.map(|epoch| epoch.number),
            bytes: epoch.map(|_| status.replica.unsure.bytes()),
            saved: status.replica.role.demoted.as_ref().and_then(|demoted| demoted.saved.clone()),
        };
        Ok((status, given_up))
    }
}

/// What a consent has come to.
pub(crate) struct Consented {
    /// What the destination is now; of a dry run, what it would be.
    pub status: StatusReply,
    /// How it is to be brought up to date.
    pub options: SyncOptions,
    pub outcome: Outcome,
}

/// What a destination gave up, or what there is to say where nothing had to be.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    given_up: Option<GivenUpWrites>,
    /// That was done; otherwise the sync that follows overwrites it.
    is_done: bool,
    said: Option<String>,
}

impl Outcome {
    fn given_up(given_up: GivenUpWrites, is_done: bool) -> Outcome {
        Outcome { given_up: Some(given_up), is_done, said: None }
    }

    /// What the destination of that name has given up, if anything.
    pub(crate) fn said(&self, name: &str) -> Option<String> {
        let GivenUpWrites { since, saved, .. } = self.given_up.as_ref().filter(|_| self.is_done)?;
        let since = since.map_or_else(String::new, |since| format!(" since epoch {since}"));
        let saved = saved.as_ref().map_or_else(String::new, |file| format!(", saved in {}", file.display()));
        Some(format!("{name} gave up what was written to it{since}{saved}"))
    }

    /// Adds it to the summary of the sync that follows.
    pub(crate) fn tell(self, summary: &mut Summary) {
        summary.given_up = self.given_up;
        summary.warnings.extend(self.said);
    }
}

/// Has a destination give up what only it has, so that it can be brought up to date.
///
/// # Errors
/// Refused if that is to be saved and cannot be, and if this source would be refused then: nothing is given up for it.
pub(crate) fn consent(
    handle: &Handle,
    transfer: &Transfer<'_>,
    status: StatusReply,
    how: &GiveUp,
) -> Result<Consented, SyncError> {
    let (name, options) = (transfer.name, transfer.options);
    let known = facts(handle, &status, name, options)?;
    let mut later = SyncOptions { give_up: None, ..options.clone() };
    let (status, outcome) = match loss(&known, &status, options)? {
        Loss::Nothing => {
            choose(&known, &status, &later)?;
            let said = said_of_nothing(&status, how);
            (status, Outcome { said: Some(said), ..Outcome::default() })
        }
        Loss::Compared => {
            (later.adopt, later.overwrite) = (true, true);
            let since = known.common.map(|epoch| epoch.number);
            // What only the destination has is given up, for a source of which there is nothing to say.
            if let Some(why) = handle.lost()? {
                let doubted = SourceFacts { history: Knowledge::Lost(why), ..known };
                refuse_emptied(&doubted, &status, options)?;
                refuse_other_content(&doubted, options)?;
            }
            choose(&facts(handle, &status, name, &later)?, &status, &later)?;
            (status, Outcome::given_up(GivenUpWrites { since, bytes: None, saved: None }, false))
        }
        Loss::Since(apart) => {
            let expected = as_if_given_up(handle, status, apart)?;
            choose(&facts(handle, &expected, name, &later)?, &expected, &later)?;
            match options.dry_run {
                true => {
                    let bytes = known.two.there.bytes.filter(|_| apart.since.is_some());
                    (
                        expected,
                        Outcome::given_up(GivenUpWrites { since: apart.since, bytes, saved: None }, false),
                    )
                }
                false => {
                    let (status, given_up) = transfer.give_up(apart)?;
                    (status, Outcome::given_up(given_up, true))
                }
            }
        }
    };
    Ok(Consented { status, options: later, outcome })
}

/// What a destination will be once it has given up what was written to it.
fn as_if_given_up(handle: &Handle, status: StatusReply, apart: Apart) -> Result<StatusReply, SyncError> {
    let source = handle.about().uuid;
    let size = handle.reader()?.len();
    let history = handle.history()?;
    let replica = match apart.since.and_then(|since| history.by_number(since)) {
        Some(epoch) => {
            let role = replica::Role::replica(handle.about().term, handle.lives_to(&epoch)?);
            replica::Status { role, ..replica::Status::at(source, epoch, size) }
        }
        // Of an epoch that is not known here, all is compared.
        None => replica::Status {
            source: Some(source),
            positions: vec![replica::Position { epoch: None, upto: size }],
            size,
            ..replica::Status::nothing()
        },
    };
    Ok(StatusReply { replica, primary: None, holds_data: true, ..status })
}
