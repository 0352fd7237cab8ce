//! Access to a served source for other processes: a Unix socket in the source's folder.
//!
//! A message is `[json length u32][blob length u32][json][blob]`; descriptors travel with its first byte. A view lives as
//! long as the connection that asked for it.

pub(crate) mod group;

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use delta::Epoch;
use device::Reserve;
use extents::Bitmap;
use lineage::Point;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use trackers::{CowFiles, CowStore, Follower};
use uuid::Uuid;

use crate::control::group::{SourceGroup, record_commit};
use crate::record::bookmarks::Reached;
use crate::record::history::History;
use crate::source::{Checkpoint, SharedView, Source};
use crate::{Gap, SourceError};

const NAME: &str = "control";
/// How long to wait when the system has no descriptor left.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// The most bytes of one part of a message: the encoding of the largest bitmap fits.
const MOST: u32 = 256 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    /// End the epoch; with a view.
    Checkpoint,
    /// End the epochs of all members of the source's group at one moment; these must be all of them. With a view of each, in this
    /// order.
    CutTogether { members: Vec<Uuid> },
    /// The view that is open as `@view`.
    HeldView,
    /// What was written since the last checkpoint.
    Dirty,
    /// A replica is at this epoch now.
    Acknowledge {
        replica: String,
        #[serde(flatten)]
        at: Reached,
    },
    /// The replicas of a group have committed a cut, with the source at this epoch.
    Committed { group: String, cut: Epoch, epoch: Epoch },
    /// A mirror has brought a replica up to date as of this time, in seconds since 1970.
    Reached { replica: String, time: u64 },
    /// Set a named checkpoint, at the present or at an epoch.
    NameCheckpoint { name: String, at: Option<Epoch> },
    /// Remove a bookmark.
    ForgetBookmark { name: String },
    /// The tracker's status.
    Status,
    /// Follow what is written, for batches. Ends with the connection.
    Follow,
    /// Blocks written since the last batch.
    Pending,
    /// End a batch for a replica that was last at this epoch; with it the epoch of the source, if that is to end.
    Batch { since: Option<Epoch>, ends: bool },
    /// A batch has been read: its view may go.
    Drop { view: u64 },
    /// These blocks belong to the next batch too.
    GiveBack,
}

/// The status of a served source.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerStatus {
    /// The process that serves it.
    pub process: u32,
    /// Bytes of the disk that it serves.
    pub size: u64,
    /// Blocks written since the last checkpoint.
    pub dirty: u64,
    /// Regions that a power cut would make dirty.
    pub active_regions: u64,
    /// Region size in bytes.
    pub region: u64,
    /// Views open.
    pub views: usize,
    /// Bytes saved for open views.
    pub kept_bytes: u64,
    /// Why the changes before the next checkpoint are not known.
    pub lost: Option<Gap>,
    /// Why it refuses flushes and forced writes: one has failed.
    #[serde(default)]
    pub flush_failed: Option<String>,
    /// Until when mirrors have brought replicas up to date since the server began, in seconds since 1970.
    pub mirrored: BTreeMap<String, u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Response {
    Checkpoint {
        epoch: Epoch,
        size: u64,
    },
    /// A Checkpoint for each member follows.
    Cut {
        cut: Epoch,
    },
    Following {
        direct: bool,
    },
    Pending {
        blocks: u64,
    },
    Batch {
        epoch: Epoch,
        size: u64,
        view: u64,
        /// Its end.
        at: Point,
    },
    NoBatch,
    Dirty,
    Done,
    Named {
        epoch: Epoch,
    },
    Status {
        status: ServerStatus,
        /// The last epoch that the server has recorded.
        recorded: u64,
    },
    Error {
        message: String,
        refusal: bool,
    },
    Lost {
        since: u64,
        why: Gap,
    },
}

