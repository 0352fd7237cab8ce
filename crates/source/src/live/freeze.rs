//! Freezing file systems for a moment, and thawing them whatever happens.
//!
//! A separate process ([`Watchdog`]) thaws if the freeze lasts too long, or if the freezing process dies.
//! Then the freeze is void, and [`Freeze::thaw`] fails.
//!
//! Writes are stopped by freezing the file systems on the disk, its partitions, and the devices above them.
//! Whatever takes time is done before: the page cache is written out, memory is touched, and the tracker's epoch is ended, for which the
//! kernel waits. So what is written between that and the freeze belongs to this epoch and to the next. A freeze waits for three RCU grace
//! periods; meanwhile `rcu_expedited` is on, without which they take most of the time. If a freeze took longer than its limit or ended
//! early, the sync fails.
//!
//! A peer of `dsync send --offer` gets no more freezes than `rests.rs` allows.
//!
//! A file system that is mounted in another mount namespace only, or that was unmounted lazily and is still in use, cannot be frozen from
//! here. The mount tables of all processes and `/sys/fs` (ext4, XFS, Btrfs, F2FS) show it, and the sync refuses unless `--freeze never`
//! is given. A file system of another type that is in no process's table is not detected.
//!
//! dsync's own state may be on a file system that is frozen: nothing is written to it between freeze and thaw, and the thread that reads
//! under the freeze waits for no other. The epoch is written to the history after the thaw, so each sync of such a disk changes it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use device::Mount;
use rustix::fs::FlockOperation;

use crate::disk::rests::Rests;
use crate::live::watchdog::{FITHAW, OFF, Watchdog, WatchdogArgs};

const FIFREEZE: u32 = 0xc004_5877;

/// Errors of a freeze.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// It failed to start; nothing is frozen.
    #[error("cannot freeze {}: {error}", place.display())]
    Refused {
        /// The file system.
        place: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It took longer than its limit: the watchdog thawed, and the data read may mix several moments.
    #[error("the freeze of {} took {} ms, longer than its limit of {} ms, because of slow writes or reads: the data read may mix several moments", place.display(), after.as_millis(), limit.as_millis())]
    TooLong {
        /// The file system.
        place: PathBuf,
        /// How long it took, including the wait for writes in progress.
        after: Duration,
        /// The limit.
        limit: Duration,
    },
    /// Another program thawed it before its end.
    #[error("the freeze of {} ended early, after {} ms: the data read may mix several moments", place.display(), after.as_millis())]
    Thawed {
        /// The file system.
        place: PathBuf,
        /// How long it lasted at most.
        after: Duration,
    },
}

/// File systems that are frozen until this is thawed or dropped.
pub struct Freeze {
    mounts: Vec<(PathBuf, File)>,
    /// The numbers of all of them.
    devs: Vec<u64>,
    clock: Clock,
    /// Both end when everything is thawed.
    _hurry: Option<ExpeditedRcu>,
    _watchdog: Watchdog,
}

/// The start of a freeze, and its limit.
#[derive(Clone, Copy)]
struct Clock {
    began: Instant,
    limit: Duration,
}

impl Clock {
    /// # Errors
    /// If the limit has passed.
    fn within(&self, place: &Path) -> Result<Duration, FreezeError> {
        let (after, limit) = (self.began.elapsed(), self.limit);
        if after > limit {
            return Err(FreezeError::TooLong { place: place.to_path_buf(), after, limit });
        }
        Ok(after)
    }
}

/// File systems about to be frozen; the watchdog is running.
pub struct PreparedFreeze {
    mounts: Vec<(PathBuf, File)>,
    devs: Vec<u64>,
    rcu: Option<ExpeditedRcu>,
    watchdog: Watchdog,
    limit: Duration,
}

/// A run of [`flush`] within this time leaves little to write.
const SHORT: Duration = Duration::from_millis(20);
/// Under load each run leaves what was written meanwhile: more runs do not help.
const RUNS: usize = 4;

impl PreparedFreeze {
    /// Writes out the file systems' caches until little is left, so that a freeze has little to write
    /// while all writers wait.
    pub fn settle(&self) -> Result<(), FreezeError> {
        let mut before = Duration::MAX;
        for _ in 0..RUNS {
            let began = Instant::now();
            self.mounts.iter().try_for_each(flush_one)?;
            let took = began.elapsed();
            if took < SHORT || took > before / 4 * 3 {
                break;
            }
            before = took;
        }
        Ok(())
    }

    /// Freezes them, and starts the time.
    ///
    /// A freeze waits for writes in progress and cannot be interrupted: with a write that does not end
    /// this does not return.
    ///
    /// # Errors
    /// If one cannot be frozen, or not within the limit; then none is.
    pub fn freeze(self) -> Result<Freeze, FreezeError> {
        let PreparedFreeze { mounts, devs, rcu, watchdog, limit } = self;
        rcu.iter().for_each(ExpeditedRcu::begin);
        let clock = Clock { began: Instant::now(), limit };
        // Dropping the freeze thaws what was frozen.
        let mut freeze = Freeze { mounts: Vec::new(), devs, clock, _hurry: rcu, _watchdog: watchdog };
        for (place, file) in mounts {
            if let Err(error) = freeze._watchdog.begin() {
                return Err(FreezeError::Refused { place, error });
            }
            if let Err(error) = control(&file, FIFREEZE) {
                return Err(FreezeError::Refused { place, error: explained(error) });
            }
            freeze.mounts.push((place.clone(), file));
            clock.within(&place)?;
        }
        Ok(freeze)
    }
}

