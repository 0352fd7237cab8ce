//! Starts and stops tracking: programs, maps and links, pinned so that they outlive the process.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use aya::programs::links::FdLink;
use aya::programs::{BtfTracePoint, Program, ProgramError};
use aya::{Btf, EbpfLoader};
use extents::Bitmap;
use rustix::fs::{FlockOperation, flock};

use super::disk::BlockDevice;
use super::notes::{Counts, Notes};
use super::unseen::{TYPES, unseen};
use super::{BpfTracker, FUNCTIONS, LEFT_OUT, LINKS, MAPS, RECORDS, TRACEPOINTS, check_owner, folder, sys};
use crate::TrackError;

/// The program, as `make bpf` builds it.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../../bpf/track.bpf.o");

/// Where BPF objects are pinned.
pub(super) const BPFFS: &str = "/sys/fs/bpf";
const BPFFS_MAGIC: i64 = 0xcafe_4a11;

/// Starts tracking a block device. `why` says why earlier writes are not known.
pub(super) fn begin(
    disk: &BlockDevice,
    block_size: Option<u32>,
    why: &str,
) -> Result<BpfTracker, TrackError> {
    check_machine()?;
    if disk.is_zoned() {
        return Err(TrackError::Unable(format!(
            "{} is a zoned disk, which the tracker cannot follow: use \"dsync sync --method compare\"",
            disk.path.display()
        )));
    }
    if let Some(how) = unseen(&disk.whole_disk(), Path::new(TYPES)) {
        return Err(TrackError::Unable(format!(
            "{} {how}, and the bpf tracker would miss such writes: use \"dsync track add --with dm\", whose device allows \
             neither, or \"dsync sync --method compare\"",
            disk.path.display()
        )));
    }
    let block_size = block_size.unwrap_or_else(|| crate::tracker::block_size_for(disk.size));
    let place = folder(&disk.number);
    check_owner(&place)?;
    // Nobody else may write to it, whatever the umask.
    let mut folder = std::fs::DirBuilder::new();
    folder.mode(0o700);
    let mut make = || loop {
        folder.recursive(true).create(place.parent().unwrap_or(&place))?;
        if let Some(held) = alone(&place, FlockOperation::LockExclusive)? {
            return folder.recursive(false).create(&place).map(|()| held);
        }
    };
    let _held = make().map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => TrackError::Refused(format!(
            "{} is already tracked: see \"dsync status {0}\", or end it with \"dsync track remove {0}\"",
            disk.path.display()
        )),
        _ => TrackError::state("cannot create a folder", &place)(error),
    })?;
    let begun = load(disk, block_size, &place, why).and_then(|()| BpfTracker::open(&place, &disk.path));
    if begun.is_err() {
        // Incomplete pins are of no use.
        let _ = unpin(&place);
    }
    begun
}

fn load(disk: &BlockDevice, block_size: u32, place: &Path, why: &str) -> Result<(), TrackError> {
    let failed = |what: &'static str| {
        let device = disk.path.clone();
        move |error: String| TrackError::Kernel { what, device: device.clone(), error }
    };
    let pin = TrackError::state("cannot pin", place);
    let btf = Btf::from_sys_fs().map_err(|e| failed("read the kernel's types")(chain(&e)))?;
    let blocks = disk.size.div_ceil(u64::from(block_size));
    let words = Bitmap::<()>::words(blocks);
    let leaf_words = blocks.div_ceil(4096) * 64;
    let block_shift = u64::from((block_size / 512).trailing_zeros());
    let sectors = disk.size / 512;
    let mut programs = EbpfLoader::new()
        .btf(Some(&btf))
        .override_global("diskseq", &disk.diskseq, true)
        .override_global("first_sector", &disk.first_sector, true)
        .override_global("sectors", &sectors, true)
        .override_global("block_shift", &block_shift, true)
        .override_global("leaf_words", &leaf_words, true)
        .load(OBJECT)
        .map_err(|e| failed("load the program")(chain(&e)))?;
    for name in MAPS {
        let map = programs.map(name).ok_or_else(|| failed("load the program")(format!("no map {name}")))?;
        map.pin(place.join(name)).map_err(|e| failed("pin a map")(chain(&e)))?;
    }
    for name in RECORDS {
        let record = sys::create_record(words).map_err(|e| failed("make a record")(e.to_string()))?;
        sys::pin(record.as_fd(), &place.join(name)).map_err(&pin)?;
        if name == RECORDS[0] {
            let slot = sys::get(&place.join("slot")).map_err(&pin)?;
            super::put_in_slot(slot.as_fd(), record.as_fd())
                .map_err(|e| failed("begin a record")(e.to_string()))?;
        }
    }
    let mut ids = [0; LINKS.len()];
    for ((id, name), at) in ids.iter_mut().zip(LINKS).zip(TRACEPOINTS.into_iter().chain(FUNCTIONS)) {
        let fail = failed("attach the program");
        let program = programs.program_mut(name).ok_or_else(|| fail(format!("no program {name}")))?;
        let link = match attach(program, at, &btf) {
            Err(_) if FUNCTIONS.contains(&at) => {
                *id = LEFT_OUT;
                continue;
            }
            attached => attached.map_err(|e| fail(format!("{at}: {}", chain(&e))))?,
        };
        link.pin(place.join(name)).map_err(|e| fail(chain(&e)))?;
        *id = sys::get(&place.join(name)).and_then(|link| sys::link_ids(link.as_fd())).map_err(&pin)?.0;
    }
    let notes = Notes {
        device: disk.path.clone(),
        diskseq: disk.diskseq,
        first_sector: disk.first_sector,
        size: disk.size,
        part: disk.part,
        block_size,
        boot: boot_id(),
        links: ids,
        lost: Some(why.to_owned()),
        released: None,
        base: Counts::default(),
        pending: None,
        ended: None,
        doubtful: false,
        restored: false,
        saved: None,
    };
    let map = sys::get(&place.join("notes")).map_err(&pin)?;
    notes.write(map.as_fd()).map_err(&pin)
}