fn send(
    socket: &UnixStream,
    message: &impl Serialize,
    blob: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    let mut bytes = Vec::with_capacity(8 + json.len() + blob.len());
    bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(blob.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&json);
    bytes.extend_from_slice(blob);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let part = [IoSlice::new(&bytes[sent..])];
        sent += retry_on_intr(|| sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// A message, its blob and its descriptors.
type Received<T> = (T, Vec<u8>, Vec<OwnedFd>);

/// The next message; `None` at the end of the conversation.
fn receive<T: for<'a> Deserialize<'a>>(socket: &UnixStream) -> io::Result<Option<Received<T>>> {
    let mut head = [0u8; 8];
    let mut fds = Vec::new();
    let mut have = 0;
    while have < head.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut head[have..])];
        let got = retry_on_intr(|| recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC))?;
        // Descriptors that this process has no room for are dropped without an error.
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(rustix::io::Errno::MFILE.into());
        }
        let got = got.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match got {
            0 if have == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => have += got,
        }
    }
    let word = |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    let (json_len, blob_len) = (word(0), word(4));
    if json_len > 1 << 20 || blob_len > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a control message is too large"));
    }
    let mut json = vec![0u8; json_len as usize];
    let mut blob = vec![0u8; blob_len as usize];
    (&*socket).read_exact(&mut json)?;
    (&*socket).read_exact(&mut blob)?;
    Ok(Some((serde_json::from_slice(&json)?, blob, fds)))
}

/// The address of the socket, through a descriptor: the path of a deep folder may be too long for an address.
fn address(folder: &Path) -> io::Result<(OwnedFd, std::path::PathBuf)> {
    let fd: OwnedFd = device::Dir::existing(folder)?.held().try_clone()?.into();
    let path = format!("/proc/self/fd/{}/{NAME}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    Ok((fd, path.into()))
}

/// Open connections: the socket, and the thread that answers.
type Conversations = Vec<(UnixStream, JoinHandle<()>)>;

/// The server's end: answers until it is stopped.
pub struct ControlServer {
    stop: Arc<AtomicBool>,
    listener: UnixListener,
    folder: std::path::PathBuf,
    thread: Option<JoinHandle<()>>,
    connections: Arc<Mutex<Conversations>>,
}

impl ControlServer {
    /// Starts answering for a source.
    pub fn start(source: Arc<Source>) -> Result<ControlServer, SourceError> {
        ControlServer::start_in(source, None)
    }

    /// Starts answering for a source, and for its group.
    pub fn start_in(
        source: Arc<Source>,
        group: Option<Arc<SourceGroup>>,
    ) -> Result<ControlServer, SourceError> {
        let folder = source.folder().path().to_path_buf();
        let listen = || -> io::Result<UnixListener> {
            // Only the holder of the source's lock gets here, so an existing socket is left over.
            source.folder().remove(NAME)?;
            let (_fd, path) = address(&folder)?;
            device::listen_at(&path, 0o600)
        };
        let failed = SourceError::state("listen in", &folder);
        let both = listen().and_then(|ours| Ok((ours.try_clone()?, ours)));
        let (listener, ours) = both.map_err(failed)?;
        let stop = Arc::new(AtomicBool::new(false));
        let connections: Arc<Mutex<Conversations>> = Arc::default();
        let thread = {
            let (stop, connections) = (stop.clone(), connections.clone());
            std::thread::Builder::new().name("control".into()).spawn(move || {
                let mut reserve = Reserve::new();
                loop {
                    reserve.hold();
                    let accepted = listener.accept();
                    if stop.load(SeqCst) {
                        return;
                    }
                    let socket = match accepted {
                        Ok((socket, _)) => socket,
                        Err(error) => {
                            // Without a pause this thread would keep a core busy.
                            if Reserve::is_exhausted(&error) {
                                reserve.turn_away(&listener, || listener.accept());
                            }
                            std::thread::sleep(EXHAUSTED);
                            continue;
                        }
                    };
                    let Ok(ours) = socket.try_clone() else { continue };
                    let (source, group) = (source.clone(), group.clone());
                    let answering = std::thread::Builder::new().name("control".into()).spawn(move || {
                        // A client that disconnects or sends garbage ends only its own connection.
                        let _ = answer_all(&source, group.as_deref(), &socket);
                    });
                    let mut all = connections.lock().unwrap_or_else(|e| e.into_inner());
                    all.retain(|(_, thread)| !thread.is_finished());
                    all.extend(answering.ok().map(|thread| (ours, thread)));
                }
            })
        };
        let thread = Some(thread.map_err(SourceError::state("start a thread for", &folder))?);
        Ok(ControlServer { stop, listener: ours, folder, thread, connections })
    }
}

impl Drop for ControlServer {
    /// Ends every connection, and with them the views of other processes.
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        // Wakes the accepting thread, even if the folder is gone.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Ok((_fd, path)) = address(&self.folder) {
            let _ = std::fs::remove_file(path);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for (socket, thread) in self.connections.lock().unwrap_or_else(|e| e.into_inner()).drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
            let _ = thread.join();
        }
    }
}

