//! What a destination holds at present, for readers in other processes: they take no lock, so that no commit ever waits for them or
//! fails because of them.
//!
//! The file has a number, and what the destination holds. The number is odd while the destination is written to, or may be half
//! written, and even while it rests; it rises with each change. A process that commits makes it odd *before* it looks for readers and
//! writes; a reader leaves its claim *before* it looks at the number again:
//!
//! ```text
//!     the process that commits             the reader
//!     A  the number becomes odd            C  the claim is there, and asks to be seen
//!     F  fence                             G  fence
//!     B  look for claims                   D  is the number still the even one?
//!     W  write to the destination
//! ```
//!
//! If D finds the even number, A comes after it and so B finds the claim: all that is written from the reader's moment on is kept for it.
//! If not, the reader drops its claim and begins anew. What is kept for a claim in vain harms nobody.
//!
//! The file says in which boot it was written: after a power cut it may say anything. A process that is killed leaves it odd, or
//! even where the destination rests; the next one goes on with the same file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{Ordering::SeqCst, fence};

use delta::Epoch;
use device::{Boot, Dir};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use uuid::Uuid;

/// The file's name.
const NAME: &str = "present";
/// The file's length in bytes.
const LEN: u64 = 4096;
/// Where readers leave a number of their own, by which it is seen that there are more.
const ASKED: u64 = 8;
/// Where what the destination holds begins: a hash, a length, and that in JSON.
const TEXT: u64 = 16;

/// What a destination holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shown {
    pub source: Uuid,
    pub epoch: Epoch,
    /// A moment within the next epoch.
    pub ahead: bool,
    /// It was copied from a live disk without a cut.
    pub fuzzy: bool,
    /// When it came to this, in seconds since 1970; `None` if that is not known.
    pub at: Option<u64>,
    /// Bytes.
    pub size: u64,
    /// Bytes.
    pub block_size: u32,
    /// Names the state.
    pub state: Uuid,
    /// The inode of its file; 0 for a device.
    pub inode: u64,
}

/// What a destination holds, or why that cannot be shown.
pub(crate) type ShownResult = Result<Shown, String>;

#[derive(Serialize, Deserialize)]
struct Page {
    boot: String,
    held: ShownResult,
}

fn open(folder: &Dir, flags: OFlags) -> io::Result<File> {
    let file = folder.file(NAME, flags, 0o600)?;
    if flags.contains(OFlags::CREATE) {
        share(&file, folder)?;
    }
    Ok(file)
}

/// Lets the owner of the folder use a file that another user has made in it, such as root who reads a replica that is received by a
/// user of its own. The folder itself is closed to all others.
pub(crate) fn share(file: &File, folder: &Dir) -> io::Result<()> {
    let owner = rustix::fs::fstat(folder.held())?;
    if owner.st_uid != file.metadata()?.uid() {
        let (user, group) =
            (rustix::fs::Uid::from_raw(owner.st_uid), rustix::fs::Gid::from_raw(owner.st_gid));
        rustix::fs::fchown(file, Some(user), Some(group))?;
    }
    Ok(())
}

