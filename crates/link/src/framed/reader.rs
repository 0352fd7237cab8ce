//! The thread that reads a framed stream. It only ever waits for the stream, never for the sender or the receiver. So
//! whatever the peer writes is taken from the stream, and two peers that write at once cannot block each other.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;

use device::Buf;

use super::format::{BadHello, FrameHead, HELLO, Hello, MAGIC, VERSION};
use super::keepalive::{self, Activity};
use super::{FramedStream, Reading};
use crate::flow::StreamEnd;
use crate::flow::transport::Shared;
use crate::message::{self, FRAMING};
use crate::{Error, Message};

/// Reads until the stream ends, and passes the reason to both halves.
pub(super) fn run(stream: &Arc<FramedStream>, reader: Reading) {
    let shared = &stream.shared;
    let reader = ActivityReader { reader, activity: stream.options.activity.clone() };
    let mut reader = BufReader::with_capacity(16 << 10, reader);
    let mut greeted = false;
    let error = match read_all(stream, &mut reader, &mut greeted) {
        Failure::Ended(why) => match &stream.owner {
            Some(owner) if !stream.is_abandoned() => owner.why_it_ended(greeted, why),
            _ => shared.cut(why),
        },
        Failure::Wrong(error) => error,
    };
    // Closed before the halves get the reason, so that the peer does not go on writing.
    drop(reader);
    stream.keepalive.end();
    shared.fail(stream.distrust.get().cloned().unwrap_or(error));
}

/// Counts activity of the peer.
struct ActivityReader {
    reader: Reading,
    activity: Activity,
}

impl Read for ActivityReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.reader.read(buf)?;
        self.activity.note();
        Ok(len)
    }
}

impl ActivityReader {
    fn whole(&mut self, len: usize) -> io::Result<Option<Buf>> {
        let whole = self.reader.whole(len)?;
        self.activity.note();
        Ok(whole)
    }
}

enum Failure {
    /// The stream ended; what is known of the cause.
    Ended(String),
    /// The peer sent something invalid.
    Wrong(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Failure::Ended(String::new()),
            _ => Failure::Ended(error.to_string()),
        }
    }
}

fn read_all(
    stream: &Arc<FramedStream>,
    reader: &mut BufReader<ActivityReader>,
    greeted: &mut bool,
) -> Failure {
    let hello = match read_hello(&stream.shared, reader) {
        Ok(hello) => hello,
        Err(failure) => return failure,
    };
    if let Err(error) = keepalive::start(stream, hello.timeout.min(stream.options.timeout)) {
        return Failure::Ended(format!("cannot start a thread: {error}"));
    }
    *greeted = true;
    if let Some(owner) = &stream.owner {
        owner.greeted();
    }
    stream.shared.window.release(hello.window.into());
    loop {
        match read_frame(stream, reader) {
            Ok(()) if stream.is_abandoned() => return Failure::Ended(String::new()),
            Ok(()) => {}
            Err(failure) => return failure,
        }
    }
}

fn read_hello(shared: &Shared, reader: &mut BufReader<ActivityReader>) -> Result<Hello, Failure> {
    let mut hello = [0; HELLO];
    let mut have = 0;
    while have < HELLO {
        let bytes = match reader.fill_buf() {
            Ok([]) if have == 0 => return Err(Failure::Ended("it ended before its hello".into())),
            Ok([]) => return Err(Failure::Ended(String::new())),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        let take = bytes.len().min(HELLO - have);
        hello[have..have + take].copy_from_slice(&bytes[..take]);
        let magic = (have + take).min(MAGIC.len());
        if hello[..magic] != MAGIC[..magic] {
            let mut said = hello[..have].to_vec();
            said.extend_from_slice(&bytes[..bytes.len().min(200)]);
            let text = String::from_utf8_lossy(&said);
            let said = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().to_string();
            return Err(Failure::Wrong(Error::NotDsync { peer: shared.peer.clone(), said }));
        }
        reader.consume(take);
        have += take;
    }
    shared.traffic.add_received(HELLO as u64);
    Hello::parse(&hello).map_err(|bad_hello| match bad_hello {
        BadHello::Version(theirs) => {
            Failure::Wrong(Error::Version { peer: shared.peer.clone(), ours: VERSION, theirs })
        }
        BadHello::Incomplete => bad(shared, "an incomplete hello"),
    })
}

fn read_frame(stream: &FramedStream, reader: &mut BufReader<ActivityReader>) -> Result<(), Failure> {
    let shared = &stream.shared;
    let mut header = [0; FRAMING];
    reader.read_exact(&mut header)?;
    shared.traffic.add_received(FRAMING as u64);
    match FrameHead::parse(header).map_err(|what| bad(shared, &what))? {
        FrameHead::Message { kind, head, body } => {
            if !stream.has_room_for(message::cost(head, body)) {
                return Err(bad(shared, "more than it had credit for"));
            }
            if shared.inbox.ended().is_some() {
                return Err(bad(shared, "a message after its goodbye"));
            }
            let mut message = Message { kind, head: vec![0; head], body: Buf::default() };
            reader.read_exact(&mut message.head)?;
            shared.traffic.add_received(head as u64);
            message.body = read_body(reader, body)?;
            shared.traffic.add_received(body as u64);
            shared.inbox.push(message);
        }
        FrameHead::Credit(bytes) => shared.window.release(bytes.into()),
        FrameHead::Goodbye => shared.inbox.end(StreamEnd::Goodbye),
        FrameHead::Ping => {}
        FrameHead::Distrust => {
            let trust = stream.options.trust.as_ref();
            let refused = trust.map(|trust| Failure::Wrong(trust.refused()));
            return Err(refused.unwrap_or_else(|| bad(shared, "an unknown frame")));
        }
    }
    Ok(())
}

/// A message's body, in the memory in which it has come where that is possible.
fn read_body(reader: &mut BufReader<ActivityReader>, len: usize) -> io::Result<Buf> {
    if len > 0 && reader.buffer().is_empty() {
        if let Some(body) = reader.get_mut().whole(len)? {
            return Ok(body);
        }
    }
    let mut body = Buf::scratch(len);
    reader.read_exact(&mut body)?;
    Ok(body)
}

fn bad(shared: &Shared, what: &str) -> Failure {
    Failure::Wrong(Error::Bad { peer: shared.peer.clone(), what: what.to_string() })
}
