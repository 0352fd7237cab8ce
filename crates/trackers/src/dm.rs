//! The dm tracker: a device mapped through dm-track, the project's own target (`kernel/dm-track`), which records what is
//! written to it. With a metadata device the record outlives reboots and crashes.
//!
//! The stack is set up and spoken to with `dmsetup`; the record is read from `/proc/track`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device::identity;
use extents::Bitmap;
use uuid::Uuid;

use crate::tracker::{BEGAN, block_size_for, taken};
use crate::{TrackError, Tracker};

const PROC: &str = "/proc/track";
const MAGIC: &[u8; 8] = b"dmtrack1";
/// Sectors of 512 bytes are the device mapper's unit.
const SECTOR: u64 = 512;

/// Where a device of this name appears.
pub fn path(name: &str) -> PathBuf {
    Path::new("/dev/mapper").join(name)
}

/// Maps `device` through dm-track as `/dev/mapper/NAME`, in blocks of `block_size` bytes, or of 4 KiB and more for disks
/// above 4 TiB, with its metadata on the device `meta` if there is one. Writes to `device` itself are not recorded from now on.
///
/// # Errors
/// `Unable` without the module or `dmsetup`, `Refused` where the device is in use or the name is taken.
pub fn add(
    device: &Path,
    name: &str,
    block_size: Option<u32>,
    meta: Option<&Path>,
) -> Result<Box<dyn Tracker>, TrackError> {
    let disk = identity(device)?;
    if !disk.is_block() {
        return Err(TrackError::Unable(format!(
            "{} is not a block device: for a file use \"dsync serve\"",
            device.display()
        )));
    }
    for path in [Some(device), meta].into_iter().flatten() {
        if let Some(user) = device::in_use(path) {
            return Err(TrackError::Refused(format!(
                "{} is {user}: the device mapper cannot be inserted below a device in use: stop that use, or pass --with bpf",
                path.display()
            )));
        }
    }
    // The next step shows whether it worked.
    let _ = Command::new("modprobe").arg("dm-track").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !Path::new(PROC).is_dir() {
        return Err(TrackError::Unable(
            "the module dm-track is not loaded: build and install it (kernel/dm-track/README.md), or use --with bpf".into(),
        ));
    }
    let mut table = format!(
        "0 {} track {} 0 {}",
        disk.size / SECTOR,
        disk.path.display(),
        u64::from(block_size.unwrap_or_else(|| block_size_for(disk.size))) / SECTOR
    );
    if let Some(meta) = meta {
        table.push_str(&format!(" 2 meta {}", identity(meta)?.path.display()));
    }
    // The target's reasons do not reach dmsetup.
    dmsetup("map (dmesg may say more)", device, &["create", name, "--table", &table])?;
    let mapped = path(name);
    match find(&mapped)? {
        Some(tracker) => Ok(tracker),
        None => Err(kernel("find what was mapped", &mapped)("it is not there".into())),
    }
}

/// Ends the mapping of a device that [`add`] has mapped. False if it is not mapped through dm-track.
pub fn remove(device: &Path) -> Result<bool, TrackError> {
    let Some(name) = name_of(device)? else { return Ok(false) };
    if status(device, &name)?.is_none() {
        return Ok(false);
    }
    dmsetup("unmap", device, &["remove", &name]).map(|_| true)
}

/// The dm tracker of a device, if it is mapped through dm-track.
pub(crate) fn find(device: &Path) -> Result<Option<Box<dyn Tracker>>, TrackError> {
    // Only root may use the device mapper.
    if !Path::new(PROC).is_dir() || !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let Some(name) = name_of(device)? else { return Ok(None) };
    let Some(first) = status(device, &name)? else { return Ok(None) };
    let Some(block_size) = first.block_size() else {
        return Err(kernel("understand the status", device)(format!(
            "blocks of {} sectors",
            first.block_sectors
        )));
    };
    let size = identity(device)?.size;
    let Some(record) = first.record else {
        return Err(kernel("understand the status", device)("the status names no record".into()));
    };
    let ended = Mutex::new(None);
    Ok(Some(Box::new(DmTracker { device: device.into(), name, block_size, size, record, ended })))
}

