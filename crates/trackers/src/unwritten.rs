//! What a server could not write as it ended, of which it had told nobody: its clients may still count on it, and connect to the next one. Their
//! first flush there fails.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use device::Folder;

/// The file in which the reason stands, until somebody was told.
const NAME: &str = "unwritten";
/// Bytes of it that are read.
const MOST: u64 = 4096;

/// Whether flushes tell of what was lost.
pub(crate) struct Unwritten {
    /// Why the last flush of an earlier server failed.
    before: Option<String>,
    /// A client of this one was told that a flush has failed.
    told: AtomicBool,
}

impl Unwritten {
    /// Reads what an earlier server has left.
    pub(crate) fn open(folder: &dyn Folder) -> io::Result<Unwritten> {
        let before = match folder.open(NAME, false) {
            Ok(file) => {
                let mut text = vec![0; file.len()?.min(MOST) as usize];
                file.read_at(0, &mut text)?;
                Some(String::from_utf8_lossy(&text).into_owned())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Unwritten { before, told: AtomicBool::new(false) })
    }

    /// Why flushes fail.
    pub(crate) fn why(&self) -> Option<&str> {
        self.before.as_deref()
    }

    /// The result of what a client has asked to be durable.
    pub(crate) fn tell(&self, result: io::Result<()>) -> io::Result<()> {
        let result = match &self.before {
            Some(why) => result.and_then(|()| {
                Err(io::Error::other(format!(
                    "the server before could not write all that it had answered for ({why}): stop what uses the disk, start this server again, and that \
                     after it"
                )))
            }),
            None => result,
        };
        if result.is_err() {
            self.told.store(true, SeqCst);
        }
        result
    }

    /// Writes down why the last flush failed, unless a client was told of one. What was left before goes once somebody was.
    pub(crate) fn close(&self, folder: &dyn Folder, failed: Option<&io::Error>) -> io::Result<()> {
        match (self.told.load(SeqCst), failed) {
            (true, _) if self.before.is_some() => folder.remove(NAME).and_then(|()| folder.sync()),
            (false, Some(error)) => device::replace(folder, NAME, error.to_string().as_bytes()),
            _ => Ok(()),
        }
    }
}
