//! The lives of a source, by which it is told who is ahead of whom (`crates/lineage`). One begins with the source, with each opening for
//! writing, and with each promotion; cuts and the batches of mirrors are numbered within it. So a source whose disk and state went back
//! together, as a hypervisor's snapshot does it, is told by a replica that got a later batch.
//!
//! What may have been sent is noted before it is: a crash leaves no replica with a batch that its source does not know.
//!
//! Each batch is noted by itself unless they come more than once a second; then twice as many as the last time are noted at once, so that
//! the disk is synced about once a second however short the interval is. What was restored to less than that before the last batch is not
//! noticed. A batch that cannot be noted is not made. A server that went back together with the memory of its host is told by the first
//! replica that it meets which is further in its life: that life ends there, and no batch of it is taken until the server is started
//! again. What ends an epoch before such a replica is met is not noticed.

use std::time::{Duration, Instant};

use delta::Epoch;
use device::Folder;
use lineage::{Lives, Point};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::SourceError;
use crate::record::json::{read_json, write_json};
use crate::record::state::{SourceMetadata, about_in, write_about};

const NAME: &str = "batches";

/// Where batches follow each other in less than that, more of them are noted at once.
const NOTED_EVERY: Duration = Duration::from_secs(1);

/// The batches of a life that may have been sent: up to this one.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Drawn(Point);

/// The last batch of a source's present life that may have been sent.
fn drawn(folder: &dyn Folder, about: &SourceMetadata) -> Result<Option<Point>, SourceError> {
    let drawn: Option<Drawn> = match read_json(folder, NAME) {
        // A replica that got one counts as ahead then.
        Err(SourceError::Damaged { .. }) => None,
        drawn => drawn?,
    };
    let present = about.lives.lives().first().map(|life| life.life);
    Ok(drawn.map(|Drawn(point)| point).filter(|point| Some(point.life) == present))
}

/// The lives that led to what a source is now, with the last of its epochs.
///
/// # Errors
/// If its state cannot be read.
pub fn lives(folder: &dyn Folder, about: &SourceMetadata, last: Option<Epoch>) -> Result<Lives, SourceError> {
    let drawn = drawn(folder, about)?.map_or(0, |drawn| drawn.n);
    let mut lives = about.lives.clone();
    let begun = lives.lives().iter().skip(1).map(Point::cut).max().unwrap_or(0);
    if let Some(last) = last.filter(|last| last.number > begun) {
        lives = lives.reaching(Point::number(last.number, 0));
    }
    Ok(lives.reaching(drawn))
}

/// Begins a life where the source is now; durable on return.
///
/// # Errors
/// If that cannot be written.
pub(crate) fn begin(
    folder: &dyn Folder,
    about: &mut SourceMetadata,
    last: Option<Epoch>,
) -> Result<(), SourceError> {
    about.lives = lives(folder, about, last)?.and(Uuid::new_v4());
    note(folder, about)
}

/// Leaves the way that led to what a source was: its content is another one, and nothing tells from which moment. From then on no earlier replica
/// counts as behind it until its user says so, and that stays with the disk through promotions and demotions. Durable on return.
///
/// # Errors
/// As [`begin`].
pub(crate) fn leave(folder: &dyn Folder) -> Result<(), SourceError> {
    let Some(about) = about_in(folder)? else { return Ok(()) };
    let lives = Lives::of(vec![Point { life: Uuid::new_v4(), n: 0 }], false);
    write_about(folder, &SourceMetadata { lives, ..about })
}

fn note(folder: &dyn Folder, about: &SourceMetadata) -> Result<(), SourceError> {
    // The path may have been noted since.
    let known = about_in(folder)?.unwrap_or_else(|| about.clone());
    write_about(folder, &SourceMetadata { lives: about.lives.clone(), ..known })
}

/// Begins a life where a source is opened for writing; and where it is only read, if batches of its present life may have been sent: that may end
/// epochs, too, and a state that went back does not know all of those batches.
///
/// # Errors
/// As [`begin`].
pub(crate) fn open(
    folder: &dyn Folder,
    about: &mut SourceMetadata,
    last: Option<Epoch>,
    read_only: bool,
) -> Result<(), SourceError> {
    if let Some(known) = about_in(folder)? {
        // The way may have been left since.
        about.lives = known.lives;
    }
    if !read_only || drawn(folder, about)?.is_some() { begin(folder, about, last) } else { Ok(()) }
}

/// Numbers the batches of a source's present life.
#[derive(Debug, Default)]
pub(crate) struct BatchNumbers {
    /// The last one.
    last: u64,
    /// Up to which they are noted, how many were noted at once, and when.
    noted: Option<(u64, u64, Instant)>,
}

