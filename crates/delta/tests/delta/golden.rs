//! Deltas as they were written once. They are in `tests/golden`, each beside what is in it or why it is refused, and are
//! never written again: every version has to read them.
//!
//! To add some: `cargo test -p delta -- --ignored write_golden_files`, which leaves those alone that exist.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use delta::{Frame, Method, Record, Resume};
use device::Buf;
use testing::Random;
use uuid::Uuid;

use crate::model::{delta, epoch, header, read};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// All that a reader learns of a delta, as text.
fn told(bytes: &[u8]) -> String {
    let mut out = String::new();
    let (header, frames) = match read(bytes) {
        Ok(read) => read,
        // Which words the refusal has may change, what it is may not.
        Err(error) => {
            let kind = format!("{error:?}");
            return format!("refused: {}\n", kind.split([' ', '(']).next().unwrap_or_default());
        }
    };
    let _ = writeln!(out, "stream {}\nsource {}", header.stream, header.source);
    for epoch in &header.chain {
        let _ = writeln!(out, "epoch {} {}", epoch.number, epoch.id);
    }
    let _ = writeln!(out, "size {} to {}", header.size_before, header.size_after);
    let _ =
        writeln!(out, "blocks of {}, method {}, fuzzy {}", header.block_size, header.method, header.fuzzy);
    if let Some(nonce) = header.binds {
        let _ = writeln!(out, "binds {nonce}");
    }
    if let Some(resume) = header.resumes {
        let digest = blake3::Hash::from_bytes(resume.digest);
        let _ = writeln!(out, "resumes {} after {} frames, {digest}", resume.stream, resume.frames);
    }
    for Frame { records, data } in frames {
        let _ = writeln!(out, "frame, data {}", blake3::hash(&data));
        for record in records {
            let _ = match record {
                Record::Data { offset, len } => writeln!(out, "  data {offset}+{len}"),
                Record::Zero { offset, len } => writeln!(out, "  zero {offset}+{len}"),
                Record::Unsure { offset, len } => writeln!(out, "  unsure {offset}+{len}"),
                Record::Copy { offset, len, from, hash } => {
                    writeln!(out, "  copy {offset}+{len} from {from}, {:032x}", u128::from_le_bytes(hash))
                }
            };
        }
    }
    out
}

#[test]
fn golden_files_are_read_as_ever() {
    let mut count = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "delta") {
            let expected = fs::read_to_string(path.with_extension("txt")).unwrap();
            assert_eq!(told(&fs::read(&path).unwrap()), expected, "{}", path.display());
            count += 1;
        }
    }
    assert!(count >= 16, "{count} golden files: some are missing");
}

#[test]
#[ignore = "adds golden files"]
fn write_golden_files() {
    let keep = |name: &str, bytes: &[u8]| {
        let path = folder().join(format!("{name}.delta"));
        if !path.exists() {
            fs::write(&path, bytes).unwrap();
            fs::write(path.with_extension("txt"), told(bytes)).unwrap();
        }
    };
    let text: Vec<u8> = (0..12_288).map(|i| b"a page of text is a page of words. "[i % 35]).collect();
    let frame = |records: &[Record], data: &[u8]| Frame { records: records.to_vec(), data: Buf::from(data) };
    let changes = || {
        vec![
            frame(
                &[
                    Record::Data { offset: 0, len: 4096 },
                    Record::Zero { offset: 4096, len: 1 << 40 },
                    Record::Data { offset: 1 << 41, len: 8192 },
                ],
                &text,
            ),
            frame(&[Record::Data { offset: (1 << 42) - 700, len: 700 }], &Random::seeded(9).bytes(700)),
        ]
    };
    let mut tracked = header(1 << 41, 1 << 42, &[41, 43, 44]);
    tracked.stream = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
    let stored = delta(&tracked, changes(), None);
    let packed = delta(&tracked, changes(), Some(3));
    keep("v1-tracked", &stored);
    keep("v1-zstd", &packed);

    let mut seed = header(0, 20_480, &[1]);
    seed.method = Method::Copy;
    keep(
        "v1-seed",
        &delta(&seed, vec![frame(&[Record::Data { offset: 4096, len: 4096 }], &text[..4096])], None),
    );
    keep("v1-empty", &delta(&header(4096, 4096, &[6, 7]), vec![], None));

    let mut rolling = header(65_536, 65_536, &[8]);
    (rolling.method, rolling.binds, rolling.block_size) =
        (Method::Rolling, Some(Uuid::from_u128(0xb1d5)), 512);
    let copies = [
        Record::Copy { offset: 40_000, len: 9000, from: 3, hash: *b"sixteen bytes .." },
        Record::Data { offset: 3, len: 10 },
        Record::Copy { offset: 512, len: 512, from: 60_000, hash: [0xaa; 16] },
    ];
    keep("v1-rolling", &delta(&rolling, vec![frame(&copies, b"ten bytes.")], None));

    let mut resumed = header(65_536, 32_768, &[8, 9, 10]);
    resumed.chain[1] = epoch(u64::MAX - 1);
    resumed.chain[2] = epoch(u64::MAX);
    resumed.fuzzy = true;
    resumed.binds = Some(Uuid::from_u128(5));
    resumed.resumes = Some(Resume { stream: Uuid::from_u128(77), frames: 12, digest: [0x3c; 32] });
    keep(
        "v1-resumed-fuzzy",
        &delta(&resumed, vec![frame(&[Record::Zero { offset: 0, len: 32_768 }], &[])], None),
    );

    let unsure = [Record::Unsure { offset: 0, len: 1 << 30 }, Record::Zero { offset: 1 << 30, len: 4096 }];
    keep("v1-unsure", &delta(&header(1 << 40, 1 << 40, &[3, 4]), vec![frame(&unsure, &[])], None));

    // And their corrupt siblings.
    let flipped = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x10;
        bytes
    };
    let head = u32::from_le_bytes(stored[8..12].try_into().unwrap()) as usize;
    let first = 16 + head;
    keep("v1-corrupt-header", &flipped(&stored, 60));
    keep("v1-corrupt-records", &flipped(&stored, first + 16 + 40));
    keep("v1-corrupt-data", &flipped(&stored, first + 16 + 36 + 40 + 5000));
    keep("v1-corrupt-zstd", &flipped(&packed, first + 16 + 44 + 40));
    keep("v1-corrupt-trailer", &flipped(&stored, stored.len() - 1));
    keep("v1-cut-in-a-frame", &stored[..first + 6000]);
    keep("v1-cut-before-the-trailer", &stored[..stored.len() - 88]);
    let mut other = tracked.clone();
    other.stream = Uuid::from_u128(0x99);
    let foreign = delta(&other, changes(), None);
    keep("v1-foreign-frame", &[&stored[..first], &foreign[first..]].concat());
    keep("v1-glued", &[&stored[..], &stored].concat());
}