/// Views that one connection holds.
#[derive(Default)]
struct ConnectionState {
    own: Vec<Checkpoint>,
    /// Of all members of the group.
    together: Vec<(Arc<Source>, Checkpoint)>,
    shared: Vec<Arc<SharedView>>,
    follower: Option<Follower>,
    /// Views of batches, by number.
    batches: BTreeMap<u64, Arc<CowStore>>,
    next_batch: u64,
}

fn answer_all(source: &Source, group: Option<&SourceGroup>, socket: &UnixStream) -> io::Result<()> {
    let mut holding = ConnectionState::default();
    let result = (|| {
        while let Some((ask, blob, _)) = receive::<Request>(socket)? {
            let answered = match ask {
                Request::CutTogether { members } => answer_cut(source, group, socket, &mut holding, &members),
                ask => answer(source, socket, &mut holding, ask, &blob),
            };
            if let Err(error) = answered? {
                let answer = match error {
                    SourceError::Lost { since, why } => Response::Lost { since, why },
                    error => Response::Error { refusal: error.is_refusal(), message: error.to_string() },
                };
                send(socket, &answer, &[], &[])?;
            }
        }
        Ok(())
    })();
    // The connection ends first: a reader checks it after each read. While it seems open, nothing may
    // be overwritten without being saved.
    let _ = socket.shutdown(std::net::Shutdown::Both);
    let own = holding.own.iter().filter_map(|c| c.saved.as_ref());
    for saved in own.chain(holding.batches.values()) {
        source.disk().drop_view(saved);
    }
    for (member, checkpoint) in &holding.together {
        checkpoint.saved.iter().for_each(|saved| member.disk().drop_view(saved));
    }
    result
}

/// Ends the epochs of a group's members at one moment.
fn answer_cut(
    source: &Source,
    group: Option<&SourceGroup>,
    socket: &UnixStream,
    holding: &mut ConnectionState,
    members: &[Uuid],
) -> io::Result<Result<(), SourceError>> {
    let name = || source.about().path.display().to_string();
    let Some(group) = group else {
        return Ok(Err(SourceError::Refused(format!(
            "the server of {} does not serve it as a member of a group: restart it with --group and all members",
            name()
        ))));
    };
    let is_one = |uuid: &Uuid| group.members().iter().any(|member| member.about().uuid == *uuid);
    if members.len() != group.members().len() || !members.iter().all(is_one) {
        return Ok(Err(SourceError::Refused(format!(
            "the server of {} does not serve all members of its group: restart it with --group and all of them",
            name()
        ))));
    }
    let (cut, ended) = match group.checkpoint() {
        Ok(done) => done,
        Err(error) => return Ok(Err(error)),
    };
    holding.together.extend(ended.iter().cloned());
    send(socket, &Response::Cut { cut }, &[], &[])?;
    for uuid in members {
        if let Some((member, checkpoint)) = ended.iter().find(|(member, _)| member.about().uuid == *uuid) {
            if let Err(error) = answer_view(member, socket, checkpoint)? {
                return Ok(Err(error));
            }
        }
    }
    Ok(Ok(()))
}

