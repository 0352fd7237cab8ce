//! What users of a file server do to its disk: files of all sizes are made, written again, changed within, longer, renamed and removed.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use dsync_tests::Random;

/// Users at work, until they are dropped.
pub(crate) struct Churn {
    stop: Arc<AtomicBool>,
    users: Vec<JoinHandle<Result<()>>>,
}

impl Churn {
    /// So many users, each in a folder of its own below `folder`, which is made or gone on with.
    pub(crate) fn start(folder: &Path, users: u64, random: &mut Random) -> Result<Churn> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut churn = Churn { stop: stop.clone(), users: Vec::new() };
        for number in 0..users {
            let mut user = User::new(&folder.join(format!("user-{number}")), random.fork())?;
            let stop = stop.clone();
            churn.users.push(std::thread::spawn(move || {
                while !stop.load(Relaxed) {
                    user.act()?;
                    std::thread::sleep(Duration::from_millis(user.random.below(20)));
                }
                Ok(())
            }));
        }
        Ok(churn)
    }

    /// Waits until what they are at is done.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        let ended = self.users.drain(..).map(|user| user.join().map_err(|_| anyhow!("a user panicked"))?);
        ended.collect()
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for user in self.users.drain(..) {
            let _ = user.join();
        }
    }
}

/// One user, and the files there are.
pub(crate) struct User {
    folder: PathBuf,
    files: Vec<PathBuf>,
    next: u64,
    random: Random,
}

impl User {
    /// Above so many, as many are removed as are made.
    const FILES: usize = 200;

    pub(crate) fn new(folder: &Path, random: Random) -> Result<User> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
        // Folders list their entries in an order of their own.
        files.sort();
        let number = |file: &PathBuf| file.file_name()?.to_str()?.parse::<u64>().ok();
        let next = files.iter().filter_map(number).max().map_or(0, |last| last + 1);
        Ok(User { folder: folder.to_path_buf(), files, next, random })
    }

    /// From 1 KiB to 2 MiB, small ones as often as large ones.
    fn some_bytes(&mut self) -> Vec<u8> {
        let scale = self.random.below(11);
        let size = self.random.within((1 << 10) << scale..(1 << 11) << scale);
        self.random.bytes(size as usize)
    }

    fn new_name(&mut self) -> PathBuf {
        self.next += 1;
        self.folder.join((self.next - 1).to_string())
    }

    /// Makes one file.
    pub(crate) fn make(&mut self) -> Result<()> {
        let (file, content) = (self.new_name(), self.some_bytes());
        std::fs::write(&file, content).with_context(|| file.display().to_string())?;
        self.files.push(file);
        Ok(())
    }

    fn act(&mut self) -> Result<()> {
        if self.files.is_empty() {
            return self.make();
        }
        let at = self.random.index(self.files.len());
        let file = self.files[at].clone();
        let done: std::io::Result<()> = match self.random.below(100) {
            0..35 => {
                self.make()?;
                if self.files.len() <= Self::FILES {
                    Ok(())
                } else {
                    std::fs::remove_file(self.files.remove(at))
                }
            }
            35..55 => std::fs::write(&file, self.some_bytes()),
            55..70 => self.append(&file),
            70..85 => self.change_within(&file),
            85..92 => {
                let other = self.new_name();
                self.files[at] = other.clone();
                std::fs::rename(&file, other)
            }
            _ => std::fs::remove_file(self.files.remove(at)),
        };
        done.with_context(|| file.display().to_string())
    }

    fn append(&mut self, file: &Path) -> std::io::Result<()> {
        let len = self.random.within(100..20_000) as usize;
        let mut open = OpenOptions::new().append(true).open(file)?;
        open.write_all(&self.random.bytes(len))?;
        open.sync_all()
    }

    fn change_within(&mut self, file: &Path) -> std::io::Result<()> {
        let open: File = OpenOptions::new().write(true).open(file)?;
        let (len, at) = (self.random.within(512..65_536), self.random.below(open.metadata()?.len()));
        let len = len.min(open.metadata()?.len() - at) as usize;
        open.write_all_at(&self.random.bytes(len), at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_know_their_files_also_on_the_next_day() {
        let folder = tempfile::tempdir().unwrap();
        let mut user = User::new(folder.path(), Random::seeded(1)).unwrap();
        for _ in 0..400 {
            user.act().unwrap();
        }
        assert!(user.files.iter().all(|file| file.is_file()));
        let next = User::new(folder.path(), Random::seeded(2)).unwrap();
        assert_eq!(next.files.len(), user.files.len());
        assert!(!folder.path().join(next.next.to_string()).exists());
    }
}
