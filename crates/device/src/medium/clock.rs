//! The time by which file systems stamp their files, and the boot of the machine: they distinguish own writes from foreign
//! ones after a time without supervision.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::medium::storage::disks_beneath;

/// The clock by which file systems stamp their files, read without entering the kernel. They may stamp to the nanosecond
/// or by the tick before (Linux 6.13 does both), so a note is exact, and a stamp as early as a tick before it.
#[derive(Clone)]
pub struct Clock {
    now: Arc<dyn Fn() -> u64 + Send + Sync>,
    tick: u64,
}

impl Clock {
    /// The clock of this machine's kernel.
    pub fn system() -> Clock {
        let tick = rustix::time::clock_getres(rustix::time::ClockId::RealtimeCoarse);
        Clock { now: Arc::new(system), tick: (tick.tv_nsec.max(1) as u64).max(1_000_000) }
    }

    /// The clock of another machine, which stamps exactly. No two answers of `now` are equal.
    pub fn exact(now: impl Fn() -> u64 + Send + Sync + 'static) -> Clock {
        Clock { now: Arc::new(now), tick: 0 }
    }

    /// Nanoseconds since 1970: not before the stamp of any file written until now.
    pub fn now(&self) -> u64 {
        (self.now)()
    }

    /// Nanoseconds from one tick to the next.
    pub fn tick(&self) -> u64 {
        self.tick
    }

    /// Nanoseconds within which two changes of a file may be stamped alike that was stamped so.
    pub fn apart(&self, stamp: i64) -> u64 {
        if self.tick == 0 { 0 } else { self.tick.max(grain(stamp) as u64) }
    }

    /// True if no change from now on is stamped so.
    pub fn is_past(&self, stamp: i64) -> bool {
        self.now().saturating_sub(stamp.max(0) as u64) > self.apart(stamp)
    }
}

/// So many changes within one tick are stamped apart by no clock that ticks.
const CHANGES: usize = 16;

/// True if the file system of `file` never gives a change the time that a look before it has shown, also within one tick of the clock
/// (multigrain timestamps, since Linux 6.13). The file is grown for that. False where it could not be seen.
///
/// # Errors
/// If the file cannot be grown or looked at.
pub fn stamps_apart(file: &File) -> io::Result<bool> {
    let tick = || rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let grown = || {
        file.set_len(file.metadata()?.len() + 1)?;
        let now = file.metadata()?;
        io::Result::Ok((now.ctime(), now.ctime_nsec()))
    };
    for _ in 0..5 {
        let began = tick();
        let seen: Vec<_> = (0..CHANGES).map(|_| grown()).collect::<io::Result<_>>()?;
        // Otherwise ticks may have made the difference: this machine's, or those of the one that has the files, which are as long.
        if tick() == began {
            return Ok(seen.is_sorted_by(|before, after| before < after));
        }
    }
    Ok(false)
}

/// How coarse the times of a file system are that has stamped a file so, in nanoseconds, by the zeroes of `stamp`; never too fine. A second on an
/// ext4 of small inodes, two on FAT; 1 where times are finer than a millisecond.
pub fn grain(stamp: i64) -> i64 {
    const GRAINS: [i64; 5] = [2_000_000_000, 1_000_000_000, 100_000_000, 10_000_000, 1_000_000];
    GRAINS.into_iter().find(|grain| stamp != 0 && stamp % grain == 0).unwrap_or(1)
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").field("tick", &self.tick).finish_non_exhaustive()
    }
}

fn system() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (t.tv_sec.max(0) as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec.max(0) as u64)
}

/// The boot of the machine, and the diskseqs of the disks on which something is stored: one that was detached and
/// attached again may have lost what was not flushed, as in a power cut.
#[derive(Debug, Clone)]
pub struct Boot {
    /// The boot id. After each `#` the diskseqs of the disks beneath one path, outermost first, between
    /// slashes; none where the kernel shows no single disk.
    pub id: String,
    /// Nanoseconds since 1970 when it began.
    pub began: u64,
}

