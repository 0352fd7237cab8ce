//! A replica that becomes the source itself. The mark in the lineage is durable before anything else is made of it, and from then on
//! no delta is merged: what is written to the disk is in no other source. The command that promotes makes the source's state from the
//! mark, while it holds the replica; after a crash the same command does so again.

use std::path::{Path, PathBuf};

use delta::Epoch;
use device::{Dir, Folder};
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::known::verdict::Verdict;
use crate::past;
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::intent::{Intent, ReplicaMembership};
use crate::state::lineage::{Lineage, State, StepKind, Unsure};
use crate::state::options::ReplicaOptions;
use crate::state::role::{Promoted, Released, Role};

/// What a promotion would make the present of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    /// The epoch of the last commit.
    pub epoch: Epoch,
    /// When the replica came to it, in seconds since 1970, if that is known.
    pub time: Option<u64>,
    /// The source has said that there was no more.
    pub released: bool,
    /// A later epoch of the source, of which a part has come.
    pub later: Option<Epoch>,
    /// Its parts are of different moments.
    pub fuzzy: bool,
    /// Earlier moments that are kept, of which none can be reached from then on.
    pub moments: usize,
    /// A verification found that it differed from its source.
    pub verdict: Option<Verdict>,
}

/// Opens the replica at `path`, which has that lineage, by `open` to be promoted: what a crash left of a commit is completed first.
///
/// # Errors
/// If `open` fails; refused if there is no replica.
pub fn to_promote(
    path: &Path,
    lineage: Option<Lineage>,
    options: &ReplicaOptions,
    open: &dyn Fn(&ReplicaOptions) -> Result<Replica>,
) -> Result<Replica> {
    let none = || {
        ReplicaError::Refused(format!(
            "there is no replica at {}: \"dsync status\" lists the replicas of this host; pass --state-dir if it was \
             received with another one, such as a service's, or --journal-dir if its state is in a folder of its own",
            path.display()
        ))
    };
    let gone = || {
        ReplicaError::Away(format!(
            "the file of replica {0} is gone, so there is nothing to promote. If its file system is not mounted, mount it and run again; if it is \
             gone for good, \"dsync forget {0}\" forgets it",
            path.display()
        ))
    };
    let lineage = lineage.ok_or_else(none)?;
    let open = |doubt| open(&ReplicaOptions { doubt, ..options.clone() });
    let replica = open(options.doubt || lineage.role.promoted.is_some())?;
    match replica.is_kept() {
        true => Ok(replica),
        false if replica.is_gone() => Err(gone()),
        false => Err(none()),
    }
}

impl Replica {
    /// What is written down of it.
    pub fn recorded(&self) -> &Lineage {
        self.lineage()
    }

    /// What a promotion would make the present of the disk. `group` is the folder of the group that is promoted with it.
    ///
    /// # Errors
    /// Refused if the replica holds what its source never was at one moment. Without `force` also if its source has not said that
    /// there was no more, and if its parts are of different moments.
    pub fn outlook(&self, force: bool, group: Option<&Path>) -> Result<Outlook> {
        let lineage = self.lineage();
        let path = self.path().display();
        let whole = !matches!(lineage.state, State::Incomplete) && lineage.unsure != Unsure::Everything;
        let step = lineage.step.as_ref();
        let epoch = lineage.epoch.filter(|_| whole && step.is_none_or(|s| s.kind.is_beside()));
        let Some(epoch) = epoch.filter(|_| lineage.source.is_some()) else {
            let why = lineage.unsettled().unwrap_or_else(|| "its first copy was not completed".into());
            if lineage.role.demoted.is_some() && step.is_none() && lineage.unsure != Unsure::Everything {
                return self.cannot_promote(format!(
                    "{why}. All of it is still on the disk. If another disk was promoted in its place, a sync from there compares both, and overwrites \
                     what differs here: copy this disk first if it is wanted. If none was, \"dsync forget {path}\" makes it a plain image again, \
                     with a new id when it is next served or synced; \"dsync sync --adopt {path} DST\" then compares each of its replicas and brings \
                     it up to date"
                ));
            }
            return self.cannot_promote(format!(
                "{why}. Complete it with \"dsync sync\" from its source; if that is gone, \"dsync forget {path}\" makes it a plain \
                 image, which never was the disk of its source at one moment"
            ));
        };
        let fuzzy = lineage.state == State::Fuzzy;
        let outlook = Outlook {
            epoch,
            time: past::since(self.state(), lineage, self.settings()),
            released: lineage.role.promoted.map_or_else(|| self.is_released(), |mark| mark.released),
            later: self.later(),
            fuzzy,
            // In an emergency, nothing fails because they cannot be counted.
            moments: self.history().map_or(0, |history| history.moments.len()),
            verdict: self.verdict(),
        };
        match (force, outlook.released) {
            _ if force && group.is_none() && lineage.group.is_some() => self.refuse_without_its_group(),
            (true, _) => Ok(outlook),
            (false, _) if fuzzy => self.cannot_promote(format!(
                "it was copied from a disk in use without a freeze, so its parts are of different moments. Sync it once more; \
                 \"dsync promote --force {path}\" takes it as it is"
            )),
            (false, true) => match &outlook.verdict {
                Some(found) => self.refuse_differing(found, group),
                None if group.is_none() && lineage.group.is_some() => self.refuse_without_its_group(),
                None => Ok(outlook),
            },
            (false, false) if lineage.role.demoted.is_some() => self.refuse_former(&epoch, group),
            (false, false) if lineage.group.is_some() => self.refuse_of_unfinished_group(&epoch, &outlook),
            (false, false) => self.cannot_promote(format!(
                "its source has not said that nothing was written after epoch {epoch}. Run \"dsync demote SRC [HOST:]{path}\" where the \
                 source is, which sends the rest. If the source is gone, \"dsync promote --force {path}\" gives up what was \
                 written there after this epoch{}",
                lacks(&outlook) + &past_lost(&outlook, &path)
            )),
        }
    }

