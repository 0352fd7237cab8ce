//! The digest file, so that an unchanged replica need not be read for a comparison.
//!
//! It is valid only for the state of the replica whose nonce it names; every commit changes that nonce. The file is
//! invalidated before the first digest in it changes, and names a state again only once all digests are durable.
//!
//! Pages of 4096 bytes, each ending in its own checksum: first the head, then 255 digests a page. A page whose blocks all read as zeroes is a
//! hole, so that the file grows with what the disk holds and not with the size that a peer gives to it. The head says how many pages are
//! none: one that was lost is noticed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use device::{Dir, Folder as _};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use twox_hash::XxHash3_128;
use uuid::Uuid;

use crate::{DIGEST, Hash, Scope};

const MAGIC: &[u8; 8] = b"dsyndig2";
const PAGE: usize = 4096;
/// Digests of a page.
const PER_PAGE: u64 = (PAGE / DIGEST - 1) as u64;
/// Bytes of a page before its checksum.
const HASHED: usize = PAGE - DIGEST;

/// The digests of all blocks of a replica.
pub struct DigestFile {
    file: File,
    path: PathBuf,
    /// Identifies this file, so that pages left by an older one are not accepted.
    id: Uuid,
    size: u64,
    block_size: u32,
    hash: Hash,
    page: Option<Page>,
    /// Pages in the file that are no holes.
    stored: u64,
}

/// The cached page.
struct Page {
    number: u64,
    bytes: Vec<u8>,
    dirty: bool,
    /// A hole in the file.
    hole: bool,
}