/// Attaches a program to a tracepoint or a function of the kernel.
fn attach(program: &mut Program, at: &str, btf: &Btf) -> Result<FdLink, ProgramError> {
    if let Program::FEntry(program) = program {
        program.load(at, btf)?;
        let link = program.attach()?;
        return program.take_link(link).map(FdLink::from);
    }
    let program: &mut BtfTracePoint = program.try_into()?;
    program.load(at, btf)?;
    let link = program.attach()?;
    program.take_link(link).map(FdLink::from)
}

/// Locks the folder of all trackers, beside this one: who makes or removes one holds it alone. `None` if there is none, which goes with the last of
/// them.
pub(super) fn alone(place: &Path, how: FlockOperation) -> io::Result<Option<File>> {
    let all = place.parent().unwrap_or(place);
    let found =
        |error: io::Error| if error.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(error) };
    loop {
        let held = match File::open(all) {
            Ok(held) => held,
            Err(error) => return found(error),
        };
        flock(&held, how)?;
        let (ours, here) = (held.metadata()?, std::fs::metadata(all));
        match here.map(|here| (here.dev(), here.ino()) == (ours.dev(), ours.ino())) {
            Ok(true) => return Ok(Some(held)),
            Ok(false) => {}
            Err(error) => return found(error),
        }
    }
}

/// Removes the pins in a folder, which ends the tracking once running programs have finished.
pub(super) fn unpin(place: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(place)? {
        std::fs::remove_file(entry?.path())?;
    }
    std::fs::remove_dir(place)?;
    // The folder of all trackers goes with the last of them.
    let _ = place.parent().map(std::fs::remove_dir);
    Ok(())
}

/// Checks the requirements of the machine.
fn check_machine() -> Result<(), TrackError> {
    let unable = |why: &str| Err(TrackError::Unable(why.to_owned()));
    if !rustix::process::geteuid().is_root() {
        return unable(
            "tracking a device needs root: run with sudo. Untracked, a device can be synced while it is not in use: \"dsync sync\" compares it",
        );
    }
    if !Path::new(TYPES).exists() {
        return unable(
            "this kernel has no BTF (/sys/kernel/btf/vmlinux), which the bpf tracker needs: use \"dsync serve\", or \"dsync track add --with dm\". A \
             device that is not in use is compared by \"dsync sync\"",
        );
    }
    mount_bpffs().map_err(|error| {
        TrackError::Unable(format!(
            "no BPF file system is mounted at {BPFFS}, and mounting it failed ({error}): run \"mount -t bpf bpf {BPFFS}\", or \
             use \"dsync sync --method compare\""
        ))
    })
}

/// Mounts the BPF file system where it belongs, as systemd and bpftool do, unless it is there.
fn mount_bpffs() -> std::io::Result<()> {
    use rustix::mount::{MountFlags, mount};
    let mounted = || rustix::fs::statfs(BPFFS).is_ok_and(|s| s.f_type == BPFFS_MAGIC);
    if mounted() {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RELATIME;
    Ok(mount("bpf", BPFFS, "bpf", flags, c"mode=700")?)
}

/// The boot id.
pub(super) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
