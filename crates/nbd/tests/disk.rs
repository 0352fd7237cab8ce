//! Exports as disks: of our own server and of others, with what servers lack.
#![allow(missing_docs)]

mod common;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Mode, Rig, serve, serve_one};
use device::{Disk, ExportUri, NbdServer, RamDisk};
use nbd::client::Address;
use nbd::{BlockStatus, Context, NbdDisk, ServerLimits};
use testing::{contract, need};

/// Processes that end with the test, and their folder.
struct Servers {
    folder: tempfile::TempDir,
    running: Mutex<Vec<Child>>,
}

impl Servers {
    fn new() -> Servers {
        Servers { folder: tempfile::tempdir().unwrap(), running: Mutex::default() }
    }

    /// A new path in the folder.
    fn path(&self) -> PathBuf {
        self.folder.path().join(self.running.lock().unwrap().len().to_string())
    }

    fn start(&self, program: &str, args: &[&str], socket: &Path) -> Arc<dyn Disk> {
        let mut server = Command::new(program);
        server.args(args).stdin(Stdio::null()).stdout(Stdio::null());
        self.running.lock().unwrap().push(server.spawn().unwrap());
        Arc::new(connect(socket))
    }

    /// A disk in nbdkit's memory, behind these options.
    fn nbdkit(&self, options: &[&str], size: u64) -> Arc<dyn Disk> {
        let socket = self.path();
        let size = format!("size={size}");
        let mut args = vec!["-f", "-U", socket.to_str().unwrap()];
        let at = options.iter().position(|o| !o.starts_with('-')).unwrap_or(options.len());
        args.extend(&options[..at]);
        args.extend(["memory", &size]);
        args.extend(&options[at..]);
        self.start("nbdkit", &args, &socket)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for server in self.running.get_mut().unwrap() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Connects as soon as the server listens.
fn connect(socket: &Path) -> NbdDisk {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match NbdDisk::connect(&Address::from(socket), "") {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                assert!(Instant::now() < until, "no server: {e}");
                std::thread::sleep(Duration::from_millis(2));
            }
            connected => return connected.unwrap(),
        }
    }
}

/// Our own server of a disk, on a socket.
struct Own {
    server: nbd::Server,
    folder: tempfile::TempDir,
}

