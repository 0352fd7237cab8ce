//! What a replica knows of itself, and how it is kept.

use std::io;
use std::path::{Path, PathBuf};

use delta::{Epoch, Header};
use device::{Folder, Format, Medium, StateFile};
use lineage::Lives;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ReplicaError, Result, io_error};
use crate::state::intent::ReplicaMembership;
use crate::state::role::{Released, Role};
use crate::state::version::of_version;

/// The file's name in the replica's folder.
pub(crate) const NAME: &str = "lineage";
/// Bytes that a lineage takes at most, but with hundreds of positions or lives.
const ROOM: u64 = 16 << 10;
/// Bytes of a lineage that are read: it names each life that led to the replica.
const MOST: u64 = 8 << 20;

/// What a replica knows of itself.
///
/// More than fifteen fields: they are the keys of its JSON object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// Version of this format.
    pub version: u32,
    /// The destination's path, without links, when this was written.
    #[serde(rename = "place")]
    pub path: PathBuf,
    /// What names the disk, of a device of which something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// How the disk lies in its file.
    #[serde(default, skip_serializing_if = "Format::is_raw")]
    pub format: Format,
    /// The source followed. `None` until an adopted file is proven.
    pub source: Option<Uuid>,
    /// The epoch of the last commit. `None` before the first.
    pub epoch: Option<Epoch>,
    /// How far the destination may be trusted.
    pub state: State,
    /// Bytes of the destination as of the last commit; 0 before the first.
    pub size: u64,
    /// The source's block size in bytes.
    pub block_size: u32,
    /// Names this very state: the stream of the last commit.
    pub nonce: Uuid,
    /// The stream of the last commit. A journal that ends with it has done its work.
    pub committed: Option<Uuid>,
    /// The destination as the last commit left it.
    pub stamp: Option<Stamp>,
    /// What is under way.
    pub step: Option<Step>,
    /// The blocks in which the destination may not be of that epoch.
    #[serde(default, skip_serializing_if = "Unsure::is_nothing")]
    pub unsure: Unsure,
    /// What it is: the source itself, or a replica.
    #[serde(flatten)]
    pub role: Role,
    /// The group whose replicas it is committed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<ReplicaMembership>,
    /// When what the last commit made of the destination had all arrived, in seconds since 1970: a commit that a later process
    /// completed is as old as that. Of a rewind, when it was first at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
}

/// In which blocks a destination may not be what it says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unsure {
    /// In no block.
    #[default]
    Nothing,
    /// In the blocks of the set that is kept in `unsure-FILE` of the replica's folder.
    Blocks {
        /// Names the file.
        file: Uuid,
        /// Bytes of the blocks.
        bytes: u64,
    },
    /// In any block: others were seen to have written to it. Of a device, whose kernel's count does not tell of that after a
    /// reboot, nothing else does.
    Everything,
}

impl Unsure {
    /// True if the destination is what it says in all of its blocks.
    pub fn is_nothing(&self) -> bool {
        *self == Unsure::Nothing
    }

    /// The file that the set is kept in.
    pub(crate) fn file(&self) -> Option<&Uuid> {
        if let Unsure::Blocks { file, .. } = self { Some(file) } else { None }
    }
}

/// What to do where the state of a replica can't be believed.
pub(crate) const COMPARE_ANEW: &str = "move the folder away, then run \"dsync sync --adopt SRC DST\", which compares all of the \
                                       replica with its source and overwrites what differs";

/// How far a destination may be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Byte for byte one epoch of the source.
    Exact,
    /// A copy of a live disk without a cut.
    Fuzzy,
    /// A seed or an in-place commit is under way, a file was adopted and not proven yet, or parts of the source could not
    /// be read.
    Incomplete,
}

/// The destination at a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Inode of a file; 0 for a device.
    pub inode: u64,
    /// True of a file whose file system gives it another inode at each mount, as FAT and many that are in user space.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renumbered: bool,
    /// Bytes.
    pub size: u64,
    /// When a file's inode changed last, in nanoseconds since 1970; 0 for a device.
    pub changed: i64,
    /// When a file's content was changed last, as far as it says: any program may set this back. `None` for a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<i64>,
    /// Hashes of a few blocks of a device, empty for a file: they tell another disk under the same name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub print: String,
    /// Where the last of those blocks begin, in bytes: blocks that the last delta has changed, by which an older copy of the same source is told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<u64>,
    /// Of a device: which disk it is, and how much was written to it by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medium: Option<Medium>,
}

