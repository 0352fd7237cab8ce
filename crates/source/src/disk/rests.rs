//! What a peer may ask for again and again makes others wait for a tenth of the time at most: what has made them wait, a freeze of a file system
//! or a clone of an image, rests for nine times as long before it is made for a peer again.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use device::{Boot, Dir, Folder};
use rustix::fs::{FlockOperation, OFlags};

use crate::SourceError;

/// How many times as long it rests.
const REST: u32 = 9;

/// Until when something rests, as all processes that use this folder know it: a file for each name, locked while it is read or written, with the
/// boot and the nanoseconds since.
pub(crate) struct Rests {
    dir: Dir,
    names: Vec<String>,
}

impl Rests {
    /// File systems, by their numbers.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub(crate) fn of_file_systems(devs: impl IntoIterator<Item = u64>) -> Result<Rests, SourceError> {
        let place = trackers::run_folder().join("rests");
        let dir = Dir::open(&place).map_err(SourceError::state("make", &place))?;
        let name = |dev| format!("{}:{}", libc::major(dev), libc::minor(dev));
        Ok(Rests { dir, names: devs.into_iter().map(name).collect() })
    }

    /// The image whose state is in this folder: a user who may clone it may write there, and not to the folder of those.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn of_image(state: &dyn Folder) -> Result<Rests, SourceError> {
        let dir = Dir::existing(state.path()).map_err(SourceError::state("open", state.path()))?;
        Ok(Rests { dir, names: vec!["rests".into()] })
    }

    /// Others had to wait for so long until now. The attempts of one cut add up.
    pub(crate) fn add(&self, lasted: Duration) -> io::Result<()> {
        self.add_at(lasted, uptime())
    }

    /// Refuses a peer while one of them rests; `path` is that of its source.
    ///
    /// # Errors
    /// That, and if it cannot be read.
    pub(crate) fn refuse(&self, path: &Path) -> Result<(), SourceError> {
        match self.any_at(uptime()).map_err(SourceError::state("look into", self.dir.path()))? {
            true => Err(SourceError::Rests(path.to_path_buf())),
            false => Ok(()),
        }
    }

    fn of(&self, name: &str) -> io::Result<(File, Duration)> {
        let file = self.dir.file(name, OFlags::RDWR | OFlags::CREATE, 0o600)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        let mut said = String::new();
        (&file).read_to_string(&mut said)?;
        let until = said.split_once(' ').filter(|(boot, _)| *boot == Boot::current().id);
        let until = until.and_then(|(_, nanos)| nanos.parse().ok()).unwrap_or(0);
        Ok((file, Duration::from_nanos(until)))
    }

    fn add_at(&self, lasted: Duration, now: Duration) -> io::Result<()> {
        self.names.iter().try_for_each(|name| {
            let (file, until) = self.of(name)?;
            let until = until.max(now) + lasted * REST;
            let said = format!("{} {}", Boot::current().id, until.as_nanos());
            file.set_len(0)?;
            file.write_all_at(said.as_bytes(), 0)
        })
    }

    fn any_at(&self, now: Duration) -> io::Result<bool> {
        self.names.iter().try_fold(false, |rests, name| Ok(rests || self.of(name)?.1 > now))
    }
}

/// The time since the boot, of all processes.
fn uptime() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec.max(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_wait_for_a_tenth_of_the_time() {
        let temp = tempfile::tempdir().unwrap();
        // Each call may be of another process.
        let of = |names: &[&str]| Rests {
            dir: Dir::open(temp.path()).unwrap(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        let rests = |name, now| of(&[name]).any_at(now).unwrap();
        let (now, second) = (uptime(), Duration::from_secs(1));
        assert!(!rests("a", now));
        of(&["a", "b"]).add_at(second, now).unwrap();
        for name in ["a", "b"] {
            assert!(rests(name, now + 9 * second - Duration::from_millis(1)));
            assert!(!rests(name, now + 9 * second));
        }
        assert!(!rests("c", now));
        // The second attempt of a cut.
        of(&["a"]).add_at(second, now + second).unwrap();
        assert!(rests("a", now + 17 * second));
        assert!(!rests("a", now + 18 * second) && !rests("b", now + 9 * second));
        // Of an earlier boot, or nonsense.
        for said in [format!("x {}", u64::MAX), "?".into()] {
            std::fs::write(temp.path().join("a"), said).unwrap();
            assert!(!rests("a", now));
        }
    }
}
