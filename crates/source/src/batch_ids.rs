//! The ids of batches. Each says in which session of a server the batch was made, and as which of that: so a source whose disk and state
//! went back together, as a hypervisor's snapshot does it, is told by a replica that got a later batch. A source that ends hands over what it knows to
//! whichever takes over, which can then tell the same.
//!
//! What may have been sent is noted before it is: a crash leaves no replica with a batch that its source does not know.

use std::time::{Duration, Instant};

use device::Folder;
use serde::{Deserialize, Serialize};
use uuid::{Builder, Uuid};

use crate::SourceError;
use crate::json::{read_json, write_json};

const NAME: &str = "batches";

/// Sessions that are remembered; of a batch of an earlier one nothing is said.
const MOST: usize = 256;

/// The bits of a term that are in an id.
const TERM: u64 = (1 << 12) - 1;

/// Where batches follow each other in less than that, more of them are noted at once.
const NOTED_EVERY: Duration = Duration::from_secs(1);

/// The sessions in which a source was followed, oldest first, in its own term and in those before of which it was told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSessions(Vec<Session>);

/// One session of a server, in the course of which it was followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    term: u64,
    /// 0 if there was none in this term. Counts the source's sessions, from 1.
    number: u32,
    /// Random, 48 bits: after a step back, a number is given once more.
    tag: u64,
    /// Batches that may have been sent.
    batches: u32,
}

/// Gives ids to the batches of this session.
#[derive(Debug, Default)]
pub(crate) struct BatchIds {
    session: Option<Session>,
    /// Ids given out.
    given: u32,
    /// How many were noted at once, and when.
    noted: Option<(u32, Instant)>,
}

impl Session {
    /// The id of the batch of this number. The version takes four bits of the seventh byte, and the variant two of the ninth.
    fn id(&self, batch: u32) -> Uuid {
        let mut bytes = [0; 16];
        bytes[..6].copy_from_slice(&self.tag.to_be_bytes()[2..]);
        bytes[6..8].copy_from_slice(&self.term.to_be_bytes()[6..]);
        bytes[9..12].copy_from_slice(&self.number.to_be_bytes()[1..]);
        bytes[12..].copy_from_slice(&batch.to_be_bytes());
        Builder::from_custom_bytes(bytes).into_uuid()
    }

    /// The session of an id, as of its batch; `None` if it is not one of these. Of the term there are 12 bits.
    fn of(id: &Uuid) -> Option<Session> {
        let bytes = id.as_bytes();
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let batches = number(&bytes[12..]) as u32;
        let term = number(&bytes[6..8]) & TERM;
        let session =
            Session { term, number: number(&bytes[9..12]) as u32, tag: number(&bytes[..6]), batches };
        (session.id(batches) == *id).then_some(session)
    }

    fn is_of(&self, term: u64) -> bool {
        self.term & TERM == term & TERM
    }
}

impl BatchSessions {
    const LAST: u32 = (1 << 24) - 1;

    /// Those that are known in the folder of a source's state, or in that of a replica which was told.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn read(folder: &dyn Folder) -> Result<BatchSessions, SourceError> {
        read_json(folder, NAME).map(Option::unwrap_or_default)
    }

    /// Durable on return.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&self, folder: &dyn Folder) -> Result<(), SourceError> {
        write_json(folder, NAME, self)
    }

    /// What a source knows in the end, of a term that has ended.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn of_ended(folder: &dyn Folder, term: u64) -> Result<BatchSessions, SourceError> {
        let mut sessions = BatchSessions::read(folder)?;
        if !sessions.0.iter().any(|session| session.is_of(term)) {
            // That there was none tells as much.
            sessions.push(Session { term, number: 0, tag: 0, batches: 0 });
        }
        Ok(sessions)
    }

    /// True if another host may have sent them.
    pub fn is_sound(&self) -> bool {
        self.0.len() <= MOST
    }

    fn push(&mut self, session: Session) {
        self.0.retain(|known| !known.is_of(session.term) || known.number < session.number);
        self.0.push(session);
        self.0.drain(..self.0.len().saturating_sub(MOST));
    }

    /// Whether a batch is one of them. `None` where nothing tells.
    fn have(&self, batch: &Session, term: u64) -> Option<bool> {
        let mut known = self.0.iter().filter(|session| session.is_of(batch.term)).peekable();
        match known.peek() {
            None if batch.is_of(term) => Some(false),
            None => None,
            // Older ones are forgotten.
            Some(first) if first.number > 1 && batch.number < first.number => None,
            Some(_) => Some(known.any(|ours| {
                (ours.number, ours.tag) == (batch.number, batch.tag) && batch.batches <= ours.batches
            })),
        }
    }
}