fn number(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Makes room for the whole file.
fn fill(file: &File) -> io::Result<()> {
    file.write_all_at(&[0; LEN as usize], 0)
}

/// The side that commits.
pub(crate) struct Present {
    file: File,
    folder: Dir,
    sequence: u64,
    /// What the file says.
    held: Option<ShownResult>,
    asked: u64,
    boot: String,
}

impl Present {
    /// Takes the file of a folder whose lock is held, and says that the destination may be half written. `None` where there is none,
    /// and with `create` none can be made.
    pub(crate) fn take(folder: &Dir, create: bool) -> io::Result<Option<Present>> {
        let file = match open(folder, OFlags::RDWR) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !create => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => match Present::make(folder) {
                Ok(file) => file,
                Err(_) => return Ok(None),
            },
            // Nothing can be committed there either.
            Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => return Ok(None),
            opened => opened?,
        };
        if file.metadata()?.len() < LEN && fill(&file).is_err() {
            return Ok(None);
        }
        let (sequence, asked) = (number(&file, 0)? & !1, number(&file, ASKED)?);
        let (folder, boot) = (folder.clone(), Boot::current().id);
        let mut present = Present { file, folder, sequence, held: None, asked, boot };
        present.begin()?;
        Ok(Some(present))
    }

    fn make(folder: &Dir) -> io::Result<File> {
        let file = open(folder, OFlags::RDWR | OFlags::CREATE)?;
        if let Err(error) = fill(&file) {
            let _ = device::Folder::remove(folder, NAME);
            return Err(error);
        }
        Ok(file)
    }

    /// The next number. They are only compared, so that one may follow the highest, which nothing but damage brings about.
    fn next(&self) -> u64 {
        self.sequence.wrapping_add(1)
    }

    /// The destination will be written to. Returns whether there may be readers that were not seen yet.
    pub(crate) fn begin(&mut self) -> io::Result<bool> {
        let asked_since = |present: &mut Present| {
            let asked = number(&present.file, ASKED).unwrap_or(0);
            std::mem::replace(&mut present.asked, asked) != asked
        };
        if self.sequence % 2 != 0 {
            // It may be odd because it could not be said what the destination held, after readers had begun.
            return Ok(asked_since(self));
        }
        let mut hidden = false;
        if let Err(error) = self.file.write_all_at(&self.next().to_le_bytes(), 0) {
            // No reader must believe it.
            self.file
                .set_len(0)
                .or_else(|_| device::Folder::remove(&self.folder, NAME))
                .map_err(|_| error)?;
            // And what they have asked for is not there any more either.
            hidden = true;
        }
        self.sequence = self.next();
        // F: what readers ask for is looked at after the number was changed.
        fence(SeqCst);
        Ok(asked_since(self) || hidden)
    }

    /// The destination rests, and holds this. Where it cannot be said, readers wait.
    pub(crate) fn rest(&mut self, held: ShownResult) -> io::Result<()> {
        if self.sequence % 2 == 0 {
            if self.held.as_ref() == Some(&held) {
                return Ok(());
            }
            // The same moment by another name.
            self.file.write_all_at(&self.next().to_le_bytes(), 0)?;
            self.sequence = self.next();
        }
        let page = Page { boot: self.boot.clone(), held: held.clone() };
        let text = serde_json::to_vec(&page)?;
        let mut bytes = XxHash3_128::oneshot(&text).to_le_bytes().to_vec();
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text);
        if bytes.len() as u64 > LEN - TEXT {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.file.write_all_at(&bytes, TEXT)?;
        fence(SeqCst);
        self.file.write_all_at(&self.next().to_le_bytes(), 0)?;
        (self.sequence, self.held) = (self.next(), Some(held));
        Ok(())
    }
}

/// The side that reads.
pub(crate) struct Watched {
    file: File,
}

