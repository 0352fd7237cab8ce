//! What a server could not write, of which it has told nobody: its clients may still count on it, and connect to the next one. Their flushes fail
//! there.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use device::Folder;

/// The file in which the reason stands, until somebody was told.
const NAME: &str = "unwritten";
/// Bytes of it that are read.
const MOST: u64 = 4096;

/// Whether flushes tell of what was lost.
pub(crate) struct Unwritten {
    /// Why a flush of an earlier server failed.
    before: Option<String>,
    /// A client was told of that.
    told_before: AtomicBool,
    /// A client was told that a flush of this one has failed.
    told: AtomicBool,
    /// It is written down.
    noted: AtomicBool,
}

impl Unwritten {
    /// Reads what an earlier server has left. Where it found no room for the reason, there is none.
    pub(crate) fn open(folder: &dyn Folder) -> io::Result<Unwritten> {
        let read = |name: &str| match folder.open(name, false) {
            Ok(file) => {
                let mut text = vec![0; file.len()?.min(MOST) as usize];
                file.read_at(0, &mut text)?;
                Ok(Some(String::from_utf8_lossy(&text).into_owned()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let before = read(NAME)?.map_or_else(|| read(&format!("{NAME}.new")), |text| Ok(Some(text)))?;
        let [told_before, told, noted] = [(); 3].map(|()| AtomicBool::new(false));
        Ok(Unwritten { before, told_before, told, noted })
    }

    /// Why flushes fail.
    pub(crate) fn why(&self) -> Option<&str> {
        self.before.as_deref()
    }

    /// The result of what a client has asked to be durable. `is_final`: the disk takes no flush any more.
    pub(crate) fn tell(&self, result: io::Result<()>, is_final: bool) -> io::Result<()> {
        if result.is_err() && is_final {
            self.told.store(true, SeqCst);
        }
        let Some(why) = &self.before else { return result };
        self.told_before.store(true, SeqCst);
        result.and_then(|()| {
            Err(io::Error::other(format!(
                "the server before could not write all that it had answered for ({why}): stop what uses the disk, start this server again, and that after \
                 it"
            )))
        })
    }

    /// A flush that no client has asked for has failed: writes down why, unless a client knows already. What cannot be written is told by nobody.
    pub(crate) fn note(&self, folder: &dyn Folder, error: &io::Error) {
        if !self.told.load(SeqCst) && device::replace(folder, NAME, error.to_string().as_bytes()).is_ok() {
            self.noted.store(true, SeqCst);
        }
    }

    /// The end of the server, whose last flush has failed, or not. What was left goes once a client was told of it.
    pub(crate) fn close(&self, folder: &dyn Folder, failed: Option<&io::Error>) -> io::Result<()> {
        let is_told = self.told.load(SeqCst);
        if let Some(error) = failed.filter(|_| !is_told) {
            self.note(folder, error);
            return Ok(());
        }
        let over =
            (self.before.is_some() && self.told_before.load(SeqCst)) || (self.noted.load(SeqCst) && is_told);
        if !over {
            return Ok(());
        }
        for name in [NAME.to_owned(), format!("{NAME}.new")] {
            match folder.remove(&name) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        folder.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error() -> io::Error {
        io::Error::other("the disk is gone")
    }

    /// A client asks for a flush, which succeeds on the disk or fails for good.
    fn flush(server: &Unwritten, succeeds: bool) -> bool {
        server.tell(if succeeds { Ok(()) } else { Err(error()) }, true).is_ok()
    }

    #[test]
    fn who_was_told_of_nothing_is_told_by_the_next_server() {
        let temp = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(temp.path()).unwrap();
        let open = || Unwritten::open(&folder).unwrap();
        let server = open();
        assert!(flush(&server, true));
        server.close(&folder, Some(&error())).unwrap();
        // One that was never asked tells nobody, so it stays; what is lost at the end of one that has told is another loss.
        open().close(&folder, None).unwrap();
        let server = open();
        assert!(!flush(&server, true));
        server.close(&folder, Some(&error())).unwrap();
        let server = open();
        assert!(!flush(&server, true));
        server.close(&folder, None).unwrap();
        assert!(flush(&open(), true));
        // A client was told in time.
        let server = open();
        assert!(!flush(&server, false));
        server.close(&folder, Some(&error())).unwrap();
        assert!(flush(&open(), true));
        // A forced write that failed alone says nothing of others.
        let server = open();
        assert!(server.tell(Err(error()), false).is_err());
        server.close(&folder, Some(&error())).unwrap();
        let server = open();
        assert!(!flush(&server, true));
        server.close(&folder, None).unwrap();
        // The error came to a checkpoint, and the server was killed; or a client was told of it after all.
        open().note(&folder, &error());
        let server = open();
        assert!(!flush(&server, true));
        server.close(&folder, None).unwrap();
        let server = open();
        server.note(&folder, &error());
        assert!(!flush(&server, false));
        server.close(&folder, Some(&error())).unwrap();
        assert!(flush(&open(), true));
        // There was no room for the reason.
        std::fs::write(temp.path().join("unwritten.new"), "").unwrap();
        let server = open();
        assert!(!flush(&server, true));
        server.close(&folder, None).unwrap();
        assert!(flush(&open(), true));
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }
}