/// The devices that are mapped through dm-track.
pub(crate) fn list() -> Vec<PathBuf> {
    let names = std::fs::read_dir(PROC).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let devices = names.map(|name| Path::new("/dev/mapper").join(name));
    devices.filter(|device| device.exists()).collect()
}

/// The name of a mapped device; `None` for all others.
fn name_of(device: &Path) -> Result<Option<String>, TrackError> {
    let Ok(disk) = identity(device) else { return Ok(None) };
    if !disk.is_block() {
        return Ok(None);
    }
    let number = format!("{}:{}", rustix::fs::major(disk.dev), rustix::fs::minor(disk.dev));
    let place = Path::new("/sys/dev/block").join(number).join("dm/name");
    match std::fs::read_to_string(&place) {
        Ok(name) => Ok(Some(name.trim_end().into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TrackError::state("cannot read the name", &place)(error)),
    }
}

fn kernel<'a>(what: &'static str, device: &'a Path) -> impl FnOnce(String) -> TrackError + 'a {
    move |error| TrackError::Kernel { what, device: device.into(), error }
}

/// Runs `dmsetup` and returns what it prints.
fn dmsetup(what: &'static str, device: &Path, arguments: &[&str]) -> Result<String, TrackError> {
    let run = Command::new("dmsetup").args(arguments).stdin(Stdio::null()).output();
    let output = run.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            TrackError::Unable("dmsetup is missing: install the package dmsetup".into())
        }
        _ => kernel(what, device)(format!("dmsetup: {e}")),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().into());
    }
    Err(kernel(what, device)(String::from_utf8_lossy(&output.stderr).trim().into()))
}

/// The target's status line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Status {
    block_sectors: u32,
    blocks: u64,
    frozen: Option<u64>,
    /// Identifies the record.
    record: Option<Uuid>,
    lost: bool,
    released: Option<Uuid>,
}

impl Status {
    /// From a line of `dmsetup status`; `None` for another target's.
    fn parse(line: &str) -> Option<Result<Status, String>> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.get(2) != Some(&"track") {
            return None;
        }
        let fields = &fields[3..];
        let field = |n: usize| fields.get(n).copied().unwrap_or_default();
        let number = |n: usize| field(n).parse::<u64>().map_err(|_| format!("unexpected status: {line}"));
        let parse = || {
            Ok(Status {
                block_sectors: u32::try_from(number(0)?).unwrap_or(0),
                blocks: number(1)?,
                frozen: if field(3) == "-" { None } else { Some(number(3)?) },
                record: Uuid::parse_str(field(5)).ok(),
                lost: field(6) != "tracked",
                released: Uuid::parse_str(field(8)).ok(),
            })
        };
        Some(parse())
    }

    fn block_size(&self) -> Option<u32> {
        let good = self.block_sectors.is_power_of_two() && (8..=2048).contains(&self.block_sectors);
        good.then_some(self.block_sectors * SECTOR as u32)
    }
}

fn status(device: &Path, name: &str) -> Result<Option<Status>, TrackError> {
    let said = dmsetup("ask for the status", device, &["status", name])?;
    match said.lines().next().and_then(Status::parse) {
        Some(status) => status.map(Some).map_err(kernel("understand the status", device)),
        None => Ok(None),
    }
}

/// See the module.
struct DmTracker {
    device: PathBuf,
    name: String,
    block_size: u32,
    size: u64,
    record: Uuid,
    /// The number of the last epoch that was ended through this object.
    ended: Mutex<Option<u64>>,
}