/// How a recorded boot relates to the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It is this one.
    This,
    /// Of this boot, but a disk was detached and attached again.
    Detached,
    /// Of another boot.
    Earlier,
}

impl Boot {
    /// How late a durable note of the last own write may be, in nanoseconds: such notes are written every few seconds.
    pub const LATE: u64 = 10_000_000_000;

    /// How long after the last note of a dying process its writes may still have stamped a file, in nanoseconds. Notes come
    /// every few milliseconds while writes are in flight. On a very busy machine the last write may come later, and the file
    /// is then doubted without need: a foreign write in that time is the worse mistake.
    pub const DYING: u64 = 50_000_000;

    /// This boot of the machine, with the attachments of the disks on which these paths are.
    pub fn of(paths: &[&Path]) -> Boot {
        let Boot { mut id, began } = Boot::current();
        for path in if id.is_empty() { &[] } else { paths } {
            let disks: Vec<String> = disks_beneath(path).iter().map(u64::to_string).collect();
            id = format!("{id}#{}", disks.join("/"));
        }
        Boot { id, began }
    }

    /// How the boot of this id relates to this one. Unknown disks count as the same.
    pub fn life(&self, id: &str) -> Life {
        let (mut this, mut that) = (self.id.split('#'), id.split('#'));
        if self.id.is_empty() || this.next() != that.next() {
            return Life::Earlier;
        }
        let differ = |(this, that): (&str, &str)| this != that && !this.is_empty() && !that.is_empty();
        let mut disks = this.zip(that).flat_map(|(this, that)| this.split('/').zip(that.split('/')));
        if disks.any(differ) { Life::Detached } else { Life::This }
    }

    /// This boot of the machine, without its disks.
    pub fn current() -> Boot {
        let id =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let began =
            stat.lines().find_map(|l| l.strip_prefix("btime ")).and_then(|t| t.trim().parse::<u64>().ok());
        Boot { id, began: began.unwrap_or(0).saturating_mul(1_000_000_000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grain_is_what_a_time_is_a_multiple_of() {
        for (stamp, expected) in [
            (1_764_000_000_123_456_789, 1),
            (1_764_000_000_123_456_780, 1),
            (0, 1),
            (1_764_000_000_120_000_000, 10_000_000),
            (1_764_000_001_000_000_000, 1_000_000_000),
            (1_764_000_000_000_000_000, 2_000_000_000),
        ] {
            assert_eq!(grain(stamp), expected, "{stamp}");
        }
    }

    /// What says that times are apart is believed: of each of many changes that follow a look within a tick.
    #[test]
    fn stamps_that_are_apart_differ_within_a_tick() {
        let file = tempfile::tempfile().unwrap();
        if !stamps_apart(&file).unwrap() {
            println!("SKIPPED: this file system stamps by ticks; not tested: changes within one");
            return;
        }
        let mut before = (0, 0);
        for _ in 0..10_000 {
            std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).unwrap();
            let now = file.metadata().map(|now| (now.ctime(), now.ctime_nsec())).unwrap();
            assert!(before < now, "{before:?} and then {now:?}");
            before = now;
        }
    }

    #[test]
    fn a_life_is_a_boots_and_its_disks() {
        let life = |this: &str, that: &str| Boot { id: this.into(), began: 0 }.life(that);
        for (this, that, expected) in [
            ("a", "a", Life::This),
            ("a", "b", Life::Earlier),
            ("", "", Life::Earlier),
            ("a#7/3#9", "a#7/3#9", Life::This),
            ("a#7/3#9", "a#8/3#9", Life::Detached),
            ("a#7/3#9", "a#7/4#9", Life::Detached),
            ("a#7/3#9", "a#7/3#10", Life::Detached),
            ("a#7/3#9", "b#7/3#9", Life::Earlier),
            // Recorded where no disk was known.
            ("a#7/3#9", "a", Life::This),
            ("a#7/3#9", "a##9", Life::This),
            ("a#7/3", "a#7", Life::This),
        ] {
            assert_eq!(life(this, that), expected, "{this} {that}");
        }
    }
}
