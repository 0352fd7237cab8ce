//! Negotiation, fixed newstyle, until both sides enter transmission.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use device::Queue;

use crate::context::{Allocation, Context};
use crate::export::{Export, ExportRefusal, Exports};
use crate::protocol::*;
use crate::socket::{Disconnected, Stream};

/// What a client and the server agreed on.
pub(crate) struct Negotiated {
    pub(crate) export: Export,
    /// Size of the disk in bytes as the client was told.
    pub(crate) size: u64,
    pub(crate) structured: bool,
    /// The contexts that the client selected; each one's id is its place.
    pub(crate) contexts: Vec<Arc<dyn Context>>,
    pub(crate) queue: Box<dyn Queue>,
}

/// Option data beyond this is read and refused.
const DATA_MAX: u32 = 64 << 10;
/// With more option data the connection is closed.
const SKIP_MAX: u32 = 1 << 20;

/// Negotiates. `None` if the client ended it in good order.
pub(crate) fn negotiate(
    stream: &Stream,
    exports: &dyn Exports,
    deadline: Instant,
) -> Result<Option<Negotiated>, Disconnected> {
    let mut talk = OptionStream::greet(stream, deadline)?;
    let mut client = Client { exports, structured: false, opened: None, selected: None };
    loop {
        let (option, data) = talk.option()?;
        let Some(data) = data else {
            if option == OPT_EXPORT_NAME {
                return Err(Disconnected);
            }
            talk.refuse(option, REP_ERR_TOO_BIG, &format!("an option has at most {DATA_MAX} bytes"))?;
            continue;
        };
        match option {
            OPT_EXPORT_NAME => {
                // There is no way to say why: the protocol wants the connection closed.
                let name = std::str::from_utf8(&data).map_err(|_| Disconnected)?;
                let structured = client.structured;
                let opened = client.open(name).map_err(|_| Disconnected)?;
                let queue = opened.queue().map_err(|_| Disconnected)?;
                let mut reply = Vec::with_capacity(134);
                reply.extend(opened.size.to_be_bytes());
                reply.extend(transmission_flags(&opened.export, structured).to_be_bytes());
                reply.resize(if talk.no_zeroes { 10 } else { 134 }, 0);
                talk.enter(&reply)?;
                return Ok(client.agree(queue));
            }
            OPT_ABORT => {
                // The client may be gone already, and needs no answer.
                let _ = talk.reply(option, REP_ACK, &[]);
                return Ok(None);
            }
            OPT_LIST => client.list(&mut talk, &data)?,
            OPT_INFO | OPT_GO => {
                if let Some(queue) = client.info(&mut talk, option, &data)? {
                    return Ok(client.agree(queue));
                }
            }
            OPT_STRUCTURED_REPLY => {
                if data.is_empty() {
                    client.structured = true;
                    talk.reply(option, REP_ACK, &[])?;
                } else {
                    talk.refuse(option, REP_ERR_INVALID, "this option takes no data")?;
                }
            }
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => client.meta(&mut talk, option, &data)?,
            OPT_STARTTLS => {
                talk.refuse(
                    option,
                    REP_ERR_UNSUP,
                    "this server has no TLS: use a Unix socket, or ssh in between",
                )?;
            }
            _ => talk.refuse(option, REP_ERR_UNSUP, "unknown option")?,
        }
    }
}

/// Answers every option of a client with the error `message`, until it disconnects or the deadline is over.
pub(crate) fn turn_away(stream: &Stream, message: &str, deadline: Instant) -> Result<(), Disconnected> {
    let mut talk = OptionStream::greet(stream, deadline)?;
    loop {
        match talk.option()?.0 {
            OPT_EXPORT_NAME => return Err(Disconnected),
            OPT_ABORT => return talk.reply(OPT_ABORT, REP_ACK, &[]),
            option => talk.refuse(option, REP_ERR_SHUTDOWN, message)?,
        }
    }
}

/// The wire's side of the negotiation.
struct OptionStream<'a> {
    stream: &'a Stream,
    deadline: Instant,
    no_zeroes: bool,
}