impl BatchIds {
    /// The id of the next batch. Where it cannot be noted it is a random one, which says nothing: replication goes on.
    pub(crate) fn next(&mut self, folder: &dyn Folder, term: u64) -> Uuid {
        self.noted(folder, term).ok().flatten().unwrap_or_else(Uuid::new_v4)
    }

    /// `None` once there are no more numbers.
    fn noted(&mut self, folder: &dyn Folder, term: u64) -> Result<Option<Uuid>, SourceError> {
        if let (Some(session), Some((_, at))) = (&self.session, self.noted) {
            // What was noted ahead lapses: a state that is restored to here would know it.
            if at.elapsed() >= NOTED_EVERY {
                self.given = session.batches;
            }
        }
        let session = match self.session.filter(|session| self.given < session.batches) {
            Some(session) => session,
            None => {
                let mut sessions = BatchSessions::read(folder)?;
                let last = sessions.0.iter().rev().find(|session| session.is_of(term));
                let number = last.map_or(0, |last| last.number) + 1;
                let begun =
                    || Session { term, number, tag: Uuid::new_v4().as_u64_pair().0 >> 16, batches: 0 };
                let mut session = self.session.unwrap_or_else(begun);
                let soon = self.noted.filter(|(_, at)| at.elapsed() < NOTED_EVERY);
                let more = soon.map_or(1, |(more, _)| more.saturating_mul(2));
                session.batches = session.batches.saturating_add(more);
                if session.number > BatchSessions::LAST || session.batches == self.given {
                    return Ok(None);
                }
                sessions.push(session);
                sessions.write(folder)?;
                self.noted = Some((more, Instant::now()));
                *self.session.insert(session)
            }
        };
        self.given += 1;
        Ok(Some(session.id(self.given)))
    }
}

