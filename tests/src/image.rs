//! Disk images on the host: made, changed by hand, compared.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::SeekFrom;

use crate::Random;

/// The tracking block of small images, in bytes.
pub const BLOCK: u64 = 4096;

const CHUNK: u64 = 1 << 20;

/// Makes a sparse image of `size` bytes.
pub fn sparse(path: &Path, size: u64) {
    File::create(path)
        .and_then(|file| file.set_len(size))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Makes an image of `size` random bytes.
pub fn random(path: &Path, size: u64, random: &mut Random) {
    sparse(path, size);
    scribble(path, 0, size, random);
}

/// Writes random bytes over a range, past any server.
pub fn scribble(path: &Path, offset: u64, len: u64, random: &mut Random) {
    let file =
        OpenOptions::new().write(true).open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut at = offset;
    while at < offset + len {
        let step = CHUNK.min(offset + len - at);
        file.write_all_at(&random.bytes(step as usize), at).expect("writing an image");
        at += step;
    }
}

/// A copy with its holes.
pub fn copy(from: &Path, to: &Path) {
    crate::Run::new("cp").arg("--sparse=always").arg(from).arg(to).ok();
}

/// Bytes of disk space an image takes.
pub fn space(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).blocks() * 512
}

/// The size of an image in bytes.
pub fn size(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).len()
}

/// The first offset at or after `from` that may hold data.
fn next_data(file: &File, from: u64, size: u64) -> u64 {
    rustix::fs::seek(file, SeekFrom::Data(from)).unwrap_or(size).min(size)
}

/// Calls `each` for the stretches (at most 1 MiB, aligned) in which either file holds data.
fn walk(a: &Path, b: &Path, mut each: impl FnMut(u64, &[u8], &[u8]) -> bool) {
    let open = |path: &Path| File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (fa, fb) = (open(a), open(b));
    let size = size(a).min(size(b));
    let (mut left, mut right) = (vec![0; CHUNK as usize], vec![0; CHUNK as usize]);
    let mut at = 0;
    loop {
        at = next_data(&fa, at, size).min(next_data(&fb, at, size));
        if at >= size {
            return;
        }
        at -= at % CHUNK;
        let len = CHUNK.min(size - at) as usize;
        fa.read_exact_at(&mut left[..len], at).expect("reading an image");
        fb.read_exact_at(&mut right[..len], at).expect("reading an image");
        if !each(at, &left[..len], &right[..len]) {
            return;
        }
        at += CHUNK;
    }
}

/// The first offset at which two images differ, `None` if they are equal. Another size differs where the shorter ends.
pub fn first_difference(a: &Path, b: &Path) -> Option<u64> {
    let mut found = None;
    walk(a, b, |at, left, right| {
        // First by blocks, which are compared at once.
        let mut pairs = left.chunks(BLOCK as usize).zip(right.chunks(BLOCK as usize)).enumerate();
        if let Some((block, (left, right))) = pairs.find(|(_, (left, right))| left != right) {
            let byte =
                left.iter().zip(right).position(|(l, r)| l != r).unwrap_or(left.len().min(right.len()));
            found = Some(at + block as u64 * BLOCK + byte as u64);
        }
        found.is_none()
    });
    found.or_else(|| (size(a) != size(b)).then(|| size(a).min(size(b))))
}

/// Fails the test unless two images are equal.
pub fn assert_equal(a: &Path, b: &Path) {
    if let Some(at) = first_difference(a, b) {
        panic!(
            "{} ({} bytes) and {} ({} bytes) differ, first at byte {at}; {} blocks of 4 KiB differ",
            a.display(),
            size(a),
            b.display(),
            size(b),
            differing_blocks(a, b).len()
        );
    }
}

/// The numbers of the 4 KiB blocks that differ.
pub fn differing_blocks(a: &Path, b: &Path) -> Vec<u64> {
    let mut blocks = Vec::new();
    walk(a, b, |at, left, right| {
        if left != right {
            let pairs = left.chunks(BLOCK as usize).zip(right.chunks(BLOCK as usize)).enumerate();
            blocks.extend(pairs.filter(|(_, (l, r))| l != r).map(|(i, _)| at / BLOCK + i as u64));
        }
        true
    });
    blocks
}

/// A fingerprint of an image's content, size and allocation, to show that nothing touched it.
pub fn fingerprint(path: &Path) -> (u64, u64, i64, i64) {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    walk(path, path, |at, bytes, _| {
        hasher.write_u64(at);
        hasher.write(bytes);
        true
    });
    let meta = std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (hasher.finish(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b == 0)
}

/// Fails the test unless a copy of an ext4 image needs nothing but the replay of its journal, and is clean after it.
/// The image itself is left alone.
pub fn fsck_after_replay(path: &Path) {
    let replayed = path.with_extension("replayed");
    copy(path, &replayed);
    let replay = crate::Run::new("e2fsck").arg("-fp").arg(&replayed).output();
    assert!(matches!(replay.status.code(), Some(0 | 1)), "{}: {replay}", path.display());
    let text = replay.text();
    // At every recovery the totals are counted again, as the kernel keeps them in memory, and files that were deleted while
    // open are cleared. The guest's clock may run ahead of the host's. Nothing else may be mended.
    let usual = [
        "recovering journal",
        "Setting free",
        "orphan",
        "non-contiguous",
        "in the future",
        "by less than a day",
    ];
    for line in text.lines() {
        assert!(usual.iter().any(|word| line.contains(word)), "{}: '{line}' in {replay}", path.display());
    }
    crate::Run::new("e2fsck").arg("-fn").arg(&replayed).ok();
    std::fs::remove_file(&replayed).expect("removing a copy");
}

/// Bytes of a file that the page cache holds; `None` where the system doesn't say.
pub fn cached(path: &Path) -> Option<u64> {
    let said =
        crate::Run::new("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(path).output();
    said.text().trim().parse().ok()
}

/// Makes the page cache hold the first bytes of a file, whole MiB, and nothing else of it but what the system reads ahead.
pub fn cache(path: &Path, bytes: u64) {
    let dd = |words: &[&str]| {
        crate::Run::new("dd").arg(format!("if={}", path.display())).args(words).arg("status=none").ok()
    };
    crate::Run::new("sync").arg(path).ok();
    dd(&["iflag=nocache", "count=0"]);
    dd(&["of=/dev/null", "bs=1M", &format!("count={}", bytes >> 20)]);
}