impl BatchNumbers {
    /// The next batch after the cut of this number. To be called in the order of the moments that batches show.
    ///
    /// # Errors
    /// If it cannot be noted, or there are no more numbers.
    pub(crate) fn next(&mut self, folder: &dyn Folder, life: Uuid, cut: u64) -> Result<Point, SourceError> {
        let mut n = self.last.max(Point::number(cut, 0)) + 1;
        if let Some((upto, _, at)) = self.noted {
            // What was noted ahead lapses: a state that is restored to here would know it.
            if at.elapsed() >= NOTED_EVERY && upto >= n {
                n = upto + 1;
            }
        }
        if Point::cut(&Point { life, n }) != cut {
            let why = "too many batches have followed its last epoch: stop the mirror, run \"dsync sync\", and start it again";
            return Err(SourceError::Refused(why.into()));
        }
        if self.noted.is_none_or(|(upto, ..)| upto < n) {
            let soon = self.noted.filter(|(.., at)| at.elapsed() < NOTED_EVERY);
            let more = soon.map_or(1, |(_, more, _)| more.saturating_mul(2));
            let upto = n.saturating_add(more - 1).min(Point::number(cut, Point::MOST_BATCHES));
            write_json(folder, NAME, &Drawn(Point { life, n: upto }))?;
            self.noted = Some((upto, more, Instant::now()));
        }
        self.last = n;
        Ok(Point { life, n })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use device::{Dir, Disk};

    use crate::handle::Handle;
    use crate::record::state::{ABOUT, StateDir};
    use crate::source::{Source, SourceOptions};

    fn scene() -> (tempfile::TempDir, Dir, SourceMetadata) {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("disk"), [0; 4096]).unwrap();
        let identity = device::identity(&place.path().join("disk")).unwrap();
        let folder = Dir::open(&place.path().join("state")).unwrap();
        let about = SourceMetadata::new(Uuid::new_v4(), identity, 4096);
        write_about(&folder, &about).unwrap();
        (place, folder, about)
    }

    fn epoch(number: u64) -> Option<Epoch> {
        Some(Epoch { number, id: Uuid::from_u128(number.into()) })
    }

    #[test]
    fn a_source_that_went_back_does_not_know_later_batches() {
        let (_place, folder, mut about) = scene();
        begin(&folder, &mut about, epoch(3)).unwrap();
        let life = about.lives.lives()[0].life;
        let knows =
            |about: &SourceMetadata, point: &Point| lives(&folder, about, epoch(3)).unwrap().has(point);
        let mut batches = BatchNumbers::default();
        let one = batches.next(&folder, life, 3).unwrap();
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        // Some are noted ahead, so it takes a few.
        let later: Vec<Point> = (0..10).map(|_| batches.next(&folder, life, 3).unwrap()).collect();
        assert!(later.iter().chain([&one]).all(|point| knows(&about, point)));
        assert_eq!(later.iter().map(|point| point.n).collect::<std::collections::BTreeSet<_>>().len(), 10);
        // Back: what followed is unknown, also once another life has begun.
        std::fs::write(folder.path().join(NAME), before).unwrap();
        assert!(knows(&about, &one) && !knows(&about, &later[0]) && !knows(&about, &later[9]));
        begin(&folder, &mut about, epoch(3)).unwrap();
        let next = about.lives.lives()[0].life;
        let again: Vec<Point> =
            (0..10).map(|_| BatchNumbers::default().next(&folder, next, 3).unwrap()).collect();
        assert!(knows(&about, &one) && knows(&about, &again[0]) && !knows(&about, &later[0]));
        std::fs::write(folder.path().join(NAME), "nonsense").unwrap();
        assert!(knows(&about, &one) && !knows(&about, &again[0]));
    }

    /// After the batches of a server, also what only reads begins a life: its epochs follow none of those that a state which went back has
    /// forgotten.
    #[test]
    fn no_epoch_at_rest_goes_on_in_a_life_that_has_batches() {
        let (_place, folder, mut about) = scene();
        open(&folder, &mut about, epoch(1), false).unwrap();
        let served = about.lives.clone();
        open(&folder, &mut about, epoch(1), true).unwrap();
        assert_eq!(about.lives, served, "nothing was sent");
        let before = std::fs::read(folder.path().join(ABOUT)).unwrap();
        let (life, mut batches) = (served.lives()[0].life, BatchNumbers::default());
        let noted = batches.next(&folder, life, 1).unwrap();
        let files = [(ABOUT, before), (NAME, std::fs::read(folder.path().join(NAME)).unwrap())];
        let forgotten = [(); 3].map(|()| batches.next(&folder, life, 1).unwrap())[2];
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        open(&folder, &mut about, epoch(1), true).unwrap();
        let after = lives(&folder, &about, epoch(2)).unwrap();
        assert!(after.has(&noted) && !after.has(&forgotten), "{after:?}");
    }