fn answer(
    source: &Source,
    socket: &UnixStream,
    holding: &mut ConnectionState,
    ask: Request,
    blob: &[u8],
) -> io::Result<Result<(), SourceError>> {
    let done = |done: Result<(), SourceError>| answer_with(socket, done.map(|()| Response::Done));
    let checkpoint = match ask {
        Request::Checkpoint => match source.checkpoint(true) {
            Ok(checkpoint) => {
                holding.own.push(checkpoint.clone());
                checkpoint
            }
            Err(error) => return Ok(Err(error)),
        },
        // Answered by the caller, who has the group.
        Request::CutTogether { .. } => return Ok(Err(SourceError::Server("it is in no group".into()))),
        Request::HeldView => match source.held_view() {
            Some(shared) => {
                let checkpoint = shared.checkpoint().clone();
                holding.shared.push(shared);
                checkpoint
            }
            None => {
                let name = source.about().name();
                return Ok(Err(SourceError::Refused(format!(
                    "no snapshot of {name} is open: connect to the export {name}@view first, or omit --at-view"
                ))));
            }
        },
        Request::Dirty => return answer_dirty(source, socket),
        Request::Acknowledge { replica, at } => return done(source.acknowledge(&replica, at)),
        Request::Committed { group, cut, epoch } => {
            let at = (cut, epoch);
            return done(source.with_history(|_| record_commit(source.folder(), &group, at)));
        }
        Request::Reached { replica, time } => {
            source.reached(replica, time);
            return send(socket, &Response::Done, &[], &[]).map(Ok);
        }
        Request::NameCheckpoint { name, at } => {
            let named = source.name_checkpoint(&name, at);
            return answer_with(socket, named.map(|epoch| Response::Named { epoch }));
        }
        Request::ForgetBookmark { name } => return done(source.forget_bookmark(&name)),
        Request::Status => {
            return answer_with(
                socket,
                status(source).map(|(status, recorded)| Response::Status { status, recorded }),
            );
        }
        Request::Follow => {
            holding.follower = Some(source.follow());
            return send(socket, &Response::Following { direct: source.is_direct() }, &[], &[]).map(Ok);
        }
        Request::Pending => {
            let blocks = holding.follower.as_ref().map_or(0, Follower::pending);
            return send(socket, &Response::Pending { blocks }, &[], &[]).map(Ok);
        }
        Request::GiveBack => {
            let blocks =
                Bitmap::new(source.disk().record().size().div_ceil(source.about().block_size.into()));
            if let (Ok(()), Some(follower)) = (blocks.decode_into(blob), &holding.follower) {
                source.disk().give_back(follower, &blocks);
                return send(socket, &Response::Done, &[], &[]).map(Ok);
            }
            return Ok(Err(SourceError::Server("blocks were returned that no batch had".into())));
        }
        Request::Batch { since, ends } => return answer_batch(source, socket, holding, (since, ends)),
        Request::Drop { view } => {
            if let Some(saved) = holding.batches.remove(&view) {
                source.disk().drop_view(&saved);
            }
            return send(socket, &Response::Done, &[], &[]).map(Ok);
        }
    };
    answer_view(source, socket, &checkpoint)
}

/// Sends a view: its epoch, its size, and its files.
fn answer_view(
    source: &Source,
    socket: &UnixStream,
    checkpoint: &Checkpoint,
) -> io::Result<Result<(), SourceError>> {
    let parts = match checkpoint.saved.as_ref().map(|s| s.parts()) {
        Some(Ok(parts)) => parts,
        Some(Err(e)) => return Ok(Err(SourceError::state("share a view of", &source.about().path)(e))),
        None => return Ok(Err(SourceError::Server("the server made no view".into()))),
    };
    let size = checkpoint.saved.as_ref().map_or(0, |s| s.size());
    let answer = Response::Checkpoint { epoch: checkpoint.epoch, size };
    send(socket, &answer, &[], &[parts.map.as_fd(), parts.data.as_fd()]).map(Ok)
}