impl Watched {
    /// Opens the file of a folder; `None` if there is none.
    pub(crate) fn open(folder: &Dir) -> io::Result<Option<Watched>> {
        match open(folder, OFlags::RDWR) {
            Ok(file) => Ok(Some(Watched { file })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Opens the file on a file system that is mounted read-only, where no process that commits can be asked for anything: it is only seen that one
    /// has begun.
    pub(crate) fn open_fixed(folder: &Dir) -> io::Result<Option<Watched>> {
        match folder.file(NAME, OFlags::RDONLY, 0) {
            Ok(file) => Ok(Some(Watched { file })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// What the destination holds, and the number of that; `None` while it is written to, or may be half written, or if that
    /// is not known in this boot.
    pub(crate) fn look(&self) -> Option<(u64, ShownResult)> {
        let (sequence, page) = self.page()?;
        (page.boot == Boot::current().id).then_some((sequence, page.held))
    }

    /// What it held last, in whichever boot that was.
    pub(crate) fn look_back(&self) -> Option<(u64, ShownResult)> {
        self.page().map(|(sequence, page)| (sequence, page.held))
    }

    fn page(&self) -> Option<(u64, Page)> {
        let sequence = number(&self.file, 0).ok().filter(|number| number % 2 == 0)?;
        let mut bytes = vec![0; (LEN - TEXT) as usize];
        self.file.read_exact_at(&mut bytes, TEXT).ok()?;
        let (hash, rest) = bytes.split_at(16);
        let (len, text) = rest.split_at(4);
        let text = text.get(..u32::from_le_bytes(len.try_into().ok()?) as usize)?;
        if XxHash3_128::oneshot(text).to_le_bytes() != *hash || !self.is_at(sequence) {
            return None;
        }
        Some((sequence, serde_json::from_slice(text).ok()?))
    }

    /// Asks the processes that commit to look for claims.
    pub(crate) fn ask(&self) -> io::Result<()> {
        let asked = Uuid::new_v4().as_u64_pair().0;
        self.file.write_all_at(&asked.to_le_bytes(), ASKED)
    }

    /// True if the destination still rests as it did with this number.
    pub(crate) fn is_at(&self, sequence: u64) -> bool {
        // G: after the claim, and after what was read.
        fence(SeqCst);
        let there = self.file.metadata().is_ok_and(|meta| meta.nlink() > 0);
        there && number(&self.file, 0).is_ok_and(|now| now == sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> ShownResult {
        Ok(Shown {
            source: Uuid::from_u128(1),
            epoch: Epoch { number: 4, id: Uuid::from_u128(4) },
            ahead: false,
            fuzzy: false,
            at: Some(9),
            size: 4096,
            block_size: 4096,
            state: Uuid::from_u128(2),
            inode: 0,
        })
    }

    fn taken() -> (tempfile::TempDir, Dir, Present) {
        let temp = testing::in_memory();
        let folder = Dir::open(temp.path()).unwrap();
        let present = Present::take(&folder, true).unwrap().expect("there is room");
        (temp, folder, present)
    }

    #[test]
    fn a_reader_that_asks_is_seen_once() {
        let (_temp, folder, mut present) = taken();
        present.rest(held()).unwrap();
        let reader = Watched::open(&folder).unwrap().expect("the file");
        let (sequence, shown) = reader.look().expect("it rests");
        assert_eq!(shown, held());
        reader.ask().unwrap();
        assert!(reader.is_at(sequence));
        assert!(present.begin().unwrap(), "the reader is not seen");
        assert!(!reader.is_at(sequence) && reader.look().is_none());
        assert!(!present.begin().unwrap(), "it is seen already");
    }

    /// The number may have stayed odd from the commit before, as what the destination held could not be said.
    #[test]
    fn a_reader_is_seen_where_the_number_is_odd() {
        let (_temp, folder, mut present) = taken();
        assert_eq!(present.sequence % 2, 1);
        assert!(!present.begin().unwrap());
        Watched::open(&folder).unwrap().expect("the file").ask().unwrap();
        assert!(present.begin().unwrap(), "the reader is not seen");
    }

    #[test]
    fn the_highest_number_is_followed_by_one() {
        let (_temp, folder, present) = taken();
        present.file.write_all_at(&(u64::MAX - 1).to_le_bytes(), 0).unwrap();
        let mut present = Present::take(&folder, true).unwrap().expect("the file");
        present.rest(held()).unwrap();
        let reader = Watched::open(&folder).unwrap().expect("the file");
        assert_eq!(reader.look(), Some((0, held())));
    }

    /// Where the number cannot be changed, the file goes, and with it what readers have asked for: they are looked for.
    #[test]
    fn readers_are_looked_for_where_the_number_cannot_be_written() {
        let (temp, folder, mut present) = taken();
        present.rest(held()).unwrap();
        let reader = Watched::open(&folder).unwrap().expect("the file");
        // Its claim is there, and it is about to ask.
        let (sequence, _) = reader.look().expect("it rests");
        present.file = File::open(temp.path().join(NAME)).unwrap();
        assert!(present.begin().unwrap(), "the reader is forgotten");
        // And no other begins.
        assert!(Watched::open(&folder).unwrap().is_none_or(|next| next.look().is_none()));
        assert!(!reader.is_at(sequence), "it believes a file that is gone");
    }
}