/// Why a file system cannot be frozen, if the system's own message is unclear.
fn explained(error: io::Error) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::EBUSY) => {
            "it is already frozen, by another program or by one that was killed: if none is running, thaw it with \
             \"fsfreeze --unfreeze\""
        }
        Some(libc::EOPNOTSUPP) => "this type of file system cannot be frozen",
        _ => return error,
    };
    io::Error::new(error.kind(), why)
}

impl Freeze {
    /// Prepares to freeze file systems, for at most `limit`.
    pub fn prepare(mounts: &[Mount], limit: Duration) -> Result<PreparedFreeze, FreezeError> {
        let devs = mounts.iter().map(|mount| mount.dev).collect();
        let mounts = mounts.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let rcu = ExpeditedRcu::ready();
        let args = WatchdogArgs {
            frozen: mounts.iter().map(|(_, file)| file.as_fd()).collect(),
            rcu: rcu.as_ref().map(|switch| switch.0.as_fd()),
            limit,
        };
        let watchdog = Watchdog::start(&args).map_err(|error| refused(&mounts, error))?;
        Ok(PreparedFreeze { mounts, devs, rcu, watchdog, limit })
    }

    /// Thaws. Returns how long the freeze lasted.
    ///
    /// # Errors
    /// If it lasted longer than its limit, or had ended before.
    pub fn thaw(mut self) -> Result<Duration, FreezeError> {
        let Some(first) = self.mounts.first().map(|(place, _)| place.clone()) else {
            return Ok(Duration::ZERO);
        };
        let early = self.end();
        // Checked afterwards: the watchdog may have thawed at any moment beyond the limit.
        let after = self.clock.within(&first)?;
        match early {
            None => Ok(after),
            Some(place) => Err(FreezeError::Thawed { place, after }),
        }
    }

    /// Thaws everything. Returns the first file system that was not frozen any more.
    fn end(&mut self) -> Option<PathBuf> {
        let mut early = None;
        for (place, file) in self.mounts.drain(..).rev() {
            if control(&file, FITHAW).is_err() {
                early = Some(place);
            }
        }
        early
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        self.end();
        // The time that they had is over anyway.
        let lasted = self.clock.began.elapsed();
        let _ = Rests::of_file_systems(self.devs.drain(..)).map(|rests| rests.add(lasted));
    }
}

/// Writes out the caches of file systems.
pub(crate) fn flush(mounts: &[Mount]) -> Result<(), FreezeError> {
    mounts.iter().try_for_each(|mount| flush_one(&open(mount)?))
}

fn flush_one((place, file): &(PathBuf, File)) -> Result<(), FreezeError> {
    rustix::fs::syncfs(file).map_err(|e| FreezeError::Refused { place: place.clone(), error: e.into() })
}

/// Opens a file system where it is mounted and nothing is mounted over it.
#[allow(clippy::disallowed_methods, reason = "the root of a mounted file system")]
fn open(mount: &Mount) -> Result<(PathBuf, File), FreezeError> {
    let mut covered = None;
    for place in &mount.places {
        let refused = |error| FreezeError::Refused { place: place.clone(), error };
        let opened = File::open(place).map_err(refused)?;
        if device::file_system(&opened).map_err(refused)? == mount.dev {
            return Ok((place.clone(), opened));
        }
        covered.get_or_insert(place);
    }
    let error = io::Error::other(
        "another file system is mounted over it or in its place: unmount that one, or mount the hidden one in a second place",
    );
    Err(FreezeError::Refused { place: covered.cloned().unwrap_or_default(), error })
}

/// An error that concerns no single file system.
fn refused(mounts: &[(PathBuf, File)], error: io::Error) -> FreezeError {
    FreezeError::Refused { place: mounts.first().map(|(place, _)| place.clone()).unwrap_or_default(), error }
}

fn control(file: &File, request: u32) -> io::Result<()> {
    // SAFETY: both requests ignore their argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The kernel's switch for expedited RCU grace periods. A freeze waits for three, which take 30 ms or more
/// without it and less than one with it; the price is an interrupt on every processor for each.
struct ExpeditedRcu(File);

impl ExpeditedRcu {
    /// `None` if there is no such switch, it is on already, or another freeze has it.
    #[allow(clippy::disallowed_methods, reason = "in sysfs")]
    fn ready() -> Option<ExpeditedRcu> {
        let switch = File::options().read(true).write(true).open("/sys/kernel/rcu_expedited").ok()?;
        rustix::fs::flock(&switch, FlockOperation::NonBlockingLockExclusive).ok()?;
        let mut is_on = [0];
        (switch.read_at(&mut is_on, 0).ok()? == 1 && &is_on == OFF).then_some(ExpeditedRcu(switch))
    }

    fn begin(&self) {
        // Without it the freeze only takes longer.
        let _ = self.0.write_at(ON, 0);
    }
}

impl Drop for ExpeditedRcu {
    fn drop(&mut self) {
        let _ = self.0.write_at(OFF, 0);
    }
}

const ON: &[u8; 1] = b"1";