/// A range of a replica, and what it holds: `[previous.upto, upto)` is at `epoch`.
///
/// Beyond the last position there is nothing: what a delta does not name there becomes zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// `None`: its content is unknown. Only a compare can tell.
    pub epoch: Option<Epoch>,
    /// End of the range in bytes.
    pub upto: u64,
}

/// A step that was begun: what it leads to, and how far it has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Where it writes.
    #[serde(rename = "place")]
    pub kind: StepKind,
    /// Names the state under way, for deltas that continue it.
    pub nonce: Uuid,
    /// What is durable where it writes.
    pub positions: Vec<Position>,
    /// The blocks in which it may not be what the positions say.
    #[serde(default, skip_serializing_if = "Unsure::is_nothing")]
    pub unsure: Unsure,
    /// What the replica will be.
    pub toward: Toward,
    /// All is written and durable; only the names are to be changed.
    pub finished: bool,
    /// In place: what the file's time of change was when its positions were made durable, in nanoseconds since 1970; 0 before.
    pub durable: i64,
}

/// How a step writes, by where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepKind {
    /// The destination itself.
    InPlace,
    /// A new file, NAME.partial, which takes the destination's place at the end.
    #[serde(rename = "fresh")]
    NewFile {
        /// Its inode.
        inode: u64,
        /// It may replace an existing file.
        replaces: bool,
    },
    /// A new file, NAME.partial, that is begun as a clone of the destination and takes its place at the end.
    Clone {
        /// Its inode.
        inode: u64,
    },
}

impl StepKind {
    /// True if its file may take the place of another.
    pub(crate) fn replaces(self) -> bool {
        !matches!(self, StepKind::NewFile { replaces: false, .. })
    }
}

/// What a commit makes of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Toward {
    /// The source.
    pub source: Uuid,
    /// The epoch.
    pub epoch: Epoch,
    /// Bytes.
    pub size: u64,
    /// Bytes a block.
    pub block_size: u32,
    /// The delta was read from a live disk without a cut.
    pub fuzzy: bool,
    /// The delta is a batch.
    pub batch: bool,
    /// The delta's stream.
    pub stream: Uuid,
    /// The lives that led there, as the delta's header has them; `None` if it stays where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lives: Option<Lives>,
}

impl Toward {
    /// What a delta makes of a replica.
    pub(crate) fn of(header: &Header) -> Option<Toward> {
        Some(Toward {
            source: header.source,
            epoch: *header.to()?,
            size: header.size_after,
            block_size: header.block_size,
            fuzzy: header.fuzzy,
            batch: header.batch,
            stream: header.stream,
            lives: (!header.partial).then(|| header.lives.clone()),
        })
    }
}

/// A lineage as it is stored.
#[derive(Serialize)]
struct Stored<'a> {
    #[serde(flatten)]
    lineage: &'a Lineage,
    #[serde(skip_serializing_if = "Option::is_none")]
    born: Option<i64>,
}

/// When the file of a stored lineage was made, in nanoseconds since 1970.
#[derive(Deserialize)]
struct Born {
    born: Option<i64>,
}

fn damaged(path: &Path, why: String) -> ReplicaError {
    ReplicaError::Damaged { path: path.to_path_buf(), why, way_out: COMPARE_ANEW.into() }
}

/// A file, and what is in it.
type Read = (Box<dyn StateFile>, Vec<u8>);

/// The file of a folder's lineage, and what is in it.
fn read(folder: &dyn Folder) -> Result<Option<Read>> {
    let path = folder.path().join(NAME);
    let file = match folder.open(NAME, false) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error("open", &path)(e)),
    };
    let len = file.len().map_err(io_error("read", &path))?;
    if len > MOST {
        return Err(damaged(&path, "it is too large".into()));
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes).map_err(io_error("read", &path))?;
    Ok(Some((file, bytes)))
}