impl<'a> OptionStream<'a> {
    fn greet(stream: &'a Stream, deadline: Instant) -> Result<OptionStream<'a>, Disconnected> {
        let mut greeting = [0; 18];
        greeting[..8].copy_from_slice(&MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        let offered = FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES;
        greeting[16..].copy_from_slice(&offered.to_be_bytes());
        stream.send_by(&greeting, deadline)?;

        let mut flags = [0; 4];
        stream.receive_by(&mut flags, deadline)?;
        let flags = u32::from_be_bytes(flags);
        if flags & !u32::from(offered) != 0 {
            return Err(Disconnected);
        }
        Ok(OptionStream { stream, deadline, no_zeroes: flags & u32::from(FLAG_NO_ZEROES) != 0 })
    }

    /// The next option and its data; no data if it was too much.
    fn option(&mut self) -> Result<(u32, Option<Vec<u8>>), Disconnected> {
        let mut head = [0; 16];
        self.stream.receive_by(&mut head, self.deadline)?;
        let [m0, m1, m2, m3, m4, m5, m6, m7, o0, o1, o2, o3, l0, l1, l2, l3] = head;
        if u64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]) != OPTION_MAGIC {
            return Err(Disconnected);
        }
        let option = u32::from_be_bytes([o0, o1, o2, o3]);
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        if len > SKIP_MAX {
            return Err(Disconnected);
        }
        let mut data = vec![0; len.min(DATA_MAX) as usize];
        self.stream.receive_by(&mut data, self.deadline)?;
        if len <= DATA_MAX {
            return Ok((option, Some(data)));
        }
        let mut left = len - DATA_MAX;
        while left > 0 {
            let step = left.min(DATA_MAX);
            self.stream.receive_by(&mut data[..step as usize], self.deadline)?;
            left -= step;
        }
        Ok((option, None))
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Disconnected> {
        self.stream.send_by(bytes, self.deadline)
    }

    /// Sends the last answer.
    fn enter(&mut self, bytes: &[u8]) -> Result<(), Disconnected> {
        self.stream.entered.store(true, Ordering::SeqCst);
        self.send(bytes)
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> Result<(), Disconnected> {
        let mut reply = Vec::new();
        push_reply(&mut reply, option, kind, &[data]);
        self.send(&reply)
    }

    fn refuse(&mut self, option: u32, kind: u32, message: &str) -> Result<(), Disconnected> {
        self.reply(option, kind, clip(message).as_bytes())
    }
}

fn push_reply(to: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    to.extend(REPLY_MAGIC.to_be_bytes());
    to.extend(option.to_be_bytes());
    to.extend(kind.to_be_bytes());
    // Every part is a string or a few numbers: far below 32 bits.
    let len: usize = data.iter().map(|part| part.len()).sum();
    to.extend((len as u32).to_be_bytes());
    data.iter().for_each(|part| to.extend(*part));
}

/// The server's side: what this client asked for so far.
struct Client<'a> {
    exports: &'a dyn Exports,
    structured: bool,
    /// The export opened last, by the name that the client used. Kept, so that a query and the following GO see the same one.
    opened: Option<OpenExport>,
    /// The contexts set, and the name of the export they were set for.
    selected: Option<(String, Vec<Arc<dyn Context>>)>,
}

struct OpenExport {
    asked: String,
    export: Export,
    size: u64,
}

impl OpenExport {
    /// The last step that can fail, taken while an error can still be sent.
    fn queue(&self) -> Result<Box<dyn Queue>, ExportRefusal> {
        let Export { name, disk, queue_depth, .. } = &self.export;
        disk.clone()
            .queue((*queue_depth).max(1))
            .map_err(|error| ExportRefusal::denied(format!("cannot open export {name}: {error}")))
    }
}

impl Client<'_> {
    fn open(&mut self, name: &str) -> Result<&OpenExport, ExportRefusal> {
        if self.opened.as_ref().is_none_or(|opened| opened.asked != name) {
            self.opened = None;
            if name.len() > STRING_MAX {
                return Err(ExportRefusal::unknown("an export name has at most 4096 bytes"));
            }
            let export = if name.is_empty() {
                let default = self.exports.default_name().ok_or_else(|| {
                    ExportRefusal::unknown("no default export: name one of the listed exports")
                })?;
                self.exports.open(&default)?
            } else {
                self.exports.open(name)?
            };
            export.block.check()?;
            let size = export.disk.len();
            self.opened = Some(OpenExport { asked: name.to_owned(), export, size });
        }
        self.opened.as_ref().ok_or_else(|| ExportRefusal::unknown("no such export"))
    }

    /// Enters transmission with the export opened last.
    fn agree(self, queue: Box<dyn Queue>) -> Option<Negotiated> {
        let OpenExport { asked, export, size } = self.opened?;
        // Contexts hold for the export they were set for, and no other.
        let contexts =
            self.selected.filter(|(name, _)| *name == asked).map_or_else(Vec::new, |(_, contexts)| contexts);
        Some(Negotiated { export, size, structured: self.structured, contexts, queue })
    }

    fn list(&mut self, talk: &mut OptionStream<'_>, data: &[u8]) -> Result<(), Disconnected> {
        if !data.is_empty() {
            return talk.refuse(OPT_LIST, REP_ERR_INVALID, "this option takes no data");
        }
        let mut reply = Vec::new();
        for one in self.exports.list() {
            let name = clip(&one.name).as_bytes();
            let len = (name.len() as u32).to_be_bytes();
            push_reply(&mut reply, OPT_LIST, REP_SERVER, &[&len, name, clip(&one.description).as_bytes()]);
        }
        push_reply(&mut reply, OPT_LIST, REP_ACK, &[]);
        talk.send(&reply)
    }