impl DmTracker {
    fn status(&self) -> Result<Status, TrackError> {
        match status(&self.device, &self.name)? {
            Some(status) if status.record == Some(self.record) => Ok(status),
            Some(_) => Err(kernel("continue tracking", &self.device)(
                "it was mapped again with a new record: run again".into(),
            )),
            None => Err(kernel("continue tracking", &self.device)(
                "it is no longer mapped through dm-track".into(),
            )),
        }
    }

    fn message(&self, words: &[&str]) -> Result<String, TrackError> {
        dmsetup("end an epoch", &self.device, &[&["message", &self.name, "0"], words].concat())
    }

    fn ended(&self) -> MutexGuard<'_, Option<u64>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, suffix: &str) -> Result<(File, PathBuf), TrackError> {
        let place = Path::new(PROC).join(format!("{}{suffix}", self.name));
        let file = File::open(&place).map_err(TrackError::state("cannot open the record", &place))?;
        Ok((file, place))
    }

    /// The frozen record of the epoch of this number, and whether it is lost.
    fn frozen(&self, epoch: u64) -> Result<(Bitmap, bool), TrackError> {
        let (mut file, place) = self.file(".frozen")?;
        let most = self.size.div_ceil(u64::from(self.block_size));
        read_frozen(&mut file, most, (epoch, self.record))
            .map_err(TrackError::state("cannot read the record", &place))
    }
}

impl Tracker for DmTracker {
    fn kind(&self) -> &'static str {
        "dm"
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn lost(&self) -> Result<Option<String>, TrackError> {
        let status = self.status()?;
        let lost = match status.frozen {
            Some(epoch) if !status.lost => self.frozen(epoch)?.1,
            _ => status.lost,
        };
        Ok(lost.then(|| BEGAN.into()))
    }

    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        // What is frozen was not released: it belongs to this epoch.
        if self.status()?.frozen.is_some() {
            self.message(&["abort"])?;
        }
        let said = self.message(&["checkpoint"])?;
        let epoch = said.parse::<u64>().map_err(|_| {
            kernel("end an epoch", &self.device)(format!("expected its number, got \"{said}\""))
        })?;
        let (changes, _) = self.frozen(epoch)?;
        *self.ended() = Some(epoch);
        Ok(changes)
    }

    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        // The kernel compares the number too, so no other process can interfere.
        match (self.ended().take(), self.status()?.frozen) {
            (Some(ours), Some(frozen)) if ours == frozen => {
                self.message(&["release", &ours.to_string(), &epoch.to_string()]).map(drop)
            }
            _ => Err(taken(&self.device)),
        }
    }

    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(self.status()?.released)
    }

    fn dirty(&self) -> Result<Bitmap, TrackError> {
        let (file, place) = self.file("")?;
        let failed = TrackError::state("cannot read the record", &place);
        let dirty = Bitmap::new(self.size.div_ceil(u64::from(self.block_size)));
        for line in BufReader::new(file).lines() {
            let block = line.and_then(|line| line.parse::<u64>().map_err(io::Error::other));
            let block = block.map_err(&failed)?;
            if block < dirty.blocks() {
                dirty.set(block..block + 1);
            }
        }
        Ok(dirty)
    }
}