impl Lineage {
    /// The version that is written, and the only one that is read.
    pub const VERSION: u32 = 1;

    /// A lineage before the first commit.
    pub(crate) fn new() -> Lineage {
        Lineage {
            version: Self::VERSION,
            path: PathBuf::new(),
            disk: None,
            format: Format::Raw,
            source: None,
            epoch: None,
            state: State::Incomplete,
            size: 0,
            block_size: 0,
            nonce: Uuid::new_v4(),
            committed: None,
            stamp: None,
            step: None,
            unsure: Unsure::Nothing,
            role: Role::default(),
            group: None,
            at: None,
        }
    }

    /// Reads the lineage of a folder, `None` if it has none.
    ///
    /// # Errors
    /// If it cannot be read or understood.
    #[doc(hidden)]
    pub fn load(folder: &dyn Folder) -> Result<Option<Lineage>> {
        let path = folder.path().join(NAME);
        let Some((_, bytes)) = read(folder)? else { return Ok(None) };
        let damaged = |why| damaged(&path, why);
        let lineage: Lineage =
            of_version(&bytes, Self::VERSION, &path)?.map_err(|e| damaged(e.to_string()))?;
        if let Some(step) = &lineage.step {
            if step.positions.windows(2).any(|w| w[0].upto >= w[1].upto) {
                return Err(damaged("its positions do not ascend".into()));
            }
        }
        Ok(Some(lineage))
    }

    /// Puts this lineage in place of the folder's, durably.
    pub(crate) fn store(&self, folder: &dyn Folder) -> Result<()> {
        let path = folder.path().join(NAME);
        let stored = |file: &dyn StateFile| {
            serde_json::to_vec_pretty(&Stored { lineage: self, born: file.born_ns() })
                .map_err(io::Error::from)
        };
        device::replace_with(folder, NAME, stored).map_err(io_error("write", &path))
    }

