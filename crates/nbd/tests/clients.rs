//! The clients that people use, against a served file. A test whose client is not installed says so and passes.
#![allow(missing_docs)]

mod common;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::serve_one;
use nbd::{BlockStatus, Context, Server, ServerLimits};
use serde_json::Value;
use testing::Random;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

/// Says that every other MiB has changed.
struct Dirty;

impl Context for Dirty {
    fn name(&self) -> &str {
        "qemu:dirty-bitmap:dsync"
    }
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        let mut runs = Vec::new();
        let mut at = offset;
        while at < offset + len && runs.len() < limit {
            let next = (at / MIB + 1) * MIB;
            runs.push(BlockStatus { len: next - at, flags: (at / MIB % 2) as u32 });
            at = next;
        }
        Ok(runs)
    }
}

/// A file, served in a folder of its own.
struct ServedFile {
    server: Server,
    folder: tempfile::TempDir,
}

impl ServedFile {
    /// A sparse file: data in some places, zeroes written in others, holes elsewhere.
    fn sparse(direct: bool) -> ServedFile {
        let served = ServedFile::empty(direct);
        let file = File::options().write(true).open(served.file()).unwrap();
        let mut noise = Random::seeded(SIZE);
        for (at, len) in
            [(0, MIB), (10 * MIB, 12345), (20 * MIB + 4096, 4096), (40 * MIB, 3 * MIB), (SIZE - 512, 512)]
        {
            file.write_all_at(&noise.bytes(len as usize), at).unwrap();
        }
        file.write_all_at(&vec![0; MIB as usize], 30 * MIB).unwrap();
        served
    }

    fn empty(direct: bool) -> ServedFile {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        let options = device::DiskOptions { write: true, direct, ..Default::default() };
        let disk = device::open(&path, &options).unwrap();
        let server = serve_one(disk, ServerLimits::default(), |export| {
            export.description = "a disk for tests".into();
            export.contexts.push(Arc::new(Dirty));
        });
        server.serve_unix(UnixListener::bind(folder.path().join("socket")).unwrap()).unwrap();
        ServedFile { server, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("disk.raw")
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path("socket"))
    }

    /// What is in the file, past the server.
    fn content(&self) -> Vec<u8> {
        // Reading waits for no client: all of them have ended.
        self.server.shutdown(Duration::from_secs(10));
        std::fs::read(self.file()).unwrap()
    }
}

/// A process that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a program prints; `None`, and a line that says so, if it is not installed. Fails if it fails or takes minutes.
fn run(program: &str, args: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            testing::skipped(program, "it is not installed");
            return None;
        }
        child => Running(child.unwrap()),
    };
    let collect = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let output = collect(Box::new(child.0.stdout.take().unwrap()));
    let errors = collect(Box::new(child.0.stderr.take().unwrap()));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{program} {args:?} does not end");
        std::thread::sleep(Duration::from_millis(5));
    };
    let (output, errors) = (output.join().unwrap(), errors.join().unwrap());
    assert!(status.success(), "{program} {args:?}: {status}\n{output}\n{errors}");
    Some(output)
}

fn same(one: &Path, other: &Path) {
    assert!(std::fs::read(one).unwrap() == std::fs::read(other).unwrap(), "{one:?} and {other:?} differ");
}

#[test]
fn nbdinfo() {
    let served = ServedFile::sparse(false);
    let Some(output) = run("nbdinfo", &["--json", &served.uri()]) else { return };
    let found: Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&found["protocol"], &found["structured"]), (&"newstyle-fixed".into(), &true.into()));
    let export = &found["exports"][0];
    assert_eq!(export["export-size"], SIZE);
    assert_eq!(export["description"], "a disk for tests");
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation", "qemu:dirty-bitmap:dsync"]));
    assert_eq!((&export["is_read_only"], &export["is_rotational"]), (&false.into(), &false.into()));
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(export[format!("can_{can}")], true, "{can}");
    }
    for (size, bytes) in [("minimum", 1), ("preferred", 4096), ("maximum", 32 << 20)] {
        assert_eq!(export[format!("block_size_{size}")], bytes);
    }
    let list = run("nbdinfo", &["--list", "--json", &served.uri()]).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(
        (&list["exports"][0]["export-name"], list["exports"].as_array().unwrap().len()),
        (&"disk".into(), 1)
    );

    // Every byte that is no hole is in the map, and what the map calls a hole is zero.
    let map = run("nbdinfo", &["--map", "--json", &served.uri()]).unwrap();
    let map: Value = serde_json::from_str(&map).unwrap();
    let content = std::fs::read(served.file()).unwrap();
    let (mut at, mut data) = (0, 0);
    for run in map.as_array().unwrap() {
        let (offset, len) = (run["offset"].as_u64().unwrap(), run["length"].as_u64().unwrap());
        assert_eq!(offset, at);
        at += len;
        match run["type"].as_u64().unwrap() {
            0 => data += len,
            3 => assert!(content[offset as usize..at as usize].iter().all(|byte| *byte == 0)),
            other => panic!("a run of type {other}"),
        }
    }
    assert_eq!(at, SIZE);
    assert!(data < 10 * MIB, "{data} bytes of data");

    let map = run("nbdinfo", &["--map=qemu:dirty-bitmap:dsync", "--json", &served.uri()]).unwrap();
    let map: Value = serde_json::from_str(&map).unwrap();
    let map = map.as_array().unwrap();
    assert_eq!((map.len(), &map[1]["length"], &map[1]["type"]), (64, &MIB.into(), &1.into()));
}

