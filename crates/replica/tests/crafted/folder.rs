//! One input for everything that reads the state of a replica, which may belong to a user who crafts it; `fuzz/` includes this file.

use std::path::Path;

use delta::{Encoder, Epoch, Frame, Header, Method, Record};
use device::Buf;
use replica::{CommitMode, Keep, Replica, ReplicaOptions};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use uuid::Uuid;

const BLOCK: u32 = 4096;
const SIZE: u64 = 16 * BLOCK as u64;
/// What no command may write to: a link in the state leads here.
const VICTIM: &[u8] = b"precious";
/// Names that mean something in the folder, beside those that are there.
const NAMES: [&str; 9] =
    ["journal", "journal-whole", "undo", "unsure", "verdict", "view-x", "rest", "lineage.new", "intent"];

fn merge(replica: &mut Replica, header: &Header, fill: u8) -> Result<(), Box<dyn std::error::Error>> {
    let (mut encoder, unit) = Encoder::new(header, None)?;
    let mut receipt = replica.receive(unit, CommitMode::Journal)?;
    let record = Record::Data { offset: 0, len: BLOCK.into() };
    let data = Buf::from(&[fill; BLOCK as usize][..]);
    receipt.unit(encoder.frame(Frame { records: vec![record], data })?)?;
    receipt.unit(encoder.trailer())?;
    receipt.finish()?;
    Ok(())
}

/// A replica at its third epoch, which keeps its past.
fn make(path: &Path, options: &ReplicaOptions) -> Result<(), Box<dyn std::error::Error>> {
    let mut replica = Replica::open(path, options)?;
    let (source, epochs) =
        (Uuid::from_u128(1), [1, 2, 3].map(|n| Epoch { number: n, id: Uuid::from_u128(n.into()) }));
    merge(&mut replica, &Header::new(source, Method::Copy, vec![epochs[0]], (0, SIZE), BLOCK), 1)?;
    for pair in epochs.windows(2) {
        let header = Header::new(source, Method::Tracked, pair.to_vec(), (SIZE, SIZE), BLOCK);
        merge(&mut replica, &header, pair[1].number as u8)?;
    }
    Ok(())
}

/// Changes one file of the folder as four bytes say.
fn craft(state: &Path, victim: &Path, [what, which, at, value]: [u8; 4]) -> std::io::Result<()> {
    let mut names: Vec<String> = NAMES.iter().map(|&name| name.to_owned()).collect();
    names.extend(state.read_dir()?.flatten().filter_map(|entry| entry.file_name().into_string().ok()));
    names.sort();
    let path = state.join(&names[usize::from(which) % names.len()]);
    let mut bytes = std::fs::symlink_metadata(&path)
        .is_ok_and(|found| found.is_file())
        .then(|| std::fs::read(&path))
        .transpose()?
        .unwrap_or_default();
    // Most of what is read is at the beginning.
    let place = (usize::from(at) * (1 + usize::from(what >> 4))).min(bytes.len());
    let remove = || match path.is_dir() {
        true => std::fs::remove_dir(&path),
        false => std::fs::remove_file(&path),
    };
    match what % 16 {
        0..6 if place < bytes.len() => bytes[place] = value,
        6 => bytes.truncate(place),
        7 | 8 => drop(bytes.splice(place..place, [value; 8])),
        9 => bytes.extend([value; 5000]),
        10 => bytes = vec![value; usize::from(at)],
        11 => return remove(),
        12 => {
            let _ = remove();
            return std::os::unix::fs::symlink(victim, &path);
        }
        13 => {
            let _ = remove();
            return Ok(mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0)?);
        }
        14 => {
            let _ = remove();
            return std::fs::create_dir(&path);
        }
        _ => return Ok(()),
    }
    let _ = remove();
    std::fs::write(&path, bytes)
}

/// Makes a replica, changes its state as `bytes` say, and asks everything of it. Whatever is there, there is an answer, and nothing is written
/// outside.
///
/// # Panics
/// If a promise is broken.
pub(crate) fn fuzz_state(bytes: &[u8]) {
    // In memory: nothing of it outlives the process.
    let temp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let (path, victim) = (temp.path().join("vm.raw"), temp.path().join("victim"));
    std::fs::write(&victim, VICTIM).expect("a file");
    let options =
        ReplicaOptions { keep: Some(Keep { last: 2, ..Keep::default() }), ..ReplicaOptions::default() };
    make(&path, &options).expect("a replica");
    let state = temp.path().join(".vm.raw.dsync");
    for part in bytes.chunks_exact(4).take(8) {
        let _ = craft(&state, &victim, [part[0], part[1], part[2], part[3]]);
    }
    let _ = replica::inspect(&path, &options).map(|lineage| format!("{lineage:?}"));
    let _ = replica::readers(&path, &options).map(|readers| readers.len());
    let _ = replica::history(&path, &options).map(drop);
    let _ = replica::settle(&path, &options);
    let _ = Replica::open(&path, &options).map(drop);
    let _ = replica::inspect(&path, &options).map(drop);
    assert!(std::fs::read(&victim).expect("a file") == VICTIM, "a link was followed");
}