impl Own {
    fn new(disk: Arc<dyn Disk>) -> Own {
        let own = Own { server: serve(disk), folder: tempfile::tempdir().unwrap() };
        own.server.serve_unix(UnixListener::bind(own.socket()).unwrap()).unwrap();
        own
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn disk(&self) -> NbdDisk {
        NbdDisk::connect(&Address::from(&*self.socket()), "disk").unwrap()
    }
}

/// A bitmap in which every other MiB is dirty, and which may fail behind the first GiB.
struct Stripes(&'static str);

impl Context for Stripes {
    fn name(&self) -> &str {
        self.0
    }
    fn status(&self, offset: u64, _: u64, _: usize) -> std::io::Result<Vec<BlockStatus>> {
        if offset >= 1 << 30 && self.0 == "x:lost" {
            return Err(std::io::Error::other("the map is lost"));
        }
        Ok(vec![BlockStatus { len: (1 << 20) - offset % (1 << 20), flags: (offset >> 20) as u32 & 1 }])
    }
}

#[test]
fn what_a_bitmap_does_not_say_is_an_error_and_never_clean() {
    let (folder, size) = (tempfile::tempdir().unwrap(), (1 << 30) + (5 << 20) + 512);
    let server = serve_one(Arc::new(RamDisk::new(size)), ServerLimits::default(), |export| {
        export.contexts.extend(["x:whole", "x:lost"].map(|name| Arc::new(Stripes(name)) as Arc<dyn Context>));
    });
    let socket = folder.path().join("socket");
    server.serve_unix(UnixListener::bind(&socket).unwrap()).unwrap();
    let uri = ExportUri { server: NbdServer::Unix(socket), export: "disk".into() };
    let marked = |context: &str, asked: Option<&str>| {
        let disk = NbdDisk::open(&uri, asked).unwrap();
        let mut ranges = Vec::new();
        disk.marked(context, |range| ranges.push(range)).map(|()| ranges)
    };
    let mib = |at: u64| at << 20;
    let whole: Vec<_> =
        (0..515).map(|n| mib(2 * n + 1)..mib(2 * n + 2).min(size)).filter(|r| !r.is_empty()).collect();
    assert_eq!(marked("x:whole", Some("x:whole")).unwrap(), whole);
    assert_eq!(marked("x:lost", Some("x:lost")).unwrap_err().raw_os_error(), Some(5));
    for asked in [Some("x:other"), Some("x:"), None] {
        assert_eq!(marked("x:other", asked).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn an_export_of_our_own_keeps_the_contract() {
    let servers = Mutex::new(Vec::new());
    contract(|size| {
        let own = Own::new(Arc::new(RamDisk::new(size)));
        let disk = Arc::new(own.disk());
        servers.lock().unwrap().push(own);
        disk
    });
}

#[test]
fn an_export_of_qemu_keeps_the_contract() {
    if !need(&["qemu-nbd"], "exports of QEMU as disks") {
        return;
    }
    let servers = Servers::new();
    contract(|size| {
        let (image, socket) = (servers.path().with_extension("raw"), servers.path());
        File::create(&image).unwrap().set_len(size.next_multiple_of(512)).unwrap();
        let (image, listen) = (image.to_str().unwrap(), socket.to_str().unwrap());
        servers.start("qemu-nbd", &["-t", "-f", "raw", "--discard=unmap", "-k", listen, image], &socket)
    });
}

#[test]
fn an_export_with_simple_replies_and_without_block_status_keeps_the_contract() {
    if !need(&["nbdkit"], "servers without structured replies") {
        return;
    }
    let servers = Servers::new();
    contract(|size| servers.nbdkit(&["--no-sr"], size));
}

#[test]
fn an_export_of_an_old_server_that_makes_no_zeroes_keeps_the_contract() {
    if !need(&["nbdkit"], "old servers") {
        return;
    }
    let servers = Servers::new();
    contract(|size| servers.nbdkit(&["--mask-handshake=0", "--filter=nozero"], size));
}

#[test]
fn zeroes_that_a_server_offers_and_refuses_are_written() {
    if !need(&["nbdkit"], "a server that refuses zeroes") {
        return;
    }
    let servers = Servers::new();
    let refusing = ["--filter=error", "error=EINVAL", "error-zero-rate=100%"];
    let disk = servers.nbdkit(&refusing, 4 << 20);
    disk.write_at(0, &[7; 3 << 20]).unwrap();
    disk.zero(4096, 2 << 20, true, false).unwrap();
    let mut all = vec![1; 3 << 20];
    disk.read_at(0, &mut all).unwrap();
    let within = 4096..4096 + (2 << 20);
    assert!((0..).zip(&all).all(|(at, byte)| *byte == if within.contains(&at) { 0 } else { 7 }));
}

#[test]
fn a_server_with_block_sizes_of_its_own_gets_only_those() {
    if !need(&["nbdkit"], "servers with block sizes of their own") {
        return;
    }
    let servers = Servers::new();
    let limits = [
        "--filter=blocksize-policy",
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    contract(|size| {
        let disk = servers.nbdkit(&limits, size.next_multiple_of(4096));
        assert_eq!(disk.align(), 4096);
        disk
    });
}

#[test]
fn what_is_allocated_is_asked_in_steps_and_again_after_a_write() {
    let own = Own::new(Arc::new(RamDisk::new(5 << 30)));
    let disk = own.disk();
    assert_eq!(disk.allocated(0).unwrap(), None);
    disk.write_at(4 << 30, &[7; 65536]).unwrap();
    let run = disk.allocated(0).unwrap().unwrap();
    assert!(run.start <= 4 << 30 && run.start > 3 << 30 && run.end >= (4 << 30) + 65536, "{run:?}");
    assert_eq!(disk.allocated(run.end).unwrap(), None);
    disk.zero(4 << 30, 1 << 20, true, false).unwrap();
    assert_eq!(disk.allocated(0).unwrap(), None);
}

#[test]
fn a_read_only_export_refuses_writes_and_says_whose_refusal_it_is() {
    if !need(&["nbdkit"], "read-only exports") {
        return;
    }
    let servers = Servers::new();
    let disk = servers.nbdkit(&["-r"], 1 << 20);
    let refusals = [disk.write_at(0, &[1]), disk.zero(0, 1, true, false), disk.discard(0, 4096)];
    for refusal in refusals {
        let refusal = refusal.unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::PermissionDenied);
        assert!(refusal.to_string().contains("read-only"), "{refusal}");
    }
    disk.flush().unwrap();
}

/// A server that ends with requests of many threads in flight: all of them fail, and so does whatever comes later.
#[test]
fn a_server_that_is_gone_fails_all_requests_for_good() {
    let rig = Rig::new(
        1 << 20,
        Mode::Polled,
        Box::new(|what, at, _| {
            if what == "read" && at >= 4096 {
                std::thread::sleep(Duration::from_millis(100));
            }
            Ok(())
        }),
    );
    let own = Own::new(rig);
    let disk = own.disk();
    disk.read_at(0, &mut [0; 10]).unwrap();
    std::thread::scope(|scope| {
        let reads: Vec<_> = (1..9)
            .map(|n| {
                scope.spawn({
                    let disk = &disk;
                    move || {
                        (0..1000).find_map(|_| disk.read_at(n * 4096, &mut [0; 512]).err()).expect("the end")
                    }
                })
            })
            .collect();
        own.server.shutdown(Duration::ZERO);
        for read in reads {
            let error = read.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
            assert!(error.to_string().contains("NBD server"), "{error}");
        }
    });
    assert_eq!(disk.write_at(0, &[1]).unwrap_err().kind(), ErrorKind::ConnectionAborted);
}

/// The contexts that a server grants, with the ids that it gives them.
type Granted = &'static [(u32, &'static str)];

/// A server made of bytes: it greets, answers the options, and then sends `replies` to whatever is requested.
fn scripted(size: u64, sizes: Option<[u32; 3]>, replies: Vec<u8>) -> std::io::Result<NbdDisk> {
    granting(&[], size, sizes, replies)
}

fn granting(
    granted: Granted,
    size: u64,
    sizes: Option<[u32; 3]>,
    replies: Vec<u8>,
) -> std::io::Result<NbdDisk> {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        let take = |len: usize, stream: &mut std::os::unix::net::UnixStream| {
            let mut bytes = vec![0; len];
            stream.read_exact(&mut bytes).map(|()| bytes)
        };
        take(4, &mut stream).unwrap();
        loop {
            let head = take(16, &mut stream).unwrap();
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            take(number(12) as usize, &mut stream).unwrap();
            let reply = |kind: u32, data: &[u8]| {
                let mut bytes = 0x3e889045565a9u64.to_be_bytes().to_vec();
                bytes.extend([number(8), kind, data.len() as u32].iter().flat_map(|n| n.to_be_bytes()));
                bytes.extend(data);
                bytes
            };
            for (id, name) in granted.iter().filter(|_| number(8) == 10) {
                stream.write_all(&reply(4, &[&id.to_be_bytes(), name.as_bytes()].concat())).unwrap();
            }
            if number(8) != 7 {
                stream.write_all(&reply(common::ACK, &[])).unwrap();
                continue;
            }
            let mut info = vec![0, 0];
            info.extend(size.to_be_bytes());
            info.extend([0, 0b101]);
            stream.write_all(&reply(3, &info)).unwrap();
            if let Some(sizes) = sizes {
                let mut info = vec![0, 3];
                info.extend(sizes.iter().flat_map(|n| n.to_be_bytes()));
                stream.write_all(&reply(3, &info)).unwrap();
            }
            stream.write_all(&reply(common::ACK, &[])).unwrap();
            break;
        }
        // Whatever is requested, until the client has gone.
        if take(28, &mut stream).is_ok() {
            let _ = stream.write_all(&replies);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    let disk = NbdDisk::connect(&Address::from(&*folder.path().join("socket")), "");
    drop(server);
    disk
}

/// A chunk of a structured reply to the first request.
fn chunk(flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend([flags, kind].iter().flat_map(|n| n.to_be_bytes()));
    bytes.extend(1u64.to_be_bytes());
    bytes.extend((content.len() as u32).to_be_bytes());
    bytes.extend(content);
    bytes
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for (size, sizes, why) in [
        (u64::MAX, None, "impossible size"),
        (4097, Some([512, 4096, 1 << 20]), "impossible size"),
        (1 << 20, Some([0, 4096, 1 << 20]), "impossible block sizes"),
        (1 << 20, Some([100, 4096, 1 << 20]), "impossible block sizes"),
        (1 << 20, Some([4096, 4096, 512]), "impossible block sizes"),
    ] {
        let refusal = scripted(size, sizes, Vec::new()).err().expect("a refusal");
        assert!(refusal.to_string().contains(why), "{refusal}");
    }
}

#[test]
fn what_a_server_says_of_a_context_twice_is_not_believed() {
    const ALLOCATION: &str = "base:allocation";
    for granted in [&[(1, ALLOCATION), (1, "x:other")], &[(1, ALLOCATION), (2, ALLOCATION)]] as [Granted; 2] {
        let refusal = granting(granted, 1 << 20, None, Vec::new()).err().expect("a refusal");
        assert_eq!(refusal.kind(), ErrorKind::InvalidData, "{refusal}");
    }
    let status = |flags: u16, extents: &[u32]| {
        let content = [&[1], extents].concat();
        chunk(flags, 5, &content.iter().flat_map(|n| n.to_be_bytes()).collect::<Vec<_>>())
    };
    let marked = |replies: Vec<u8>| {
        let disk = granting(&[(1, ALLOCATION)], 1 << 20, None, replies).unwrap();
        let mut marked = Vec::new();
        disk.marked(ALLOCATION, |range| marked.push(range)).map(|()| marked)
    };
    let half = 1 << 19;
    assert_eq!(
        marked(status(1, &[4096, 3, half, 0, half - 4096, 1])).unwrap(),
        [0..4096, (1 << 19) + 4096..1 << 20]
    );
    let twice = [status(0, &[1 << 20, 0]), status(1, &[1 << 20, 3])].concat();
    for replies in [twice, status(1, &[0, 3, 1 << 20, 0])] {
        assert_eq!(marked(replies).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}

#[test]
fn replies_that_break_the_protocol_end_the_connection() {
    let data = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![7; len]].concat();
    let simple = |cookie: u64| [&0x6744_6698u32.to_be_bytes()[..], &[0; 4], &cookie.to_be_bytes()].concat();
    for replies in [
        b"no reply, however long one waits".to_vec(),
        // Less than was asked for, beside it, beyond it, and to nobody.
        chunk(1, 1, &data(0, 4095)),
        chunk(1, 0, &[]),
        chunk(1, 1, &data(4096, 4096)),
        chunk(1, 1, &data(0, 4097)),
        chunk(1, 2, &[&u64::MAX.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat()),
        simple(77),
    ] {
        let disk = scripted(1 << 20, None, replies).unwrap();
        let error = disk.read_at(0, &mut [0; 4096]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        assert!(error.to_string().contains("broke the protocol"), "{error}");
        assert_eq!(disk.read_at(0, &mut [0; 1]).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