/// Whether a batch was made by the source in this term, or in one before of which it was told: one that it would know then, and does not, was not.
/// `None` where nothing tells.
pub(crate) fn is_ours(id: &Uuid, folder: &dyn Folder, term: u64) -> Result<Option<bool>, SourceError> {
    let Some(batch) = Session::of(id) else { return Ok(None) };
    match BatchSessions::read(folder) {
        // What was in it is not known, and syncs do not depend on it.
        Err(SourceError::Damaged { .. }) => Ok(None),
        known => Ok(known?.have(&batch, term)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Dir;

    fn folder() -> (tempfile::TempDir, Dir) {
        let place = tempfile::tempdir().unwrap();
        let folder = Dir::open(place.path()).unwrap();
        (place, folder)
    }

    #[test]
    fn an_id_says_of_which_session_it_is() {
        let session = Session { term: 7, number: 0xabcdef, tag: 0x1234_5678_9abc, batches: u32::MAX };
        assert_eq!(Session::of(&session.id(u32::MAX)), Some(session));
        assert_eq!(Session::of(&Session { term: 4096 + 7, ..session }.id(u32::MAX)), Some(session));
        assert_eq!(Session::of(&Uuid::new_v4()), None);
        assert_eq!(Session::of(&Uuid::nil()), None);
    }

    #[test]
    fn a_source_that_went_back_does_not_know_later_batches() {
        let (_place, folder) = folder();
        let ours = |id: &Uuid| is_ours(id, &folder, 1).unwrap() != Some(false);
        let mut first = BatchIds::default();
        let one = first.next(&folder, 1);
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        // Some are noted ahead, so it takes a few.
        let later: Vec<Uuid> = (0..10).map(|_| first.next(&folder, 1)).collect();
        let another = BatchIds::default().next(&folder, 1);
        let ids: Vec<Uuid> =
            [one].into_iter().chain(later.clone()).chain([another, Uuid::new_v4()]).collect();
        assert!(ids.iter().all(ours), "{ids:?}");
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), ids.len());
        // Back: what followed is unknown, also where the number of a session was given once more.
        std::fs::write(folder.path().join(NAME), before).unwrap();
        assert!(ours(&one) && !ours(&later[0]) && !ours(&later[9]) && !ours(&another));
        let mut again = BatchIds::default();
        let new: Vec<Uuid> = (0..10).map(|_| again.next(&folder, 1)).collect();
        assert!(ours(&one) && new.iter().all(ours) && !ours(&later[0]) && !ours(&another));
        std::fs::remove_file(folder.path().join(NAME)).unwrap();
        assert!(!ours(&one) && ours(&Uuid::new_v4()));
    }

    #[test]
    fn what_was_noted_ahead_lapses() {
        let (_place, folder) = folder();
        let mut ids = BatchIds::default();
        (0..100).for_each(|_| _ = ids.next(&folder, 1));
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        std::thread::sleep(NOTED_EVERY);
        let later = ids.next(&folder, 1);
        assert_eq!(is_ours(&later, &folder, 1).unwrap(), Some(true));
        std::fs::write(folder.path().join(NAME), before).unwrap();
        assert_eq!(is_ours(&later, &folder, 1).unwrap(), Some(false));
        std::fs::write(folder.path().join(NAME), "nonsense").unwrap();
        assert_eq!(is_ours(&later, &folder, 1).unwrap(), None);
    }

    #[test]
    fn of_forgotten_sessions_nothing_is_said() {
        let (_place, folder) = folder();
        let first = BatchIds::default().next(&folder, 1);
        for _ in 0..MOST {
            assert_eq!(is_ours(&first, &folder, 1).unwrap(), Some(true));
            BatchIds::default().next(&folder, 1);
        }
        assert_eq!(is_ours(&first, &folder, 1).unwrap(), None);
        assert_eq!(BatchSessions::read(&folder).unwrap().0.len(), MOST);
    }

    #[test]
    fn who_takes_over_knows_what_was_handed_over() {
        let (_place, folder) = folder();
        let one = BatchIds::default().next(&folder, 1);
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        let later = BatchIds::default().next(&folder, 1);
        // In the second term nothing was mirrored, and of the third nothing is known.
        std::fs::write(folder.path().join(NAME), before).unwrap();
        BatchSessions::of_ended(&folder, 1).unwrap().write(&folder).unwrap();
        BatchSessions::of_ended(&folder, 2).unwrap().write(&folder).unwrap();
        let [of_two, of_three] = [2, 3].map(|term| Session { term, number: 1, tag: 7, batches: 1 }.id(1));
        let made = |id: &Uuid| is_ours(id, &folder, 4).unwrap();
        assert_eq!(
            [&one, &later, &of_two, &of_three].map(made),
            [Some(true), Some(false), Some(false), None]
        );
        let own = BatchIds::default().next(&folder, 4);
        assert_eq!([&own, &one, &later].map(made), [Some(true), Some(true), Some(false)]);
    }

    #[test]
    fn what_follows_quickly_is_noted_together() {
        let (_place, folder) = folder();
        let (mut ids, mut noted) = (BatchIds::default(), Vec::new());
        for _ in 0..100 {
            ids.next(&folder, 1);
            noted.push(BatchSessions::read(&folder).unwrap().0[0].batches);
        }
        noted.dedup();
        assert!(noted.len() < 20, "{noted:?}");
    }
}