#[test]
fn nbdcopy_both_ways() {
    for connections in ["--connections=1", "--connections=4"] {
        let served = ServedFile::sparse(false);
        let copy = served.path("copy.raw");
        let Some(_) = run("nbdcopy", &[connections, &served.uri(), &copy]) else { return };
        same(&served.file(), Path::new(&copy));
        let blocks = |path: &Path| std::fs::metadata(path).unwrap().blocks();
        assert!(blocks(Path::new(&copy)) < 20 * MIB / 512, "holes stay holes");

        let back = ServedFile::empty(false);
        run("nbdcopy", &[connections, "--flush", &copy, &back.uri()]);
        same(&back.file(), Path::new(&copy));
        assert!(blocks(&back.file()) < 20 * MIB / 512, "holes stay holes");
        // From server to server, over what was there before.
        let other = ServedFile::sparse(true);
        run("nbdcopy", &["--requests=16", &back.uri(), &other.uri()]);
        assert!(other.content() == back.content());
    }
}

#[test]
fn qemu_img() {
    for direct in [false, true] {
        let served = ServedFile::sparse(direct);
        let copy = served.path("copy.qcow2");
        let convert = ["convert", "-f", "raw", "-O", "qcow2", &served.uri(), &copy];
        let Some(_) = run("qemu-img", &convert) else { return };
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &served.uri(), &copy]);
        let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &served.uri()]).unwrap();
        assert!(map.contains("\"data\": false"), "{map}");

        let back = ServedFile::empty(direct);
        run("qemu-img", &["convert", "-n", "-W", "-m", "16", "-f", "qcow2", "-O", "raw", &copy, &back.uri()]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &served.uri(), &back.uri()]);
        let used = std::fs::metadata(back.file()).unwrap().blocks() * 512;
        assert!(used < 20 * MIB, "holes stay holes: {used} bytes");
        assert!(back.content() == served.content());
    }
}

#[test]
fn qemu_io_patterns() {
    for direct in [false, true] {
        let served = ServedFile::empty(direct);
        let commands = [
            "write -P 0x11 0 4M",
            "write -P 0x22 1M 1M",
            "write -f -P 0x33 512 512",
            "aio_write -P 0x44 8M 2M",
            "aio_write -P 0x55 16M 64k",
            "aio_flush",
            "discard 2M 1M",
            "write -z 3M 64k",
            "write -z -u 3584k 64k",
            "write -z -f 12M 8k",
            "write -P 0x66 3583k 1k",
            "flush",
            "read -P 0x11 0 512",
            "read -P 0x33 512 512",
            "read -P 0x22 1M 1M",
            "read -P 0 3M 64k",
            "read -P 0 3584k 64k",
            "read -P 0x66 3583k 1k",
            "read -P 0x44 8M 2M",
            "read -P 0x55 16M 64k",
            "read -P 0 20M 1M",
        ];
        let mut args = vec!["-f", "raw", "-d", "unmap"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        let uri = served.uri();
        args.push(&uri);
        let Some(output) = run("qemu-io", &args) else { return };
        assert!(!output.contains("failed") && !output.contains("rror"), "{output}");
        let used = std::fs::metadata(served.file()).unwrap().blocks() * 512;
        assert!(used <= 7 * MIB, "what was discarded is given back: {used} bytes");
        let content = served.content();
        let expect = |at: u64, len: u64, byte: u8| {
            assert!(
                content[at as usize..(at + len) as usize].iter().all(|found| *found == byte),
                "{byte:#x} at {at}"
            );
        };
        expect(0, 512, 0x11);
        expect(512, 512, 0x33);
        expect(1024, MIB - 1024, 0x11);
        expect(MIB, MIB, 0x22);
        expect(3 * MIB, 64 << 10, 0);
        expect(3584 << 10, 64 << 10, 0);
        expect(8 * MIB, 2 * MIB, 0x44);
    }
}

#[test]
fn fio_verifies_what_it_wrote() {
    let Some(engines) = run("fio", &["--enghelp"]) else { return };
    if !engines.split_whitespace().any(|engine| engine == "nbd") {
        return testing::skipped("fio as a client", "it has no nbd engine");
    }
    for (direct, connections, size) in [(false, 1, "32m"), (false, 4, "16m"), (true, 4, "16m")] {
        let served = ServedFile::empty(direct);
        let uri = format!("--uri=nbd+unix:///disk?socket={}", served.path("socket"));
        let (jobs, size) = (format!("--numjobs={connections}"), format!("--size={size}"));
        let increment = format!("--offset_increment={}", SIZE / connections);
        let mut args =
            vec!["--name=verify", "--ioengine=nbd", &uri, "--rw=randrw", "--iodepth=16", &jobs, &size];
        args.extend([
            &*increment,
            "--bsrange=512-256k",
            "--bs_unaligned=0",
            "--verify=crc32c",
            "--verify_fatal=1",
        ]);
        args.extend(["--verify_backlog=64", "--fsync=50", "--group_reporting", "--output-format=json"]);
        let folder = format!("--aux-path={}", served.folder.path().to_str().unwrap());
        args.push(&folder);
        let output = run("fio", &args).expect("fio was here a moment ago");
        let start = output.find('{').unwrap();
        let found: Value = serde_json::from_str(&output[start..]).unwrap();
        assert_eq!(found["jobs"][0]["error"], 0);
        assert!(found["jobs"][0]["write"]["total_ios"].as_u64().unwrap() > 100);
    }
}