    /// Its process goes on in its life, and a replica knows batches of that which it does not.
    #[test]
    fn a_server_that_went_back_with_its_memory_goes_on_in_another_life() {
        let place = tempfile::tempdir().unwrap();
        let disk = place.path().join("disk");
        std::fs::File::create_new(&disk).and_then(|file| file.set_len(1 << 20)).unwrap();
        let state = StateDir::find(Some(&place.path().join("state")));
        let source = Source::open(&state, &disk, &SourceOptions::default()).unwrap();
        source.checkpoint(false).unwrap();
        let source = Arc::new(source);
        let handle = Handle::of_server(&source).unwrap();
        let served = handle.lives().unwrap();
        let life = served.lives()[0].life;
        // One of another source says nothing, and one that is further in this life does.
        handle.branch(&Lives::first(Uuid::from_u128(7))).unwrap();
        assert_eq!(handle.lives().unwrap(), served);
        let later = served.clone().reaching(Point::number(1, 9));
        let follower = source.disk().follow();
        source.disk().write_at(0, &[5; 4096]).unwrap();
        assert!(source.batch_changes(&follower, None, false).unwrap().is_some());
        let served = handle.lives().unwrap();
        handle.branch(&later).unwrap();
        // Whoever follows it already gets no batch of the old life.
        source.disk().write_at(0, &[6; 4096]).unwrap();
        let refused = source.batch_changes(&follower, None, false).unwrap_err();
        assert!(refused.to_string().contains("start it again"), "{refused}");
        source.disk().write_at(0, &[7; 4096]).unwrap();
        source.checkpoint(false).unwrap();
        let now = handle.lives().unwrap();
        assert!(now.lives()[0].life != life && now.tip().unwrap().cut() == 2, "{now:?}");
        assert_eq!(now.relation(&later), lineage::Branch::Forked(*served.tip().unwrap()));
        drop(handle);
    }

    #[test]
    fn what_was_noted_ahead_lapses() {
        let (_place, folder, mut about) = scene();
        begin(&folder, &mut about, epoch(1)).unwrap();
        let life = about.lives.lives()[0].life;
        let mut batches = BatchNumbers::default();
        (0..100).for_each(|_| _ = batches.next(&folder, life, 1).unwrap());
        let before = std::fs::read(folder.path().join(NAME)).unwrap();
        std::thread::sleep(NOTED_EVERY);
        let later = batches.next(&folder, life, 1).unwrap();
        assert!(lives(&folder, &about, epoch(1)).unwrap().has(&later));
        std::fs::write(folder.path().join(NAME), before).unwrap();
        assert!(!lives(&folder, &about, epoch(1)).unwrap().has(&later));
    }

    #[test]
    fn what_follows_quickly_is_noted_together() {
        let (_place, folder, about) = scene();
        let (mut batches, mut noted) = (BatchNumbers::default(), Vec::new());
        for _ in 0..100 {
            batches.next(&folder, about.uuid, 1).unwrap();
            noted.push(read_json::<Drawn>(&folder, NAME).unwrap().unwrap().0.n);
        }
        noted.dedup();
        assert!(noted.len() < 20, "{noted:?}");
    }

    /// An epoch that was there when a life began is of the one before.
    #[test]
    fn a_life_has_the_epochs_since_it_began() {
        let (_place, folder, mut about) = scene();
        let first = about.lives.lives()[0].life;
        let at =
            |about: &SourceMetadata, number| *lives(&folder, about, epoch(number)).unwrap().tip().unwrap();
        assert_eq!(at(&about, 3), Point { life: first, n: Point::number(3, 0) });
        begin(&folder, &mut about, epoch(3)).unwrap();
        assert_eq!(at(&about, 3), Point { life: first, n: Point::number(3, 0) });
        // Nothing was cut in it: the next one begins there, too.
        begin(&folder, &mut about, epoch(3)).unwrap();
        assert_eq!(at(&about, 3), Point { life: first, n: Point::number(3, 0) });
        let next = at(&about, 4);
        assert_eq!((next.life, next.cut()), (about.lives.lives()[0].life, 4));
        assert_eq!(about_in(&folder).unwrap().unwrap().lives, about.lives);
    }
}