    fn cannot_promote<T>(&self, why: String) -> Result<T> {
        Err(ReplicaError::Refused(format!("cannot promote {}: {why}", self.path().display())))
    }

    /// A replica is not promoted just so that was found to differ from its source.
    fn refuse_differing<T>(&self, found: &Verdict, group: Option<&Path>) -> Result<T> {
        let promote = match group {
            Some(dir) => format!("dsync promote --force --group {}", dir.display()),
            None => format!("dsync promote --force {}", self.path().display()),
        };
        self.cannot_promote(format!(
            "it differed from its source in {} when it was verified on {}, and that was not repaired. Make the old source the source again, with \
             \"dsync promote --force\" where it is, which loses nothing; run \"dsync verify --repair\" there, and demote it again. If it is gone, \
             \"{promote}\" takes the replica as it is",
            device::human_size(found.bytes_differing),
            device::moment(found.time)
        ))
    }

    /// A member of a group is not promoted by itself.
    fn refuse_without_its_group<T>(&self) -> Result<T> {
        let group = self.lineage().group.as_ref();
        let name = group.map_or("", |group| &group.name);
        let dir = group.map_or_else(PathBuf::new, |group| group.dir_for(self.path()));
        self.cannot_promote(format!(
            "it belongs to the group {name}, whose disks take over together: run \"dsync promote --group {}\". To promote it alone, \
             take it out of the group first, with \"dsync forget --group {name} {}\"",
            dir.display(),
            self.path().display()
        ))
    }

    /// A member of a group is not promoted just so: its sources have not ended.
    fn refuse_of_unfinished_group<T>(&self, epoch: &Epoch, outlook: &Outlook) -> Result<T> {
        let group = self.lineage().group.as_ref();
        let name = group.map_or("", |group| &group.name);
        let dir = group.map_or_else(PathBuf::new, |group| group.dir_for(self.path()));
        let dir = dir.display();
        let moments = match outlook.moments {
            0 => String::new(),
            _ => format!(
                ", and the moments that are kept of before (\"dsync rewind --group {dir}\" lists them)"
            ),
        };
        self.cannot_promote(format!(
            "its source has not said that nothing was written after epoch {epoch}. It belongs to the group {name}: run \"dsync demote \
             --group {name} [HOST:]{dir}\" where the sources are, which sends the rest of all disks. If the sources are gone, \"dsync promote \
             --force --group {dir}\" gives up what was written there after the common epoch{}{moments}",
            lacks(outlook)
        ))
    }

    /// A later epoch of the source, of which a part has come.
    fn later(&self) -> Option<Epoch> {
        let kept = self.journal().and_then(|journal| journal.segments.last());
        let arriving = self.lineage().step.as_ref().map(|step| step.toward.epoch);
        let later = kept.and_then(|segment| segment.header.to().copied()).or(arriving);
        later.filter(|later| self.lineage().epoch.is_some_and(|epoch| later.number > epoch.number))
    }

    /// True if its source has said that there was no more. A source that sent more later took its word back.
    fn is_released(&self) -> bool {
        self.lineage().has_last_word() && self.later().is_none()
    }

    /// The promotion that comes next.
    pub(crate) fn next_promotion(&self) -> Promoted {
        self.lineage().role.next_promotion(self.is_released())
    }

