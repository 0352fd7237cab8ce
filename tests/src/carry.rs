//! Carries bytes from one process to another for some seconds, over plain TCP or over a link, and says how many.
//!
//! - `keys FOLDER HOST`: keys for both sides, that trust each other.
//! - `sink tcp ADDRESS`, `sink tls ADDRESS FOLDER`, `sink pipe`: takes what comes. Prints `listening ADDRESS`.
//! - `sink file ADDRESS FOLDER FILE`: takes one file over TLS, writes it past the page cache, makes it durable, and ends.
//! - `source file ADDRESS CONNECTIONS FOLDER FILE`: reads a file bypassing the page cache, and sends it over TLS.
//! - `source tcp ADDRESS CONNECTIONS SECONDS CONGESTION`, `source tls ADDRESS CONNECTIONS SECONDS FOLDER`,
//!   `source ssh HOST SECONDS COMMAND RSH...`: sends, waits until everything has arrived, and prints `BYTES SECONDS`.

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use device::{Buf, Piece, Queue, Request, RequestKind};
use link::{ConnectOptions, Keys, Link, Listener, ListenerLimits, Message, Receiver};

type Done<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Runs one of the commands.
pub fn run(words: &[&str]) -> Done<()> {
    match words {
        ["keys", folder, host] => keys(Path::new(folder), host),
        ["sink", "tcp", address] => sink_tcp(address.parse()?),
        ["sink", "tls", address, folder] => sink_tls(address.parse()?, Path::new(folder)),
        ["sink", "file", address, folder, file] => {
            sink_file(address.parse()?, Path::new(folder), Path::new(file))
        }
        ["source", "file", address, connections, folder, file] => {
            send_file(connect(address.parse()?, connections, folder)?, Path::new(file))
        }
        ["sink", "pipe"] => take(Link::stdio()?),
        ["source", "tcp", address, connections, seconds, congestion] => {
            source_tcp(address.parse()?, connections.parse()?, time(seconds)?, congestion)
        }
        ["source", "tls", address, connections, seconds, folder] => {
            send(connect(address.parse()?, connections, folder)?, time(seconds)?)
        }
        ["source", "ssh", host, seconds, command, rsh @ ..] => {
            let words = |words: &str| words.split(' ').map(str::to_string).collect::<Vec<_>>();
            send(
                Link::ssh(
                    &words(&rsh.join(" ")),
                    host,
                    &words(command),
                    ConnectOptions::default().timeout,
                    None,
                )?,
                time(seconds)?,
            )
        }
        _ => Err(format!("what is {words:?}?").into()),
    }
}

fn time(seconds: &str) -> Done<Duration> {
    Ok(Duration::from_secs_f64(seconds.parse()?))
}

fn keys(folder: &Path, host: &str) -> Done<()> {
    let (near, far) = (Keys::new(folder.join("near")), Keys::new(folder.join("far")));
    near.trust(host, far.own()?, None, link::Roles::ALL)?;
    Ok(far.trust("near", near.own()?, None, link::Roles::ALL)?)
}

fn sink_tcp(address: SocketAddr) -> Done<()> {
    let listener = TcpListener::bind(address)?;
    println!("listening {}", listener.local_addr()?);
    for socket in listener.incoming() {
        let mut socket = socket?;
        std::thread::spawn(move || {
            let mut buf = vec![0; 256 << 10];
            while matches!(socket.read(&mut buf), Ok(1..)) {}
        });
    }
    Ok(())
}

fn sink_tls(address: SocketAddr, folder: &Path) -> Done<()> {
    let far = Keys::new(folder.join("far"));
    let listener = Listener::bind(address, &far, ListenerLimits::default(), |line| eprintln!("{line}"))?;
    println!("listening {}", listener.address());
    listener.run(|link, _| {
        if let Err(error) = take(link) {
            eprintln!("{error}");
        }
    });
    Ok(())
}

fn connect(address: SocketAddr, connections: &str, folder: &str) -> Done<Link> {
    let options = ConnectOptions { connections: Some(connections.parse()?), ..ConnectOptions::default() };
    let near = Keys::new(Path::new(folder).join("near"));
    Ok(Link::tls(&near, &address.ip().to_string(), address.port(), &options)?)
}

