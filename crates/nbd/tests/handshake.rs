//! Negotiation, said rightly and wrongly.
#![allow(missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::*;
use device::RamDisk;
use nbd::{BlockStatus, Context, Export, ExportInfo, ExportRefusal, Server, ServerLimits};

struct Named(&'static str);

impl Context for Named {
    fn name(&self) -> &str {
        self.0
    }
    fn status(&self, _: u64, len: u64, _: usize) -> std::io::Result<Vec<BlockStatus>> {
        Ok(vec![BlockStatus { len, flags: 1 }])
    }
}

/// Two exports, one that is busy, and one that is not listed; counts what is open and what was opened.
fn several(open: Arc<AtomicUsize>, opened: Arc<AtomicUsize>) -> Table {
    struct Guard(Arc<AtomicUsize>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let listed =
        ["one", "two"].map(|name| ExportInfo { name: name.into(), description: format!("number {name}") });
    let find = move |name: &str| {
        let (size, read_only) = match name {
            "one" => (1 << 20, false),
            "two" => (12345, true),
            "one@view" => (1 << 20, true),
            "busy" => return Err(ExportRefusal::denied("busy is in use: wait until it is free")),
            _ => return Err(ExportRefusal::unknown(format!("there is no export {name}"))),
        };
        open.fetch_add(1, Ordering::SeqCst);
        opened.fetch_add(1, Ordering::SeqCst);
        let contexts: Vec<Arc<dyn Context>> = match name {
            "one" => vec![Arc::new(Named("qemu:dirty-bitmap:dsync")), Arc::new(Named("x-test:leaf"))],
            _ => vec![],
        };
        Ok(Export {
            description: format!("number {name}"),
            read_only,
            rotational: read_only,
            contexts,
            guard: Box::new(Guard(open.clone())),
            ..Export::new(name, Arc::new(RamDisk::new(size)))
        })
    };
    Table { listed: listed.into(), open: Box::new(find) }
}

fn server() -> Server {
    Server::new(Arc::new(several(Arc::default(), Arc::default())))
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn client_flags() {
    let server = server();
    for (flags, good) in [(0u32, true), (1, true), (2, true), (3, true), (4, false), (1 << 31, false)] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.serve_stream(theirs).unwrap();
        let mut client = Client::over(ours, flags);
        if good {
            assert_eq!(client.option(8, &[]), [(ACK, vec![])]);
        } else {
            assert!(client.is_closed(), "flags {flags:#x}");
        }
    }
}

#[test]
fn export_name() {
    let server = server();
    for flags in [1, 3] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.serve_stream(theirs).unwrap();
        let mut client = Client::over(ours, flags);
        client.send_option(1, b"two");
        let reply = client.read_vec(if flags == 3 { 10 } else { 134 });
        assert_eq!(reply[..8], 12345u64.to_be_bytes());
        // HAS_FLAGS, READ_ONLY, FLUSH, FUA, ROTATIONAL, MULTI_CONN, CACHE.
        assert_eq!(reply[8..10], 0b0101_0001_1111u16.to_be_bytes());
        assert!(reply[10..].iter().all(|byte| *byte == 0));
        assert_eq!(client.read_at(12000, 345), vec![0; 345]);
        client.bye();
    }
    for name in [&b"three"[..], b"", b"busy", b"\xff\xfe", &[b'x'; 5000], &[b'x'; 70_000]] {
        let mut client = Client::connect(&server);
        client.send_option(1, name);
        assert!(client.is_closed());
    }
}

#[test]
fn the_default_export_is_the_only_one() {
    let server = server();
    let mut client = Client::connect(&server);
    let (kind, message) = client.verdict(7, &info("", &[]));
    assert_eq!(kind, UNKNOWN);
    assert!(message.contains("name one"), "{message}");

    let server = serve(Arc::new(RamDisk::new(4096)));
    let mut client = Client::connect(&server);
    let replies = client.option(7, &info("", &[1]));
    assert_eq!(replies[1], (3, b"\0\x01disk".to_vec()));
    client.bye();
}

#[test]
fn abort() {
    let server = server();
    for data in [&b""[..], b"whatever"] {
        let mut client = Client::connect(&server);
        assert_eq!(client.option(2, data), [(ACK, vec![])]);
        assert!(client.is_closed());
    }
}

#[test]
fn list() {
    let server = server();
    let mut client = Client::connect(&server);
    let replies = client.option(3, &[]);
    let entry = |name: &str| [&[0, 0, 0, 3], name.as_bytes(), b"number ", name.as_bytes()].concat();
    assert_eq!(replies, [(2, entry("one")), (2, entry("two")), (ACK, vec![])]);
    assert_eq!(client.verdict(3, b"x").0, INVALID);
    assert_eq!(client.option(3, &[]).len(), 3);
}

#[test]
fn info_and_go() {
    let (open, opened) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let server = Server::new(Arc::new(several(open.clone(), opened.clone())));
    let mut client = Client::connect(&server);
    let replies = client.option(6, &info("one", &[1, 2, 3, 77]));
    // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO.
    let flags = 0b1101_0110_1101u16;
    let size_and_flags = [&[0, 0][..], &(1u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat();
    let sizes =
        [&[0, 3][..], &1u32.to_be_bytes(), &4096u32.to_be_bytes(), &(32u32 << 20).to_be_bytes()].concat();
    let expected = [
        (3, size_and_flags),
        (3, b"\0\x01one".to_vec()),
        (3, b"\0\x02number one".to_vec()),
        (3, sizes),
        (ACK, vec![]),
    ];
    assert_eq!(replies, expected);
    assert_eq!(client.option(6, &info("one", &[])).len(), 2);
    client.structure();
    // DF is there with structured replies alone.
    assert_eq!(client.go("one"), (1 << 20, flags | 1 << 7));
    assert_eq!((open.load(Ordering::SeqCst), opened.load(Ordering::SeqCst)), (1, 1));
    client.bye();
    until("the export is dropped", || open.load(Ordering::SeqCst) == 0);

    let mut client = Client::connect(&server);
    for name in ["three", "busy", &"x".repeat(5000)] {
        for option in [6, 7] {
            let (kind, message) = client.verdict(option, &info(name, &[]));
            assert_eq!(kind, if name == "busy" { POLICY } else { UNKNOWN });
            assert!(!message.is_empty());
        }
    }
    let mut long = info("one", &[]);
    long.push(0);
    let mut short = info("one", &[1, 2]);
    short.pop();
    let mut lying = info("one", &[]);
    lying[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    for data in [&b""[..], b"\0\0", &long, &short, &lying, b"\0\0\0\x02\xff\xfe\0\0"] {
        assert_eq!(client.verdict(7, data).0, INVALID, "{data:?}");
    }
    // What is not listed can be had by name, and refusals end nothing.
    assert_eq!(client.go("one@view").0, 1 << 20);
    client.bye();
}

#[test]
fn options_unknown_and_refused() {
    let server = server();
    let mut client = Client::connect(&server);
    for option in [0, 4, 5, 11, 12, 0xdead_beef, u32::MAX] {
        assert_eq!(client.verdict(option, b"").0, UNSUP);
        assert_eq!(client.verdict(option, b"some data").0, UNSUP);
    }
    assert!(client.verdict(5, b"").1.contains("TLS"));
    assert_eq!(client.verdict(8, b"x").0, INVALID);
    client.structure();
    client.structure();
    assert_eq!(client.verdict(3, &vec![0; (64 << 10) + 1]).0, TOO_BIG);
    assert_eq!(client.verdict(77, &vec![0; 1 << 20]).0, TOO_BIG);
    client.go("one");
    client.bye();
}

#[test]
fn garbage_ends_the_connection() {
    let server = server();
    let mut witness = Client::enter(&server, "one", true, &[]);
    let mut huge = option_bytes(3, &[]);
    huge[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    for bytes in [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], &[0; 64], &[0xff; 64], &huge] {
        let mut client = Client::connect(&server);
        client.send(bytes);
        assert!(client.is_closed());
    }
    // A client that leaves in the middle of an option.
    let mut client = Client::connect(&server);
    client.send(&option_bytes(7, &info("one", &[]))[..20]);
    drop(client);
    assert_eq!(witness.read_at(0, 512).len(), 512);
    witness.bye();
    until("all connections are gone", || server.connections() == 0);
}

#[test]
fn a_disk_that_can_not_be_used_is_refused() {
    let hook = |what: &str, _, _| match what {
        "queue" => Err(std::io::Error::other("no memory for a ring")),
        _ => Ok(()),
    };
    let server = serve(Rig::new(4096, Mode::Inline, Box::new(hook)));
    let mut client = Client::connect(&server);
    assert_eq!(client.option(6, &info("disk", &[])).len(), 2);
    let (kind, message) = client.verdict(7, &info("disk", &[]));
    assert_eq!((kind, &*message), (POLICY, "cannot open export disk: no memory for a ring"));
    client.send_option(1, b"disk");
    assert!(client.is_closed());

    // As is one that is set up wrongly.
    for (min, preferred, max) in [
        (0, 4096, 1 << 20),
        (3, 4096, 1 << 20),
        (1 << 17, 1 << 17, 1 << 20),
        (512, 256, 1024),
        (1, 4096, 512),
    ] {
        let server = serve_one(Arc::new(RamDisk::new(4096)), ServerLimits::default(), move |export| {
            export.block = nbd::BlockSizes { min, preferred, max };
        });
        assert_eq!(Client::connect(&server).verdict(7, &info("disk", &[])).0, POLICY);
    }
}

#[test]
fn contexts() {
    let server = server();
    let mut client = Client::connect(&server);
    for option in [9, 10] {
        assert_eq!(client.verdict(option, &meta("one", &[])).0, INVALID, "before structured replies");
    }
    client.structure();
    let mut ask = |option, name: &str, queries: &[&str]| -> Vec<String> {
        let mut replies = client.option(option, &meta(name, queries));
        assert_eq!(replies.pop(), Some((ACK, vec![])));
        let name = |(at, (kind, data)): (usize, (u32, Vec<u8>))| {
            let id = if option == 10 { at as u32 } else { 0 };
            assert_eq!((kind, &data[..4]), (4, &id.to_be_bytes()[..]));
            String::from_utf8(data[4..].to_vec()).unwrap()
        };
        replies.into_iter().enumerate().map(name).collect()
    };
    let (base, dirty, leaf) = ("base:allocation", "qemu:dirty-bitmap:dsync", "x-test:leaf");
    assert_eq!(ask(9, "one", &[]), [base, dirty, leaf]);
    assert_eq!(ask(9, "two", &[]), [base]);
    assert_eq!(ask(9, "one", &["base:"]), [base]);
    assert_eq!(ask(9, "one", &["qemu:"]), [dirty]);
    assert_eq!(ask(9, "one", &["qemu:dirty-bitmap:", "qemu:", "x-test:leaf"]), [dirty, leaf]);
    assert_eq!(ask(9, "one", &["qemu:dirty-bitmap", "nonsense", "", "x-test:lea", "x-other:"]), [""; 0]);
    assert_eq!(ask(10, "one", &[]), [""; 0]);
    assert_eq!(ask(10, "one", &["base:", "qemu:", "qemu:dirty-bitmap:", "base:other"]), [""; 0]);
    assert_eq!(ask(10, "one", &[leaf, base, base]), [base, leaf]);
    assert_eq!(ask(10, "two", &[base]), [base]);

    let mut lying = meta("one", &["base:"]);
    lying[7..11].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut long = meta("one", &["base:"]);
    long.push(1);
    for data in [&b""[..], b"\0\0\0\x09one", &lying, &long, b"\0\0\0\x03one\0\0\0\x01\0\0\0\x01\xff"] {
        assert_eq!(client.verdict(9, data).0, INVALID);
    }
    assert_eq!(client.verdict(9, &meta("three", &[])).0, UNKNOWN);

    // Set for one export, entered another: no contexts. Set, then failed to set: none either.
    for spoil in [meta("two", &[base]), meta("three", &[base]), b"nonsense".to_vec()] {
        let mut client = Client::connect(&server);
        client.structure();
        client.option(10, &meta("one", &[base]));
        client.option(10, &spoil);
        client.go("one");
        assert_eq!(client.ask(STATUS, 0, 0, 4096, &[]).error, 22);
        client.bye();
    }
    let mut client = Client::connect(&server);
    client.structure();
    client.option(10, &meta("one", &[base, dirty]));
    // Looking elsewhere in between changes nothing.
    client.option(6, &info("two", &[]));
    client.go("one");
    let status = client.ask(STATUS, 0, 0, 4096, &[]).status;
    assert_eq!((status[&0].clone(), status[&1].clone()), (vec![(4096, 3)], vec![(4096, 1)]));
    client.bye();
}

#[test]
fn silent_and_trickling_clients_are_dropped() {
    let limits = ServerLimits { handshake: Duration::from_millis(300), ..ServerLimits::default() };
    let server = serve_one(Arc::new(RamDisk::new(4096)), limits, |_| {});
    let start = Instant::now();
    let mut silent = Client::connect(&server);
    let mut half = Client::connect(&server);
    half.send(&option_bytes(7, &info("disk", &[]))[..20]);
    let trickling = Client::connect(&server);
    let mut writer = trickling.stream.try_clone().unwrap();
    let trickle = std::thread::spawn(move || {
        // Each option is refused, and no wait is long: only the clock ends it.
        while writer.write_all(&option_bytes(77, &[])).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    // One that asks without end and never reads.
    let mut deaf = Client::connect(&server);
    let deafening =
        std::thread::spawn(move || while deaf.stream.write_all(&option_bytes(77, &[0; 4096])).is_ok() {});
    assert!(silent.is_closed());
    assert!(half.is_closed());
    trickle.join().unwrap();
    deafening.join().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(300));
    until("all connections are gone", || server.connections() == 0);

    // The clock stops once transmission has begun.
    let mut client = Client::enter(&server, "disk", false, &[]);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(client.read_at(0, 4).len(), 4);
    client.bye();
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let limits = ServerLimits { connections: 2, ..ServerLimits::default() };
    let server = serve_one(Arc::new(RamDisk::new(4096)), limits, |_| {});
    let one = Client::enter(&server, "disk", false, &[]);
    let _two = Client::enter(&server, "disk", false, &[]);
    let mut three = Client::connect(&server);
    for option in [8, 3, 7] {
        let (kind, message) = three.verdict(option, &info("disk", &[]));
        assert_eq!(kind, SHUTDOWN);
        assert!(message.contains("too many connections (2)"), "{message}");
    }
    let mut four = Client::connect(&server);
    four.send_option(1, b"disk");
    assert!(four.is_closed());
    // Nobody can hold the server up by being turned away many times.
    let mut many: Vec<UnixStream> = Vec::new();
    for _ in 0..40 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        if server.serve_stream(theirs).is_err() {
            assert_eq!((&ours).read(&mut [0]).unwrap(), 0);
            break;
        }
        many.push(ours);
    }
    assert!(many.len() < 20, "{}", many.len());
    drop(many);
    one.bye();
    until("there is a place again", || server.connections() == 1);
    Client::enter(&server, "disk", false, &[]).bye();
    assert_eq!(three.option(2, &[]), [(ACK, vec![])]);
}

#[test]
fn connections_that_choose_nothing_keep_no_client_out() {
    let limits = ServerLimits { connections: 3, ..ServerLimits::default() };
    let server = serve_one(Arc::new(RamDisk::new(4096)), limits, |_| {});
    let mut chosen = Client::enter(&server, "disk", false, &[]);
    let mut held: Vec<Client> = Vec::new();
    for _ in 0..3 {
        // These make the places full again, and one of them has begun to talk.
        held.extend((0..3).map(|_| Client::connect(&server)));
        held.last_mut().unwrap().option(3, &[]);
        let mut next = Client::enter(&server, "disk", false, &[]);
        assert_eq!(next.read_at(0, 4).len(), 4);
        next.bye();
    }
    assert!(held[0].is_closed(), "the oldest one yields");
    assert_eq!(chosen.read_at(0, 4).len(), 4);
    assert!(server.connections() <= 3);
}

#[test]
fn listens_on_unix_and_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let server = serve(Arc::new(RamDisk::new(4096)));
    server.serve_unix(UnixListener::bind(&path).unwrap()).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    assert!(nbd::is_loopback(&tcp).unwrap());
    server.serve_tcp(tcp).unwrap();
    assert!(!nbd::is_loopback(&TcpListener::bind("0.0.0.0:0").unwrap()).unwrap());

    let mut unix = Client::over(UnixStream::connect(&path).unwrap(), 3);
    unix.go("disk");
    unix.write_at(0, b"over");
    let mut tcp = TcpStream::connect(address).unwrap();
    tcp.write_all(&[&3u32.to_be_bytes()[..], &option_bytes(7, &info("disk", &[]))].concat()).unwrap();
    tcp.write_all(&request_bytes(READ, 0, 7, 0, 4)).unwrap();
    let mut reply = vec![0; 18 + 20 + 12 + 20 + 16 + 4];
    tcp.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[reply.len() - 4..], b"over");

    assert_eq!(server.connections(), 2);
    server.shutdown(Duration::from_secs(10));
    assert!(unix.is_closed());
    assert_eq!(tcp.read(&mut [0]).unwrap(), 0);
    assert!(UnixStream::connect(&path).is_err(), "nobody listens");
    assert!(TcpStream::connect(address).is_err());
    let (_, theirs) = UnixStream::pair().unwrap();
    assert!(server.serve_stream(theirs).is_err());
    let late = UnixListener::bind(folder.path().join("late")).unwrap();
    assert!(server.serve_unix(late).is_err());
}

#[test]
fn dropping_the_server_ends_it() {
    let server = serve(Arc::new(RamDisk::new(4096)));
    let mut idle = Client::enter(&server, "disk", false, &[]);
    let mut choosing = Client::connect(&server);
    let (told, tell) = mpsc::channel();
    let ending = std::thread::spawn(move || {
        drop(server);
        told.send(()).unwrap();
    });
    tell.recv_timeout(Duration::from_secs(30)).expect("the server ends");
    assert!(idle.is_closed() && choosing.is_closed());
    ending.join().unwrap();
}

/// Whoever ends a server closes the disk next, and must be the last to hold it.
#[test]
fn an_ended_server_holds_nothing_of_its_exports() {
    for round in 0..100 {
        let disk = Arc::new(RamDisk::new(4096));
        let server = serve(disk.clone());
        let clients: Vec<Client> = (0..4).map(|_| Client::enter(&server, "disk", false, &[])).collect();
        server.shutdown(Duration::from_secs(30));
        drop(server);
        assert_eq!(Arc::strong_count(&disk), 1, "round {round}");
        drop(clients);
    }
}