impl DigestFile {
    /// The digests of the state that `nonce` names, or `Ok(Err(why))` if there are none.
    ///
    /// # Errors
    /// If the file exists and is not a digest file.
    pub fn open(folder: &Dir, name: &str, nonce: Uuid) -> io::Result<Result<DigestFile, String>> {
        let path = &folder.path().join(name);
        let file = match folder.file(name, OFlags::RDWR, 0) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Err("no digests yet".into()));
            }
            Err(e) => return Err(e),
        };
        // Killed while it was made.
        if file.metadata()?.len() == 0 {
            return Ok(Err("no digests yet".into()));
        }
        let mut head = vec![0; PAGE];
        own(path, &file)?;
        let no = |why: &str| Ok(Err(format!("the digests in {} {why}", path.display())));
        if file.read_exact_at(&mut head, 0).is_err() {
            return no("are damaged");
        }
        if head[..MAGIC.len()] != *MAGIC {
            return no("were kept by another version of dsync");
        }
        let file = match DigestFile::of_head(file, path, &head) {
            Some((file, found)) if found == nonce => file,
            Some(_) => return no("belong to another state of the replica"),
            None => return no("are damaged"),
        };
        let mut stored = 0;
        let whole = file.each(0..file.pages(), |number, bytes| {
            stored += 1;
            file.verify(number, bytes)
        });
        if whole.is_err() || stored != file.stored {
            return no("are damaged");
        }
        Ok(Ok(file))
    }

    /// Creates a file for a disk, with the digests of zeroes. It names no state yet.
    ///
    /// # Errors
    /// If the file exists and is not a digest file, or cannot be written.
    pub fn create(
        folder: &Dir,
        name: &str,
        size: u64,
        block_size: u32,
        hash: Hash,
    ) -> io::Result<DigestFile> {
        let path = &folder.path().join(name);
        let file = folder.file(name, OFlags::RDWR | OFlags::CREATE, 0o666)?;
        if file.metadata()?.len() > 0 {
            own(path, &file)?;
        }
        file.set_len(0)?;
        let id = Uuid::new_v4();
        let path = path.clone();
        let mut file = DigestFile { file, path, id, size, block_size, hash, page: None, stored: 0 };
        file.name(Uuid::nil())?;
        Ok(file)
    }

    /// True if it has the digests that a scope asks for.
    pub fn serves(&self, scope: &Scope) -> bool {
        (self.size, self.block_size, self.hash) == (scope.size, scope.block_size, scope.hash)
    }

    /// True if it is for a disk and blocks of these sizes.
    pub fn fits(&self, size: u64, block_size: u32) -> bool {
        (self.size, self.block_size) == (size, block_size)
    }

    fn blocks(&self) -> u64 {
        self.size.div_ceil(u64::from(self.block_size))
    }

    fn pages(&self) -> u64 {
        self.blocks().div_ceil(PER_PAGE)
    }

    /// Invalidates the file, durably. Digests may change from then on.
    pub fn forget(&mut self) -> io::Result<()> {
        self.name(Uuid::nil())
    }

    /// Binds all digests to the state that `nonce` names. Durable on return.
    pub fn seal(mut self, nonce: Uuid) -> io::Result<()> {
        self.save()?;
        self.file.sync_all()?;
        self.name(nonce)
    }

    /// The digests of some blocks.
    ///
    /// # Errors
    /// `InvalidData` for a page that is damaged.
    pub fn get(&mut self, blocks: Range<u64>) -> io::Result<Vec<u8>> {
        let mut digests = Vec::with_capacity((blocks.end - blocks.start) as usize * DIGEST);
        let mut at = blocks.start;
        while at < blocks.end {
            let end = ((at / PER_PAGE + 1) * PER_PAGE).min(blocks.end);
            let from = (at % PER_PAGE) as usize * DIGEST;
            let len = (end - at) as usize * DIGEST;
            digests.extend_from_slice(&self.load(at / PER_PAGE)?.bytes[from..from + len]);
            at = end;
        }
        Ok(digests)
    }

    /// Stores the digests of the blocks from `first` on.
    ///
    /// # Errors
    /// `InvalidInput` for blocks beyond the end of the disk, `InvalidData` for a page that is damaged.
    pub fn put(&mut self, first: u64, digests: &[u8]) -> io::Result<()> {
        let end = first + (digests.len() / DIGEST) as u64;
        if end > self.blocks() || digests.len() % DIGEST != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "digests of blocks beyond the end of the disk",
            ));
        }
        let (mut at, mut rest) = (first, digests);
        while at < end {
            let part = ((at / PER_PAGE + 1) * PER_PAGE).min(end);
            let (now, later) = rest.split_at((part - at) as usize * DIGEST);
            rest = later;
            let page = self.load(at / PER_PAGE)?;
            let from = (at % PER_PAGE) as usize * DIGEST;
            page.bytes[from..from + now.len()].copy_from_slice(now);
            page.dirty = true;
            at = part;
        }
        Ok(())
    }

    /// Stores the digests of a range of whole blocks that holds this data, or zeroes for `None`.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not of whole blocks of the disk.
    pub fn wrote(&mut self, offset: u64, len: u64, data: Option<&[u8]>) -> io::Result<()> {
        let block = u64::from(self.block_size);
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let Some(end) = end.filter(|end| offset % block == 0 && (end % block == 0 || *end == self.size))
        else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "changes that are not whole blocks"));
        };
        if let Some(data) = data {
            let digests: Vec<u8> =
                data.chunks(block as usize).flat_map(|block| self.hash.digest(block)).collect();
            return self.put(offset / block, &digests);
        }
        let (first, last) = (offset / block, end.div_ceil(block));
        let whole = first.div_ceil(PER_PAGE)..if end == self.size { self.pages() } else { last / PER_PAGE };
        if whole.is_empty() {
            return self.put(first, &self.zeroes(first..last));
        }
        self.clear(whole.clone())?;
        let (before, behind) = (whole.start * PER_PAGE, (whole.end * PER_PAGE).min(last));
        self.put(first, &self.zeroes(first..before))?;
        self.put(behind, &self.zeroes(behind..last))
    }

    /// The digests of these blocks if they are zeroes.
    fn zeroes(&self, blocks: Range<u64>) -> Vec<u8> {
        let block = u64::from(self.block_size);
        let digest = |len: u64| self.hash.digest(&vec![0; len as usize]);
        let mut digests = digest(block).repeat((blocks.end - blocks.start) as usize);
        if blocks.end * block > self.size && !blocks.is_empty() {
            let short = digests.len() - DIGEST;
            digests[short..].copy_from_slice(&digest(self.size % block));
        }
        digests
    }

    /// Makes holes of these pages.
    fn clear(&mut self, pages: Range<u64>) -> io::Result<()> {
        self.page.take_if(|page| pages.contains(&page.number));
        let mut cleared = 0;
        self.each(pages, |number, _| {
            cleared += 1;
            self.file.write_all_at(&[0; PAGE], place(number))
        })?;
        // Its owner may have put pages into the file meanwhile: then their number does not fit, and the next opening sees that.
        self.stored = self.stored.saturating_sub(cleared);
        Ok(())
    }

    /// Passes over those of these pages in the file that are no holes.
    fn each(&self, pages: Range<u64>, mut seen: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let (mut at, mut bytes) = (pages.start, vec![0; PAGE]);
        while at < pages.end {
            at = match rustix::fs::seek(&self.file, SeekFrom::Data(place(at))) {
                Ok(data) => data / PAGE as u64 - 1,
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
                Err(e) => return Err(e.into()),
            };
            if at < pages.end && self.read(at, &mut bytes)? {
                seen(at, &bytes)?;
            }
            at += 1;
        }
        Ok(())
    }

    /// Reads a page from the file. False for a hole.
    fn read(&self, number: u64, page: &mut [u8]) -> io::Result<bool> {
        page.fill(0);
        match self.file.read_exact_at(page, place(number)) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            read => read?,
        }
        Ok(page.iter().any(|byte| *byte != 0))
    }

    fn verify(&self, number: u64, page: &[u8]) -> io::Result<()> {
        if self.checksum(number, page) == page[HASHED..] {
            return Ok(());
        }
        let text = format!("the digests in {} are damaged: remove the file", self.path.display());
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// The page of that number, verified.
    fn load(&mut self, number: u64) -> io::Result<&mut Page> {
        if self.page.as_ref().is_some_and(|page| page.number != number) {
            self.save()?;
        }
        let page = match self.page.take() {
            Some(page) => page,
            None => {
                let mut bytes = vec![0; PAGE];
                let hole = !self.read(number, &mut bytes)?;
                if hole {
                    let first = number * PER_PAGE;
                    let zeroes = self.zeroes(first..(first + PER_PAGE).min(self.blocks()));
                    bytes[..zeroes.len()].copy_from_slice(&zeroes);
                } else {
                    self.verify(number, &bytes)?;
                }
                Page { number, bytes, dirty: false, hole }
            }
        };
        Ok(self.page.insert(page))
    }

    /// Writes the cached page.
    fn save(&mut self) -> io::Result<()> {
        let Some(Page { number, mut bytes, dirty: true, hole }) = self.page.take() else { return Ok(()) };
        let sum = self.checksum(number, &bytes);
        bytes[HASHED..].copy_from_slice(&sum);
        self.file.write_all_at(&bytes, place(number))?;
        self.stored += u64::from(hole);
        Ok(())
    }

    fn checksum(&self, number: u64, page: &[u8]) -> [u8; DIGEST] {
        let mut bytes = Vec::with_capacity(PAGE + 24);
        bytes.extend(self.id.as_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend(&page[..HASHED]);
        XxHash3_128::oneshot(&bytes).to_le_bytes()
    }

    /// Writes the head, durably.
    fn name(&mut self, nonce: Uuid) -> io::Result<()> {
        let mut head = Vec::with_capacity(PAGE);
        head.extend(MAGIC);
        head.extend(nonce.as_bytes());
        head.extend(self.id.as_bytes());
        head.extend(self.size.to_le_bytes());
        head.extend(self.block_size.to_le_bytes());
        head.push(match self.hash {
            Hash::Blake3 => 1,
            Hash::Xxh3 => 2,
        });
        head.extend(self.stored.to_le_bytes());
        head.resize(HASHED, 0);
        let sum = XxHash3_128::oneshot(&head);
        head.extend(sum.to_le_bytes());
        self.file.write_all_at(&head, 0)?;
        self.file.sync_all()
    }

    fn of_head(file: File, path: &Path, head: &[u8]) -> Option<(DigestFile, Uuid)> {
        if XxHash3_128::oneshot(&head[..HASHED]).to_le_bytes() != head[HASHED..] {
            return None;
        }
        let field = |at: usize| -> Option<[u8; 16]> { head[at..at + 16].try_into().ok() };
        let size = u64::from_le_bytes(head[40..48].try_into().ok()?);
        let block_size = u32::from_le_bytes(head[48..52].try_into().ok()?);
        let hash = match head[52] {
            1 => Hash::Blake3,
            2 => Hash::Xxh3,
            _ => return None,
        };
        let stored = u64::from_le_bytes(head[53..61].try_into().ok()?);
        // The bounds of a scope apply here too.
        Scope::whole(size, block_size).check().ok()?;
        let (nonce, id) = (Uuid::from_bytes(field(8)?), Uuid::from_bytes(field(24)?));
        // An invalidated file.
        let nonce = if nonce.is_nil() { Uuid::max() } else { nonce };
        let path = path.to_path_buf();
        Some((DigestFile { file, path, id, size, block_size, hash, page: None, stored }, nonce))
    }
}

/// Where a page is in the file.
fn place(number: u64) -> u64 {
    (number + 1) * PAGE as u64
}

/// Refuses a file that is not a digest file of any version, so that it is not overwritten.
fn own(path: &Path, file: &File) -> io::Result<()> {
    let mut magic = [0; MAGIC.len() - 1];
    if file.read_exact_at(&mut magic, 0).is_ok() && MAGIC.starts_with(&magic) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{} is not a digest file: choose another name", path.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4096;
    const NAME: &str = "digests";

    #[test]
    fn digests_are_kept_for_one_state_and_no_other() {
        let temp = tempfile::tempdir().unwrap();
        let folder = Dir::open(temp.path()).unwrap();
        let size = 1000 * BLOCK + 77;
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert!(DigestFile::open(&folder, NAME, one).unwrap().is_err());
        // Killed while it was made.
        std::fs::write(temp.path().join(NAME), []).unwrap();
        assert!(DigestFile::open(&folder, NAME, one).unwrap().is_err());
        let digest = |n: u64| Hash::Blake3.digest(&n.to_le_bytes());
        let mut file = DigestFile::create(&folder, NAME, size, 4096, Hash::Blake3).unwrap();
        for n in 0..1001 {
            file.put(n, &digest(n)).unwrap();
        }
        assert!(file.put(1001, &digest(0)).is_err());
        file.seal(one).unwrap();
        let why = DigestFile::open(&folder, NAME, two).unwrap().err().unwrap();
        assert!(why.contains("another state"), "{why}");
        let mut file = DigestFile::open(&folder, NAME, one).unwrap().ok().unwrap();
        assert!(file.serves(&Scope::whole(size, 4096)) && !file.serves(&Scope::whole(size + 1, 4096)));
        assert!(!file.serves(&Scope { hash: Hash::Xxh3, ..Scope::whole(size, 4096) }));
        let all: Vec<u8> = (0..1001).flat_map(digest).collect();
        assert!(file.get(0..1001).unwrap() == all);
        assert!(file.get(250..260).unwrap() == all[250 * DIGEST..260 * DIGEST]);
        // Changes in some places, and zeroes up to the short block at the end.
        file.forget().unwrap();
        assert!(DigestFile::open(&folder, NAME, one).unwrap().is_err(), "it was forgotten");
        file.wrote(300 * BLOCK, 2 * BLOCK, Some(&[7; 8192])).unwrap();
        file.wrote(500 * BLOCK, 500 * BLOCK + 77, None).unwrap();
        assert!(file.wrote(1, BLOCK, None).is_err() && file.wrote(0, 5, None).is_err());
        assert!(file.wrote(u64::MAX - 4095, BLOCK, None).is_err());
        file.seal(two).unwrap();
        let mut file = DigestFile::open(&folder, NAME, two).unwrap().ok().unwrap();
        assert!(DigestFile::open(&folder, NAME, one).unwrap().is_err());
        let mut expected = all;
        let block = |b: &[u8]| Hash::Blake3.digest(b);
        expected[300 * DIGEST..302 * DIGEST].copy_from_slice(&block(&[7; 4096]).repeat(2));
        expected[500 * DIGEST..1000 * DIGEST].copy_from_slice(&block(&[0; 4096]).repeat(500));
        expected[1000 * DIGEST..].copy_from_slice(&block(&[0; 77]));
        assert!(file.get(0..1001).unwrap() == expected);
        // No state is not a state.
        drop(file);
        let mut file = DigestFile::open(&folder, NAME, two).unwrap().ok().unwrap();
        file.forget().unwrap();
        assert!(DigestFile::open(&folder, NAME, Uuid::nil()).unwrap().is_err());
    }

    #[test]
    fn what_reads_as_zeroes_takes_no_room() {
        use std::os::unix::fs::MetadataExt;
        let temp = tempfile::tempdir().unwrap();
        let folder = Dir::open(temp.path()).unwrap();
        let (size, nonce) = ((16 << 40) + 100, Uuid::from_u128(1));
        let mut file = DigestFile::create(&folder, NAME, size, 512, Hash::Xxh3).unwrap();
        file.wrote(8 << 40, 512 << 10, Some(&[7; 512 << 10])).unwrap();
        file.wrote(0, size, None).unwrap();
        file.wrote(8 << 40, 512, Some(&[9; 512])).unwrap();
        file.wrote(0, 8 << 40, None).unwrap();
        file.wrote((8 << 40) + 512, (8 << 40) - 412, None).unwrap();
        file.seal(nonce).unwrap();
        let mut file = DigestFile::open(&folder, NAME, nonce).unwrap().ok().unwrap();
        let digest = |block: &[u8]| Hash::Xxh3.digest(block);
        let (zero, middle, last) = (digest(&[0; 512]), 16 << 30, 32 << 30);
        assert_eq!(file.get(0..1).unwrap(), zero);
        let around = [zero, digest(&[9; 512]), zero].concat();
        assert_eq!(file.get(middle - 1..middle + 2).unwrap(), around);
        assert_eq!(file.get(last - 1..last + 1).unwrap(), [zero, digest(&[0; 100])].concat());
        let taken = std::fs::metadata(temp.path().join(NAME)).unwrap().blocks() * 512;
        assert!(taken < 1 << 20, "{taken} bytes");
    }

    #[test]
    fn damage_is_noticed_and_foreign_files_are_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let (path, folder) = (temp.path().join(NAME), Dir::open(temp.path()).unwrap());
        let nonce = Uuid::from_u128(1);
        let mut file = DigestFile::create(&folder, NAME, 600 * BLOCK, 4096, Hash::Xxh3).unwrap();
        file.wrote(0, 600 * BLOCK, Some(&[5; 600 * BLOCK as usize])).unwrap();
        file.seal(nonce).unwrap();
        let good = std::fs::read(&path).unwrap();
        // A page that was lost.
        for page in 1..4 {
            let mut bad = good.clone();
            bad[page * PAGE..(page + 1) * PAGE].fill(0);
            std::fs::write(&path, bad).unwrap();
            assert!(DigestFile::open(&folder, NAME, nonce).unwrap().is_err(), "page {page}");
        }
        for at in [9, 30, 45, 4000, 4090, 5000, 8191, 9000, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 4;
            std::fs::write(&path, bad).unwrap();
            assert!(DigestFile::open(&folder, NAME, nonce).unwrap().is_err(), "byte {at}");
        }
        for len in [4096, 5000, good.len() - 1] {
            std::fs::write(&path, &good[..len]).unwrap();
            assert!(DigestFile::open(&folder, NAME, nonce).unwrap().is_err(), "{len} bytes");
        }
        // A page in the place of another, and a page of another file.
        let mut swapped = good.clone();
        swapped.copy_within(4096..8192, 8192);
        std::fs::write(&path, swapped).unwrap();
        assert!(DigestFile::open(&folder, NAME, nonce).unwrap().is_err());
        for foreign in [&b"a letter to a friend"[..], b"x", &[0; 10_000]] {
            std::fs::write(&path, foreign).unwrap();
            assert!(DigestFile::open(&folder, NAME, nonce).is_err());
            assert!(DigestFile::create(&folder, NAME, 4096, 4096, Hash::Xxh3).is_err());
            assert!(std::fs::read(&path).unwrap() == foreign);
        }
    }
}