/// The answer to a request without a result.
fn answer_with(
    socket: &UnixStream,
    done: Result<Response, SourceError>,
) -> io::Result<Result<(), SourceError>> {
    match done {
        Ok(answer) => send(socket, &answer, &[], &[]).map(Ok),
        Err(error) => Ok(Err(error)),
    }
}

/// Sends what was written since the last checkpoint.
fn answer_dirty(source: &Source, socket: &UnixStream) -> io::Result<Result<(), SourceError>> {
    let mut blob = Vec::new();
    match source.dirty() {
        Ok(dirty) => dirty.encode(&mut blob),
        Err(error) => return Ok(Err(error)),
    }
    send(socket, &Response::Dirty, &blob, &[]).map(Ok)
}

fn answer_batch(
    source: &Source,
    socket: &UnixStream,
    holding: &mut ConnectionState,
    (since, ends): (Option<Epoch>, bool),
) -> io::Result<Result<(), SourceError>> {
    let Some(follower) = &holding.follower else {
        return Ok(Err(SourceError::Server(
            "a batch was requested, but the connection does not follow writes".into(),
        )));
    };
    let batch_changes = match source.batch_changes(follower, since, ends) {
        Ok(Some(batch_changes)) => batch_changes,
        Ok(None) => return send(socket, &Response::NoBatch, &[], &[]).map(Ok),
        Err(error) => return Ok(Err(error)),
    };
    let view = holding.next_batch;
    holding.next_batch += 1;
    holding.batches.insert(view, batch_changes.saved.clone());
    let parts = match batch_changes.saved.parts() {
        Ok(parts) => parts,
        // After an error the client follows again: the replica then lacks what this batch had.
        Err(e) => return Ok(Err(SourceError::state("share a view of", &source.about().path)(e))),
    };
    let mut blob = Vec::new();
    batch_changes.changes.encode(&mut blob);
    let answer = Response::Batch {
        epoch: batch_changes.epoch,
        size: batch_changes.saved.size(),
        view,
        at: batch_changes.at,
    };
    send(socket, &answer, &blob, &[parts.map.as_fd(), parts.data.as_fd()]).map(Ok)
}

/// The status of a held source, and the last epoch that it has recorded.
pub(crate) fn status(source: &Source) -> Result<(ServerStatus, u64), SourceError> {
    let (lost, recorded) = source.lost_since();
    let (active_regions, region) = source.disk().active_regions();
    let views = source.disk().views();
    let status = ServerStatus {
        process: std::process::id(),
        size: device::Disk::len(source.disk()),
        dirty: source.dirty()?.count(),
        active_regions,
        region,
        views: views.len(),
        kept_bytes: views.iter().map(|v| v.kept_bytes()).sum(),
        lost,
        flush_failed: device::Disk::failed(source.disk()),
        mirrored: source.mirrored(),
    };
    Ok((status, recorded))
}

/// How long a server may take for what it answers at once.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The error of a server that does not answer.
fn gone(error: io::Error) -> SourceError {
    match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::MFILE) => SourceError::Server(format!(
            "too many open files to receive a snapshot from the server ({error}): raise the limit (\"ulimit -n\")"
        )),
        // Only where there is a time limit.
        Some(rustix::io::Errno::AGAIN) => SourceError::Hangs,
        _ => SourceError::Server(format!("the server of the source ended ({error}): run again")),
    }
}

/// An epoch that a server has ended, the size of the source, and the view of it.
pub(crate) type ServedView = (Epoch, u64, CowStore);