    /// A source that was demoted is not made the source again just so.
    fn refuse_former<T>(&self, epoch: &Epoch, group: Option<&Path>) -> Result<T> {
        let promote = match group {
            Some(dir) => format!("dsync promote --force --group {}", dir.display()),
            None => format!("dsync promote --force {}", self.path().display()),
        };
        let told = self.lineage().role.demoted.as_ref().and_then(|demoted| demoted.told.as_ref());
        match told {
            Some(told) => self.cannot_promote(format!(
                "it is the former source, and {told} was told that it can take over. If it did, sync from there. If {told} \
                 is lost, or is not promoted and never will be before a sync from here, \"{promote}\" loses \
                 nothing that was written up to epoch {epoch}"
            )),
            None => self.cannot_promote(format!(
                "it is the former source. If another disk was promoted in its place, sync from that; if none was, \"{promote}\" \
                 makes it the source again, and loses nothing{}",
                match self.lineage().gave_up() {
                    Some(gave) => format!(
                        " that was written to it; what its old source wrote after epoch {} is given up, as it was when this disk was promoted to term {}",
                        gave.began.number, gave.term
                    ),
                    None => String::new(),
                }
            )),
        }
    }

    /// What it knows of the way to the epoch of its last commit: the changes of the commits before it, without a gap.
    pub fn trail(&self) -> source::Trail {
        let lineage = self.lineage();
        match lineage.epoch {
            // What a copy of several moments has that is later than its epoch, no commit says.
            Some(epoch) if lineage.state != State::Fuzzy => source::Trail::leading_to(self.state(), &epoch),
            _ => source::Trail::default(),
        }
    }

    /// Takes over what a source knew that it was before, as its trail. Durable on return.
    ///
    /// # Errors
    /// As [`source::leave_trail`].
    pub fn take_trail(&self, history: &source::History) -> std::result::Result<(), source::SourceError> {
        source::leave_trail(history, self.state())
    }

    /// In what way others have changed the disk since it was marked.
    ///
    /// # Errors
    /// If it cannot be looked at.
    pub fn changed_since_mark(&self) -> Result<Option<String>> {
        let now = self.stamp(Name::Final)?;
        let (before, now) = (self.lineage().stamp.as_ref(), now.as_ref());
        Ok(match before.zip(now) {
            Some((before, now)) if before.is_proof_of(now) => None,
            Some((before, now)) => {
                let told = before.differs(now).map(|how| how.to_string());
                Some(told.unwrap_or_else(|| "nothing tells whether it was written to".into()))
            }
            None => Some("nothing tells how it was".into()),
        })
    }

    /// Marks the replica as the source; durable on return. An earlier mark stays as it is.
    ///
    /// # Errors
    /// If others have changed the disk since it was opened, or the state cannot be written: then it is the replica that it was.
    pub fn promote(&mut self) -> Result<Promoted> {
        if let Some(promoted) = self.lineage().role.promoted {
            return Ok(promoted);
        }
        self.untouched()?;
        let promoted = self.next_promotion();
        self.become_source(promoted)?;
        Ok(promoted)
    }

    /// Keeps in mind in which state directory it was made the source; durable on return.
    ///
    /// # Errors
    /// If that cannot be written: then another state directory cannot know that it was.
    pub fn made_in(&mut self, state_dir: &Path) -> Result<()> {
        let promoted = self.lineage().role.promoted.is_some();
        if promoted && self.lineage().role.made_in.as_deref() != Some(state_dir) {
            self.lineage_mut().role.made_in = Some(state_dir.to_path_buf());
            self.store()?;
        }
        Ok(())
    }

    /// Completes the promotion of its group, if that was interrupted.
    pub(crate) fn complete_promotion(&mut self) -> Result<()> {
        let role = &self.lineage().role;
        // What was demoted since has been a source already, and may be on its way to what another one was then.
        if self.options().adopt || role.promoted.is_some() || role.demoted.is_some() {
            return Ok(());
        }
        let Some(group) = &self.lineage().group else { return Ok(()) };
        let folder = match self.destination().group(group) {
            Ok(folder) => folder,
            // Without its folder there is nothing to complete.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io_error("open", &group.folder_for(self.path()))(e)),
        };
        let Some(intent) = Intent::read(&*folder)? else { return Ok(()) };
        let (source, epoch, term) = (self.lineage().source, self.lineage().epoch, self.lineage().role.term);
        let here = intent.members.values().find(|m| (Some(m.source), Some(m.epoch)) == (source, epoch));
        // One of an earlier term has been made, and has ended since.
        let Some(promoted) = here.and_then(|m| m.promoted).filter(|promoted| promoted.term > term) else {
            return Ok(());
        };
        // What is seen need not be durable yet, and what is done now builds on it.
        folder.sync().map_err(io_error("sync", folder.path()))?;
        self.become_source(promoted)?;
        self.tell(format!("the promotion of its group was interrupted: it {}", promoted.said()));
        self.refuse_promoted()
    }