    /// Answers INFO and GO; a queue if transmission begins.
    fn info(
        &mut self,
        talk: &mut OptionStream<'_>,
        option: u32,
        data: &[u8],
    ) -> Result<Option<Box<dyn Queue>>, Disconnected> {
        let Some((name, asked)) = parse_info(data) else {
            talk.refuse(option, REP_ERR_INVALID, "invalid data of the option")?;
            return Ok(None);
        };
        let structured = self.structured;
        let ready = self.open(name).and_then(|opened| {
            let queue = if option == OPT_GO { Some(opened.queue()?) } else { None };
            Ok((opened, queue))
        });
        let (opened, queue) = match ready {
            Ok(ready) => ready,
            Err(refusal) => {
                talk.refuse(option, refusal.code, &refusal.message)?;
                return Ok(None);
            }
        };
        let export = &opened.export;
        let mut reply = Vec::new();
        let mut inform = |kind: u16, parts: &[u8]| {
            push_reply(&mut reply, option, REP_INFO, &[&kind.to_be_bytes(), parts]);
        };
        let mut size_and_flags = opened.size.to_be_bytes().to_vec();
        size_and_flags.extend(transmission_flags(export, structured).to_be_bytes());
        inform(INFO_EXPORT, &size_and_flags);
        if asked.contains(&INFO_NAME) {
            inform(INFO_NAME, clip(&export.name).as_bytes());
        }
        if asked.contains(&INFO_DESCRIPTION) && !export.description.is_empty() {
            inform(INFO_DESCRIPTION, clip(&export.description).as_bytes());
        }
        if asked.contains(&INFO_BLOCK_SIZE) {
            let block = export.block;
            inform(INFO_BLOCK_SIZE, &[block.min, block.preferred, block.max].map(u32::to_be_bytes).concat());
        }
        push_reply(&mut reply, option, REP_ACK, &[]);
        if queue.is_some() {
            talk.enter(&reply)?
        } else {
            talk.send(&reply)?
        }
        Ok(queue)
    }

    fn meta(&mut self, talk: &mut OptionStream<'_>, option: u32, data: &[u8]) -> Result<(), Disconnected> {
        let set = option == OPT_SET_META_CONTEXT;
        if set {
            self.selected = None;
        }
        let Some((name, queries)) = parse_meta(data) else {
            return talk.refuse(option, REP_ERR_INVALID, "invalid data of the option");
        };
        if !self.structured {
            return talk.refuse(
                option,
                REP_ERR_INVALID,
                "contexts need structured replies: negotiate them first",
            );
        }
        let export = match self.open(name) {
            Ok(opened) => &opened.export,
            Err(refusal) => return talk.refuse(option, refusal.code, &refusal.message),
        };
        let allocation: Arc<dyn Context> = Arc::new(Allocation { disk: export.disk.clone() });
        let all = std::iter::once(&allocation).chain(&export.contexts);
        let chosen: Vec<Arc<dyn Context>> = all
            .filter(|context| match set {
                true => queries.contains(&context.name()) && context.prepare().is_ok(),
                false => queries.is_empty() || queries.iter().any(|query| matches(query, context.name())),
            })
            .cloned()
            .collect();
        let mut reply = Vec::new();
        for (id, context) in chosen.iter().enumerate() {
            let id = if set { id as u32 } else { 0 };
            push_reply(
                &mut reply,
                option,
                REP_META_CONTEXT,
                &[&id.to_be_bytes(), clip(context.name()).as_bytes()],
            );
        }
        push_reply(&mut reply, option, REP_ACK, &[]);
        if set {
            self.selected = Some((name.to_owned(), chosen));
        }
        talk.send(&reply)
    }
}

/// A query that ends in a colon stands for all names below it; any other for itself.
fn matches(query: &str, name: &str) -> bool {
    query == name || (query.ends_with(':') && name.starts_with(query))
}

fn transmission_flags(export: &Export, structured: bool) -> u16 {
    let mut flags = FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_SEND_CACHE;
    let mut add = |flag, when| flags |= if when { flag } else { 0 };
    add(FLAG_READ_ONLY, export.read_only);
    add(FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES, !export.read_only);
    add(FLAG_SEND_FAST_ZERO, !export.read_only && export.fast_zero);
    add(FLAG_ROTATIONAL, export.rotational);
    add(FLAG_SEND_DF, structured);
    add(FLAG_CAN_MULTI_CONN, export.multi_conn);
    flags
}

/// Numbers and strings one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*head))
    }

    fn u32(&mut self) -> Option<u32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*head))
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()?;
        std::str::from_utf8(self.bytes(len as usize)?).ok()
    }
}

fn parse_info(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let count = fields.u16()?;
    let mut asked = Vec::new();
    for _ in 0..count {
        asked.push(fields.u16()?);
    }
    fields.0.is_empty().then_some((name, asked))
}

fn parse_meta(data: &[u8]) -> Option<(&str, Vec<&str>)> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(fields.string()?);
    }
    fields.0.is_empty().then_some((name, queries))
}