/// Reads a header and a bitmap of at most so many blocks, which must be this epoch's of this record. The second is true if
/// the epoch is lost.
fn read_frozen(from: &mut impl Read, most: u64, (epoch, record): (u64, Uuid)) -> io::Result<(Bitmap, bool)> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut header = [0; 64];
    from.read_exact(&mut header)?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    if &header[..8] != MAGIC {
        return Err(wrong("not a record"));
    }
    if number(8) != epoch || header[32..48] != record.as_bytes()[..] {
        return Err(wrong("another program has ended its epoch in the meantime: run again"));
    }
    let blocks = number(16);
    if blocks > most {
        return Err(wrong("the record is of a larger device"));
    }
    let changes = Bitmap::new(most);
    let mut chunk = vec![0; 1 << 20];
    let (mut block, mut left) = (0, blocks.div_ceil(64) * 8);
    while left > 0 {
        let len = left.min(chunk.len() as u64);
        let bytes = &mut chunk[..len as usize];
        from.read_exact(bytes)?;
        for word in bytes.chunks_exact(8) {
            let mut word = u64::from_le_bytes(std::array::from_fn(|i| word[i]));
            while word != 0 {
                let first = word.trailing_zeros();
                let count = (word >> first).trailing_ones();
                let begin = block + u64::from(first);
                changes.set(begin.min(blocks)..(begin + u64::from(count)).min(blocks));
                // All ones from `first` up, without the run.
                word &= !(u64::MAX >> (64 - count) << first);
            }
            block += 64;
        }
        left -= len;
    }
    Ok((changes, number(48) >> 32 & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_line_is_understood() {
        let id = "c3d41c9e-7b25-4f6e-9f4e-0a1b2c3d4e5f";
        let line = format!("0 41943040 track 8 5242880 1207 4 5 {id} tracked 1311232 {id} ok 3");
        let status = Status::parse(&line).expect("ours").expect("sense");
        assert_eq!((status.block_size(), status.blocks, status.frozen), (Some(4096), 5242880, Some(4)));
        assert_eq!((status.lost, status.released), (false, Uuid::parse_str(id).ok()));
        let line = format!("0 80 track 8 10 0 - 1 {id} lost 100 -");
        let status = Status::parse(&line).expect("ours").expect("sense");
        assert_eq!((status.frozen, status.lost, status.released), (None, true, None));
    }

    #[test]
    fn other_lines_are_not() {
        assert_eq!(Status::parse("0 80 linear"), None);
        assert_eq!(Status::parse(""), None);
        assert!(Status::parse("0 80 track").expect("ours").is_err());
        assert!(Status::parse("0 80 track 8 ten 0 - 1").expect("ours").is_err());
        let odd = Status::parse("0 80 track 9 10 0 - 1 x lost 100 -").expect("ours").expect("sense");
        assert_eq!(odd.block_size(), None);
    }

    const RECORD: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
    const THIS: (u64, Uuid) = (7, RECORD);

    fn record(blocks: u64, flags: u32, words: &[u64]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [7, blocks, 0] {
            bytes.extend(u64::to_le_bytes(number));
        }
        bytes.extend(RECORD.as_bytes());
        bytes.extend(8u32.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend([0; 8]);
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes
    }

    fn runs(bytes: &[u8], most: u64) -> (Vec<std::ops::Range<u64>>, bool) {
        let (changes, lost) = read_frozen(&mut &bytes[..], most, THIS).expect("a record");
        (changes.runs().collect(), lost)
    }

    #[test]
    fn a_record_is_read() {
        assert_eq!(runs(&record(130, 0, &[0b1101, 0, 0b11]), 130), (vec![0..1, 2..4, 128..130], false));
        assert_eq!(runs(&record(128, 1, &[u64::MAX, 1 << 63]), 200), (vec![0..64, 127..128], true));
        // Bits past the end do not count.
        assert_eq!(runs(&record(65, 0, &[1 | 1 << 63, u64::MAX]), 65), (vec![0..1, 63..65], false));
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let good = record(128, 0, &[1, 2]);
        for len in 0..good.len() {
            assert!(read_frozen(&mut &good[..len], 128, THIS).is_err(), "{len} bytes");
        }
        assert!(read_frozen(&mut &good[..], 127, THIS).is_err());
        assert!(read_frozen(&mut &record(u64::MAX, 0, &[])[..], 128, THIS).is_err());
        assert!(read_frozen(&mut &[b"dmtrack2", &good[8..]].concat()[..], 128, THIS).is_err());
        assert!(read_frozen(&mut &good[..], 128, THIS).is_ok());
        assert!(read_frozen(&mut &good[..], 128, (8, RECORD)).is_err(), "another epoch");
        assert!(read_frozen(&mut &good[..], 128, (7, Uuid::nil())).is_err(), "another record");
    }
}