fn sink_file(address: SocketAddr, folder: &Path, file: &Path) -> Done<()> {
    let far = Keys::new(folder.join("far"));
    let listener = Listener::bind(address, &far, ListenerLimits::default(), |line| eprintln!("{line}"))?;
    println!("listening {}", listener.address());
    let file = file.to_path_buf();
    listener.run(move |link, _| {
        let taken = || -> Done<()> {
            let (tx, rx) = link.split();
            write_file(&rx, &file)?;
            Ok(tx.finish()?)
        };
        if let Err(error) = taken() {
            eprintln!("{error}");
        }
    });
    Ok(())
}

/// Writes past the page cache, a few messages at once.
fn write_file(rx: &Receiver, file: &Path) -> Done<()> {
    const AT_ONCE: usize = 8;
    const AHEAD: u64 = 64 << 20;
    File::create(file)?;
    let disk = device::open(file, &device::DiskOptions { write: true, direct: true, exclusive: false })?;
    let (mut queue, mut at) = (disk.clone().queue(AT_ONCE as u32)?, 0);
    let wait = |queue: &mut dyn Queue, most: usize| -> Done<()> {
        while queue.in_flight() > most {
            queue.complete(true).ok_or("nothing is on its way")?.result?;
        }
        Ok(())
    };
    while let Some(Message { body: buf, .. }) = rx.recv()? {
        let (offset, len) = (at, buf.len() as u64);
        at += len;
        if at > disk.len() {
            disk.resize(at + AHEAD)?;
        }
        wait(&mut *queue, AT_ONCE - 1)?;
        let pieces = [Piece { offset, len }].into_iter().collect();
        queue.submit(Request { kind: RequestKind::Write { fua: false }, pieces, buf, token: 0 });
        queue.start();
    }
    wait(&mut *queue, 0)?;
    disk.resize(at)?;
    Ok(disk.flush()?)
}

/// One read of a MiB after the other: nothing runs ahead.
fn send_file(link: Link, file: &Path) -> Done<()> {
    let disk = device::open(file, &device::DiskOptions { write: false, direct: true, exclusive: false })?;
    let (tx, rx) = link.split();
    let (size, mut at) = (disk.len(), 0);
    while at < size {
        let mut body = Buf::scratch((size - at).min(1 << 20) as usize);
        disk.read_at(at, &mut body)?;
        at += body.len() as u64;
        tx.send(Message { body, ..Message::default() })?;
    }
    tx.finish()?;
    while rx.recv()?.is_some() {}
    Ok(())
}

fn take(link: Link) -> Done<()> {
    let (tx, rx) = link.split();
    while rx.recv()?.is_some() {}
    Ok(tx.finish()?)
}

fn source_tcp(address: SocketAddr, connections: usize, time: Duration, congestion: &str) -> Done<()> {
    let sockets: Vec<TcpStream> =
        (0..connections).map(|_| TcpStream::connect(address)).collect::<Result<_, _>>()?;
    for socket in &sockets {
        socket.set_nodelay(true)?;
        rustix::net::sockopt::set_tcp_congestion(socket, congestion)?;
    }
    let began = Instant::now();
    let bytes: u64 = std::thread::scope(|scope| {
        let senders: Vec<_> = sockets
            .iter()
            .map(|mut socket| {
                scope.spawn(move || -> std::io::Result<u64> {
                    let (buf, mut sent) = (vec![0x5a; 256 << 10], 0);
                    while began.elapsed() < time {
                        socket.write_all(&buf)?;
                        sent += buf.len() as u64;
                    }
                    socket.shutdown(std::net::Shutdown::Write)?;
                    // The other side closes when it has read everything.
                    while socket.read(&mut [0])? > 0 {}
                    Ok(sent)
                })
            })
            .collect();
        senders.into_iter().map(|sender| sender.join().expect("no panic")).sum::<std::io::Result<u64>>()
    })?;
    println!("{bytes} {:.3}", began.elapsed().as_secs_f64());
    Ok(())
}

fn send(link: Link, time: Duration) -> Done<()> {
    let (tx, rx) = link.split();
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < time {
        let body = Buf::scratch(256 << 10);
        bytes += body.len() as u64;
        tx.send(Message { body, ..Message::default() })?;
    }
    tx.finish()?;
    // The goodbye comes back when everything was taken.
    while rx.recv()?.is_some() {}
    println!("{bytes} {:.3}", began.elapsed().as_secs_f64());
    Ok(())
}