    /// Makes the mark.
    pub(crate) fn become_source(&mut self, promoted: Promoted) -> Result<()> {
        self.announce()?;
        self.lose_readers("the replica was promoted")?;
        self.drop_journal()?;
        if self.lineage().step.as_ref().is_some_and(|step| step.kind.is_beside()) {
            self.remove_partial()?;
            self.lineage_mut().step = None;
        }
        // What others have changed before it was complete is to be seen after it.
        if self.changed().is_none() {
            self.note_stamp()?;
        }
        let lineage = self.lineage();
        let promoted_in = lineage.group.as_ref().map(ReplicaMembership::folder);
        let role = Role { promoted_in, ..lineage.role.promoted_so(promoted) };
        // What was kept of the past leads back from another state.
        self.lineage_mut().nonce = Uuid::new_v4();
        self.lineage_mut().role = role;
        self.lineage_mut().group = None;
        self.store()?;
        self.forget_note()?;
        self.refresh()
    }

    /// Keeps the last word of the source, that nothing was written to it after `released`; durable on return.
    ///
    /// # Errors
    /// Refused if the replica is not exactly that.
    pub fn release(&mut self, released: Released) -> Result<()> {
        self.sound()?;
        self.mergeable()?;
        let lineage = self.lineage();
        let exact =
            lineage.state != State::Incomplete && lineage.unsure.is_nothing() && lineage.step.is_none();
        if !exact || self.changed().is_some() || lineage.epoch != Some(released.epoch) {
            let at = lineage.epoch.map_or("no epoch".into(), |epoch| format!("epoch {epoch}"));
            return Err(ReplicaError::Refused(format!(
                "replica {} is at {at}, and its source ended at epoch {}: run the command again",
                self.path().display(),
                released.epoch
            )));
        }
        let lineage = self.lineage_mut();
        lineage.role.term = lineage.role.term.max(released.term);
        lineage.role.released = Some(Released { term: lineage.role.term, ..released });
        self.store()?;
        self.refresh()
    }
}

/// The group that is being promoted, and the folder of its replicas, where the disk at this path, without links, is one of those
/// that became sources, and not all of them are.
///
/// # Errors
/// If the folder of the group is there and cannot be read.
pub fn promotes_still(path: &Path, lineage: &Lineage) -> Result<Option<(String, PathBuf)>> {
    let role = &lineage.role;
    let (Some(_), Some(folder)) = (&role.promoted, &role.promoted_in) else { return Ok(None) };
    let folder = path.parent().unwrap_or(Path::new("/")).join(folder);
    let group = match Dir::existing(&folder) {
        Ok(dir) => promotes_still_by(&dir, lineage)?,
        // Nothing completes it.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(io_error("open", &folder)(e)),
    };
    let dir = folder.parent().unwrap_or(Path::new("/"));
    Ok(group.map(|group| (group, dir.to_path_buf())))
}

/// The name of the group that is being promoted, for [`promotes_still`], by what is written down in its folder.
///
/// # Errors
/// As [`promotes_still`].
#[doc(hidden)]
pub fn promotes_still_by(folder: &dyn Folder, lineage: &Lineage) -> Result<Option<String>> {
    let role = &lineage.role;
    let (Some(promoted), Some(_)) = (&role.promoted, &role.promoted_in) else { return Ok(None) };
    let intent = Intent::read(folder)?;
    let under_way = intent.filter(|intent| intent.marks(lineage.source, promoted));
    Ok(under_way.map(|intent| intent.group))
}

impl StepKind {
    /// True if the destination itself is untouched by such a step.
    fn is_beside(self) -> bool {
        matches!(self, StepKind::Clone { .. })
    }
}

/// What a source is known to have had more than its replica.
fn lacks(outlook: &Outlook) -> String {
    outlook
        .later
        .map_or(String::new(), |later| format!(", of which it is known to have reached epoch {later}"))
}

/// What of its own past a promotion costs a replica.
fn past_lost(outlook: &Outlook, path: &impl std::fmt::Display) -> String {
    match outlook.moments {
        0 => String::new(),
        1 => format!(", and the moment that is kept of before (\"dsync rewind {path}\" shows it)"),
        moments => format!(
            ", and the {moments} moments that are kept of before (\"dsync rewind {path}\" lists them)"
        ),
    }
}