/// A batch as the server describes it.
pub(crate) struct ServedBatch {
    pub epoch: Epoch,
    /// Bytes of the disk.
    pub size: u64,
    /// The number of its view.
    pub view: u64,
    /// Its end.
    pub at: Point,
    pub saved: CowStore,
    /// The encoded bitmap of what was written.
    pub changes: Vec<u8>,
}

/// A connection to the server of a source.
pub struct ControlClient {
    socket: Arc<UnixStream>,
    /// It does not wait for a server that hangs.
    only_looks: bool,
}

impl ControlClient {
    /// Connects to the server of the source whose folder this is; `None` if there is none.
    pub fn connect(folder: &Path) -> Result<Option<ControlClient>, SourceError> {
        let connect = || {
            let (_fd, path) = address(folder)?;
            UnixStream::connect(path)
        };
        match connect() {
            Ok(socket) => Ok(Some(ControlClient { socket: Arc::new(socket), only_looks: false })),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            Err(e) => Err(SourceError::state("reach the server through", folder)(e)),
        }
    }

    /// A connection for one who only looks, as a monitor: what a server answers at once is not waited for longer than ten seconds. A sync waits, as a
    /// disk may take its time.
    ///
    /// # Errors
    /// As [`ControlClient::connect`].
    pub fn connect_to_look(folder: &Path) -> Result<Option<ControlClient>, SourceError> {
        let connected = ControlClient::connect(folder)?;
        Ok(connected.map(|client| ControlClient { only_looks: true, ..client }))
    }