    /// True if the folder's lineage is not in the file that it was written to: it was copied, or restored from a copy.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn is_copied(folder: &dyn Folder) -> Result<bool> {
        let Some((file, bytes)) = read(folder)? else { return Ok(false) };
        // What is damaged is told by who loads it.
        let written = serde_json::from_slice(&bytes).ok().and_then(|Born { born }| born);
        Ok(written.zip(file.born_ns()).is_some_and(|(written, is)| written != is))
    }

    /// True if a step leads to what follows the present state, or stays at it: its source had all that this has.
    pub(crate) fn is_followed_by(&self, toward: &Toward) -> bool {
        toward.lives.as_ref().is_none_or(|lives| lives.leads_over(&self.role.lives))
    }

    /// Bytes that the next lineage takes at most.
    pub(crate) fn room(&self) -> u64 {
        let step = self.step.as_ref().and_then(|step| step.toward.lives.as_ref());
        let lives = [Some(&self.role.lives), step].into_iter().flatten();
        // They stand three times at most, each time in a hundred bytes.
        ROOM + 300 * lives.map(|lives| lives.lives().len() as u64).sum::<u64>()
    }

    /// What the destination holds, or the step under way.
    pub(crate) fn positions(&self) -> Vec<Position> {
        match &self.step {
            Some(step) => step.positions.clone(),
            None if self.size == 0 => Vec::new(),
            None => vec![Position { epoch: self.epoch, upto: self.size }],
        }
    }

    /// The blocks in which what is there, or the step under way, may not be what its positions say.
    pub(crate) fn unsure(&self) -> &Unsure {
        self.step.as_ref().map_or(&self.unsure, |step| &step.unsure)
    }

    /// Bytes in which the destination may not be what it says.
    pub fn unsure_bytes(&self) -> u64 {
        match self.unsure {
            Unsure::Nothing => 0,
            Unsure::Blocks { bytes, .. } => bytes,
            Unsure::Everything => self.size,
        }
    }

    /// True if its source has said of what is there that there was no more.
    pub(crate) fn has_last_word(&self) -> bool {
        let here = self.epoch.map(|epoch| Released { epoch, term: self.role.term });
        here.is_some() && self.role.released == here && self.unsure.is_nothing()
    }

    /// True if batches of a mirror have brought what is there ahead of its epoch, to a moment within the next.
    pub fn is_ahead(&self) -> bool {
        self.role.demoted.is_none()
            && self.state != State::Incomplete
            && matches!(self.unsure, Unsure::Blocks { .. })
    }

    /// The lineage after the commit of `toward`, with the blocks in which the destination is unsure then, and when it had arrived.
    pub(crate) fn after(&self, toward: &Toward, stamp: Stamp, unsure: Unsure, at: u64) -> Lineage {
        // What a batch brings to a former source that had nothing of its own is of the source that it follows.
        let own = !toward.batch || !self.unsure.is_nothing();
        let still = self.epoch == Some(toward.epoch) && !unsure.is_nothing() && own;
        let demoted = self.role.demoted.clone().filter(|_| still);
        let lives = match &toward.lives {
            None => self.role.lives.clone(),
            // The source may have been told of what it wrote itself, as a former source.
            Some(lives) => lives.onto(self.role.all_lives()),
        };
        Lineage {
            version: Self::VERSION,
            path: self.path.clone(),
            disk: self.disk.clone(),
            format: self.format,
            source: Some(toward.source),
            epoch: Some(toward.epoch),
            state: match toward {
                // A batch takes a consistent replica to a consistent moment; only a rewind begins at an incomplete one.
                Toward { batch: true, epoch, .. }
                    if self.epoch == Some(*epoch) && self.state != State::Incomplete =>
                {
                    self.state
                }
                // Back to where batches had brought it: the blocks in which it is unsure lack nothing.
                Toward { batch: true, fuzzy: false, .. } => State::Exact,
                Toward { batch: true, .. } => State::Fuzzy,
                _ if !unsure.is_nothing() => State::Incomplete,
                Toward { fuzzy: true, .. } => State::Fuzzy,
                _ => State::Exact,
            },
            size: toward.size,
            block_size: toward.block_size,
            nonce: toward.stream,
            committed: Some(toward.stream),
            stamp: Some(stamp),
            step: None,
            unsure,
            role: Role { demoted, ..Role::replica(self.role.term, lives) },
            group: self.group.clone(),
            at: Some(at),
        }
    }
}

/// Positions after `[0, upto)` was brought to `epoch`.
pub(crate) fn overlay(positions: &[Position], epoch: Epoch, upto: u64) -> Vec<Position> {
    if upto == 0 {
        return positions.to_vec();
    }
    let mut next = vec![Position { epoch: Some(epoch), upto }];
    for p in positions.iter().filter(|p| p.upto > upto) {
        match next.last_mut() {
            Some(last) if last.epoch == p.epoch => last.upto = p.upto,
            _ => next.push(*p),
        }
    }
    next
}

/// Positions after `[0, upto)` of what will have `size` bytes was brought to `epoch`. Once all of it was, the rest
/// does not belong to the replica: it will be cut off a file, or the device is larger than its source.
pub(crate) fn reached(positions: &[Position], epoch: Epoch, upto: u64, size: u64) -> Vec<Position> {
    let mut reached = overlay(positions, epoch, upto);
    if upto > 0 && upto >= size {
        reached.truncate(1);
        reached.iter_mut().for_each(|p| p.upto = size);
    }
    reached
}

/// Up to where a delta's changes count as made: a block that was changed in part is changed again, as a whole.
pub(crate) fn whole_blocks(upto: u64, block_size: u32, size: u64) -> u64 {
    if upto >= size { upto } else { upto - upto % u64::from(block_size).max(1) }
}

/// Where the positions end: beyond there is nothing.
pub(crate) fn known(positions: &[Position]) -> u64 {
    positions.last().map_or(0, |p| p.upto)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::role::Promoted;

    fn at(number: u64) -> Epoch {
        Epoch { number, id: Uuid::from_u128(number.into()) }
    }

    fn p(number: u64, upto: u64) -> Position {
        Position { epoch: Some(at(number)), upto }
    }

    #[test]
    fn positions_overlay() {
        let base = [p(1, 100)];
        assert_eq!(overlay(&base, at(2), 0), base);
        let once = overlay(&base, at(2), 40);
        assert_eq!(once, [p(2, 40), p(1, 100)]);
        // Interrupted again, before and behind the first position.
        assert_eq!(overlay(&once, at(3), 10), [p(3, 10), p(2, 40), p(1, 100)]);
        assert_eq!(overlay(&once, at(3), 60), [p(3, 60), p(1, 100)]);
        assert_eq!(overlay(&once, at(2), 60), [p(2, 60), p(1, 100)]);
        assert_eq!(overlay(&once, at(3), 200), [p(3, 200)]);
        assert_eq!(overlay(&once, at(1), 50), [p(1, 100)]);
        assert_eq!(overlay(&[], at(1), 50), [p(1, 50)]);
        // An adopted device that is larger than its source.
        let adopted = [Position { epoch: None, upto: 300 }];
        assert_eq!(reached(&adopted, at(1), 200, 200), [p(1, 200)]);
        assert_eq!(reached(&adopted, at(1), 150, 200), [p(1, 150), adopted[0]]);
        assert_eq!(reached(&adopted, at(1), 0, 0), adopted);
        assert_eq!(known(&once), 100);
        assert_eq!(
            [0, 4095, 4096, 9999, 10_000].map(|at| whole_blocks(at, 4096, 10_000)),
            [0, 0, 4096, 8192, 10_000]
        );
    }

    #[test]
    fn lineage_is_kept_and_refused() {
        let temp = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(temp.path()).unwrap();
        assert_eq!(Lineage::load(&folder).unwrap(), None);
        let mut lineage = Lineage::new();
        lineage.stamp =
            Some(Stamp { inode: 7, size: 4096, changed: -1, written: Some(-2), ..Stamp::default() });
        lineage.step = Some(Step {
            kind: StepKind::Clone { inode: 9 },
            nonce: Uuid::new_v4(),
            positions: vec![p(2, 40), Position { epoch: None, upto: 100 }],
            unsure: Unsure::Nothing,
            toward: Toward {
                source: Uuid::new_v4(),
                epoch: at(2),
                size: 100,
                block_size: 4096,
                fuzzy: false,
                batch: false,
                stream: Uuid::new_v4(),
                lives: Some(Lives::first(Uuid::from_u128(1)).reaching(7)),
            },
            finished: false,
            durable: 0,
        });
        lineage.store(&folder).unwrap();
        assert_eq!(Lineage::load(&folder).unwrap().as_ref(), Some(&lineage));

        let path = temp.path().join(NAME);
        let role = Role {
            term: 3,
            lives: Lives::first(Uuid::from_u128(1)).reaching(7).and(Uuid::from_u128(2)),
            promoted: Some(Promoted { since: 7, id: Uuid::new_v4(), term: 3, released: false }),
            promoted_in: Some(".db.dsync-group".into()),
            made_in: Some("/var/lib/dsync".into()),
            released: Some(Released { epoch: at(2), term: 2 }),
            demoted: Some(crate::Demoted {
                complete: true,
                since: 6,
                told: Some("far:/vm.raw".into()),
                saved: None,
                lives: Lives::first(Uuid::from_u128(1)).reaching(9),
                gave_up: Some(crate::GaveUp { term: 2, began: at(1) }),
            }),
        };
        let marked = Lineage { role, unsure: Unsure::Everything, ..lineage.clone() };
        marked.store(&folder).unwrap();
        assert_eq!(Lineage::load(&folder).unwrap().as_ref(), Some(&marked));
        lineage.store(&folder).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).unwrap();
        assert!(Lineage::load(&folder).unwrap_err().to_string().contains("newer"));
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert!(matches!(Lineage::load(&folder), Err(ReplicaError::Damaged { .. })));
        let swapped = text.replace("\"upto\": 40", "\"upto\": 400");
        std::fs::write(&path, swapped).unwrap();
        assert!(matches!(Lineage::load(&folder), Err(ReplicaError::Damaged { .. })));
    }
}