    /// A connection to a source that this process holds.
    pub(crate) fn within(source: &Arc<Source>) -> Result<ControlClient, SourceError> {
        let failed = || SourceError::state("talk about", source.folder().path());
        let (ours, theirs) = UnixStream::pair().map_err(failed())?;
        let source = source.clone();
        let answering = move || {
            let _ = answer_all(&source, None, &theirs);
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(answering);
        thread.map_err(SourceError::state("start a thread for", Path::new("a conversation")))?;
        Ok(ControlClient { socket: Arc::new(ours), only_looks: false })
    }

    fn ask(&self, ask: &Request) -> Result<Received<Response>, SourceError> {
        self.ask_with(ask, &[])
    }

    fn ask_with(&self, ask: &Request, blob: &[u8]) -> Result<Received<Response>, SourceError> {
        send(&self.socket, ask, blob, &[]).map_err(gone)?;
        self.hear()
    }

    /// Asks what a server answers at once, whatever else it does. Who only looks is told that one hangs which has not answered in time; the connection
    /// is of no more use then.
    fn look(&self, ask: &Request) -> Result<Received<Response>, SourceError> {
        self.socket.set_read_timeout(self.only_looks.then_some(ANSWERS_WITHIN)).map_err(gone)?;
        self.ask(ask)
    }

    /// The next answer.
    fn hear(&self) -> Result<Received<Response>, SourceError> {
        match receive(&self.socket).map_err(gone)? {
            None => Err(gone(io::ErrorKind::UnexpectedEof.into())),
            Some((Response::Error { message, refusal: true }, ..)) => Err(SourceError::Refused(message)),
            Some((Response::Error { message, .. }, ..)) => Err(SourceError::Server(message)),
            Some((Response::Lost { since, why }, ..)) => Err(SourceError::Lost { since, why }),
            Some(answer) => Ok(answer),
        }
    }

    fn confused<T>() -> Result<T, SourceError> {
        Err(SourceError::Server(
            "unexpected answer from the server of the source: if dsync was upgraded, restart the server"
                .into(),
        ))
    }

    /// A checkpoint with its view, or the view that is held open as `@view`.
    pub(crate) fn view(&self, held: bool) -> Result<ServedView, SourceError> {
        Self::view_of(self.ask(if held { &Request::HeldView } else { &Request::Checkpoint })?)
    }

    /// Ends the epochs of all members of a group, with a view of each. The views last as long as this connection.
    pub(crate) fn cut_together(&self, members: &[Uuid]) -> Result<(Epoch, Vec<ServedView>), SourceError> {
        let Response::Cut { cut } = self.ask(&Request::CutTogether { members: members.to_vec() })?.0 else {
            return Self::confused();
        };
        let views = members.iter().map(|_| Self::view_of(self.hear()?));
        Ok((cut, views.collect::<Result<_, _>>()?))
    }

    fn view_of((answer, _, fds): Received<Response>) -> Result<ServedView, SourceError> {
        let mut fds = fds.into_iter();
        match (answer, fds.next(), fds.next()) {
            (Response::Checkpoint { epoch, size }, Some(map), Some(data)) => {
                let saved = CowStore::from_parts(CowFiles { map, data }).map_err(|e| {
                    SourceError::Server(format!("cannot use the snapshot of the server: {e}"))
                })?;
                Ok((epoch, size, saved))
            }
            _ => Self::confused(),
        }
    }

    /// Adds what was written since the last checkpoint to `into`.
    pub(crate) fn dirty(&self, into: &Bitmap) -> Result<(), SourceError> {
        let (_, blob, _) = self.look(&Request::Dirty)?;
        into.decode_into(&blob).or_else(|_| Self::confused())
    }

    /// Reports the epoch of a replica.
    pub(crate) fn acknowledge(&self, replica: &str, at: Reached) -> Result<(), SourceError> {
        self.ask(&Request::Acknowledge { replica: replica.to_owned(), at }).map(|_| ())
    }

    /// Reports that the replicas of a group have committed a cut, with the source at an epoch.
    pub(crate) fn committed(&self, group: &str, (cut, epoch): (Epoch, Epoch)) -> Result<(), SourceError> {
        self.ask(&Request::Committed { group: group.to_owned(), cut, epoch }).map(|_| ())
    }

    /// A mirror has brought a replica up to date as of then, in seconds since 1970.
    pub(crate) fn reached(&self, replica: &str, time: u64) -> Result<(), SourceError> {
        self.ask(&Request::Reached { replica: replica.to_owned(), time }).map(|_| ())
    }

    /// Sets a named checkpoint.
    pub(crate) fn name_checkpoint(&self, name: &str, at: Option<Epoch>) -> Result<Epoch, SourceError> {
        match self.ask(&Request::NameCheckpoint { name: name.to_owned(), at })?.0 {
            Response::Named { epoch } => Ok(epoch),
            _ => Self::confused(),
        }
    }

    /// Removes a bookmark.
    pub(crate) fn forget_bookmark(&self, name: &str) -> Result<(), SourceError> {
        self.ask(&Request::ForgetBookmark { name: name.to_owned() }).map(|_| ())
    }

    /// Starts following writes. Returns whether they bypass the page cache.
    pub(crate) fn follow(&self) -> Result<bool, SourceError> {
        match self.ask(&Request::Follow)?.0 {
            Response::Following { direct } => Ok(direct),
            _ => Self::confused(),
        }
    }

    /// Blocks written since the last batch.
    pub(crate) fn pending(&self) -> Result<u64, SourceError> {
        match self.ask(&Request::Pending)?.0 {
            Response::Pending { blocks } => Ok(blocks),
            _ => Self::confused(),
        }
    }

    /// Ends a batch, if there is anything in it.
    pub(crate) fn batch(&self, since: Option<Epoch>, ends: bool) -> Result<Option<ServedBatch>, SourceError> {
        let (answer, blob, fds) = self.ask(&Request::Batch { since, ends })?;
        let mut fds = fds.into_iter();
        match (answer, fds.next(), fds.next()) {
            (Response::NoBatch, ..) => Ok(None),
            (Response::Batch { epoch, size, view, at }, Some(map), Some(data)) => {
                let saved = CowStore::from_parts(CowFiles { map, data }).map_err(|e| {
                    SourceError::Server(format!("cannot use the snapshot of the server: {e}"))
                })?;
                Ok(Some(ServedBatch { epoch, at, size, view, saved, changes: blob }))
            }
            _ => Self::confused(),
        }
    }

    /// Returns the blocks of a batch.
    pub(crate) fn give_back(&self, blocks: &Bitmap) -> Result<(), SourceError> {
        let mut blob = Vec::new();
        blocks.encode(&mut blob);
        self.ask_with(&Request::GiveBack, &blob).map(|_| ())
    }

    /// Releases the view of a batch.
    pub(crate) fn drop_batch(&self, view: u64) -> Result<(), SourceError> {
        self.ask(&Request::Drop { view }).map(|_| ())
    }

    /// The tracker's status, for one who has read this history. Of an epoch that is just being recorded the history may be the first to
    /// know: what was lost before it is said there.
    pub fn status(&self, history: &History) -> Result<ServerStatus, SourceError> {
        match self.look(&Request::Status)?.0 {
            Response::Status { mut status, recorded } => {
                status.lost.take_if(|_| history.last().is_some_and(|last| last.number > recorded));
                Ok(status)
            }
            _ => Self::confused(),
        }
    }

    /// A check that the server is still connected: a view is exact only until then.
    pub(crate) fn alive(&self) -> Arc<dyn Fn() -> io::Result<()> + Send + Sync> {
        let socket = self.socket.clone();
        Arc::new(move || {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let mut fds = [PollFd::new(&*socket, PollFlags::RDHUP)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            retry_on_intr(|| poll(&mut fds, Some(&now)))?;
            if fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
                return Err(io::Error::other(
                    "the server of the source stopped, and its snapshot is gone: run again",
                ));
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::{SourceOptions, StateDir};

    fn served() -> (Arc<Source>, ControlServer, tempfile::TempDir) {
        let temp = tempfile::tempdir().unwrap();
        let image = temp.path().join("vm.raw");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let state = StateDir::find(Some(&temp.path().join("state")));
        let source = Arc::new(Source::open(&state, &image, &SourceOptions::default()).unwrap());
        let server = ControlServer::start(source.clone()).unwrap();
        (source, server, temp)
    }

    /// The server writes an epoch to the history first, and takes its time to make that durable.
    #[test]
    fn what_was_lost_before_an_epoch_that_is_being_recorded_is_not_lost_after_it() {
        let (source, _server, _temp) = served();
        let lost = || {
            let history = History::read(source.folder()).unwrap();
            crate::lost(source.folder().path(), source.about(), &history).unwrap()
        };
        let before = source.lost();
        assert!(before.is_some() && lost() == before);
        let mut history = History::hold(source.folder()).unwrap();
        let epoch = Epoch { number: 1, id: Uuid::new_v4() };
        history.append(epoch, before.clone(), 1 << 20, 4096, &Bitmap::new(256)).unwrap();
        assert_eq!(source.lost(), before);
        assert_eq!(lost(), None);
        // Recorded, in the same place: what is lost from then on is lost.
        source.checkpoint(false).unwrap();
        assert_eq!(lost(), None);
        source.outdate("another writer");
        assert_eq!(lost(), Some("another writer".into()));
    }

    /// A server that ends a connection by itself: nothing may be overwritten unsaved while its reader trusts the view.
    #[test]
    fn a_reader_is_told_before_its_views_are_let_go() {
        let (source, _server, _temp) = served();
        for _ in 0..20 {
            let client = ControlClient::connect(source.folder().path()).unwrap().unwrap();
            // Many, so that releasing them takes time.
            let views: Vec<_> = (0..100).map(|_| client.view(false).unwrap()).collect();
            let alive = client.alive();
            alive().unwrap();
            assert_eq!(source.disk().views().len(), views.len());
            (&*client.socket).write_all(&[0xff; 8]).unwrap();
            while source.disk().views().len() == views.len() {
                std::thread::yield_now();
            }
            assert!(alive().is_err(), "a view has gone, and its reader would not notice");
            while !source.disk().views().is_empty() {
                std::thread::yield_now();
            }
        }
    }
}
