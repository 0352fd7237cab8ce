//! `dsync serve`: tracked exports for NBD clients.

use std::io;
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use device::Disk;
use extents::Bitmap;
use nbd::{Context, Export, ExportInfo, Exports, Refusal, Status, state};
use replica::Promotion;
use source::{ControlServer, SharedView, Source, StateDir, export_name};

use crate::args;
use crate::output::Output;
use crate::{Failure, units};

/// The suffix under which an export shows its view.
const VIEW: &str = "@view";

/// How long connections may take to finish when the server stops.
const PATIENCE: Duration = Duration::from_secs(10);

struct ExportedImage {
    name: String,
    what: What,
}

enum What {
    Tracked(Arc<Source>),
    ReadOnly(Arc<dyn Disk>),
}

struct All(Vec<ExportedImage>);

impl Exports for All {
    fn list(&self) -> Vec<ExportInfo> {
        let describe = |s: &ExportedImage| match &s.what {
            What::Tracked(source) => format!("{}, tracked", source.about().path.display()),
            What::ReadOnly(_) => "read-only".to_owned(),
        };
        self.0.iter().map(|s| ExportInfo { name: s.name.clone(), description: describe(s) }).collect()
    }

    fn open(&self, name: &str) -> Result<Export, Refusal> {
        let (plain, view) = match name.rsplit_once(VIEW) {
            Some((plain, view)) if !self.0.iter().any(|s| s.name == name) => (plain, Some(view)),
            _ => (name, None),
        };
        let Some(served) = self.0.iter().find(|s| s.name == plain) else {
            let names: Vec<&str> = self.0.iter().map(|s| s.name.as_str()).collect();
            return Err(Refusal::unknown(format!("no export \"{name}\"; available: {}", names.join(", "))));
        };
        match (&served.what, view) {
            (What::Tracked(source), None) => {
                let mut export = Export::new(name, Arc::new(source.disk().clone()));
                export.description = source.about().path.display().to_string();
                export.contexts = vec![Arc::new(Dirty { source: source.clone() })];
                Ok(export)
            }
            (What::Tracked(source), Some(view)) => open_view(source, name, view),
            (What::ReadOnly(disk), _) => {
                let mut export = Export::new(name, disk.clone());
                export.read_only = true;
                Ok(export)
            }
        }
    }
}

/// Opens the view of a source as the export `name`, whose part after `@view` is `private`: nothing, or a dot and a name.
fn open_view(source: &Arc<Source>, name: &str, private: &str) -> Result<Export, Refusal> {
    let private = match private.strip_prefix('.') {
        Some(private) if source::is_plain(private) => private,
        None if private.is_empty() => "",
        _ => {
            return Err(Refusal::unknown(format!(
                "no export \"{name}\": a snapshot is NAME{VIEW} or NAME{VIEW}.READER, where READER is a letter, then letters, \
                 digits, dots, dashes or underscores"
            )));
        }
    };
    let path = source.about().path.display();
    let shared = source
        .shared_view(private)
        .map_err(|e| Refusal::denied(format!("cannot open a snapshot of {path}: {e}")))?;
    let mut export = Export::new(name, Arc::new(shared.view.clone()));
    // Readers take the number from here: see docs/incremental-backup.md.
    export.description = format!("epoch {} of {path}", shared.view.epoch().number);
    export.read_only = true;
    let since = |checkpoint: &str| -> Arc<dyn Context> {
        Arc::new(Changed {
            name: format!("{BITMAP}{checkpoint}"),
            checkpoint: checkpoint.to_owned(),
            view: shared.clone(),
            source: source.clone(),
        })
    };
    export.contexts = shared.checkpoints().map(since).collect();
    export.guard = Box::new(shared);
    Ok(export)
}

const BITMAP: &str = "qemu:dirty-bitmap:";
/// The dirty bitmap of a disk in use: the writes since the last checkpoint of any reader. Views have named checkpoints instead.
const DIRTY: &str = "qemu:dirty-bitmap:dsync";

/// What was written since the last checkpoint.
struct Dirty {
    source: Arc<Source>,
}

impl Context for Dirty {
    fn name(&self) -> &str {
        DIRTY
    }
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<Status>> {
        if self.source.lost().is_some() {
            // Without a record everything counts as dirty.
            return Ok(vec![Status { len, flags: state::DIRTY }]);
        }
        let disk = self.source.disk();
        let block_size = u64::from(disk.block_size());
        Ok(runs_of(offset, len, block_size, |blocks| disk.dirty_runs(blocks, limit)))
    }
}

/// What changed from a named checkpoint up to a view.
struct Changed {
    name: String,
    checkpoint: String,
    view: Arc<SharedView>,
    source: Arc<Source>,
}

impl Changed {
    fn changes(&self) -> io::Result<Arc<Bitmap>> {
        self.view.changes(&self.source, &self.checkpoint).map_err(io::Error::other)
    }
}

impl Context for Changed {
    fn name(&self) -> &str {
        &self.name
    }
    fn prepare(&self) -> io::Result<()> {
        self.changes().map(drop)
    }
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<Status>> {
        let changes = self.changes()?;
        let block_size = u64::from(self.source.about().block_size);
        Ok(runs_of(offset, len, block_size, |blocks| changes.runs_in(blocks).take(limit).collect()))
    }
}

/// Turns dirty runs of blocks into runs of bytes with flags, gapless from `offset` as far as the runs are known.
fn runs_of(
    offset: u64,
    len: u64,
    block_size: u64,
    dirty: impl Fn(Range<u64>) -> Vec<Range<u64>>,
) -> Vec<Status> {
    let end = offset + len;
    let mut statuses = Vec::new();
    let mut at = offset;
    for run in dirty(offset / block_size..end.div_ceil(block_size)) {
        let (start, stop) = ((run.start * block_size).max(at), (run.end * block_size).min(end));
        if start >= stop {
            continue;
        }
        if start > at {
            statuses.push(Status { len: start - at, flags: 0 });
        }
        statuses.push(Status { len: stop - start, flags: state::DIRTY });
        at = stop;
    }
    // If the list of runs was cut off, the rest is not known here; clients ask again from the end of the answer.
    if statuses.is_empty() {
        statuses.push(Status { len, flags: 0 });
    }
    statuses
}

/// A Unix socket's file, removed with the server.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn listen_unix(path: &Path) -> Result<(UnixListener, SocketFile)> {
    if UnixStream::connect(path).is_ok() {
        return Err(
            Failure::refused(format!("another server is already listening on {}", path.display())).into()
        );
    }
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {
            std::fs::remove_file(path)
                .with_context(|| format!("cannot remove the stale socket {}", path.display()))?;
        }
        Ok(_) => bail!("cannot listen on {}: it exists and is not a socket", path.display()),
        Err(_) => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    Ok((listener, SocketFile(path.to_path_buf())))
}

/// Refuses an image that is a container of a disk, unless it is a known source already: what a guest writes to the first
/// block of its disk must not keep the disk from being served again.
fn check_format(image: &Path, state: &StateDir) -> Result<()> {
    let Some(format) = crate::container::format(image) else { return Ok(()) };
    let path = device::identity(image)?.path;
    if state.source(&path.to_string_lossy())?.is_some() {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "{} is a {format} image: a client would see the container's bytes, not the disk in it. Convert it with \
         \"qemu-img convert -O raw\", or pass --format raw to serve the container itself",
        image.display()
    ))
    .into())
}

/// Raises the limit on descriptors: each client takes several, and the usual limit is meant for
/// programs that use select().
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// What must be escaped in a part of a URI.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/@:".contains(&byte);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// The time between sweeps of the write-intent log. Set by a test that waits for regions to become idle.
fn sweep_every() -> Duration {
    let set = std::env::var("DSYNC_SWEEP_MS").ok().and_then(|ms| ms.parse().ok());
    set.map_or(source::SourceOptions::SWEEP_EVERY, |ms: u64| Duration::from_millis(ms.max(1)))
}

/// Marks a replica that is about to be opened for writing as promoted, with a warning.
pub(crate) fn promote(
    path: &Path,
    state: &StateDir,
    by: replica::Use,
    output: &Output,
) -> Result<Option<Promotion>> {
    let options = replica::Options { devices: state.replicas_folder(), ..Default::default() };
    let promotion = match replica::promote(path, &options, by) {
        // Opening it next reports a better error.
        Err(_) if !path.exists() => return Ok(None),
        other => other?,
    };
    if let Some(was) = promotion.as_ref().map(Promotion::was) {
        let at = match (was.unsettled(), was.epoch, was.source) {
            (Some(why), ..) => {
                format!("that is not complete ({why}): its content never was the disk of its source")
            }
            (None, Some(epoch), Some(source)) => format!("at epoch {} of source {source}", epoch.number),
            (None, ..) => "at no epoch".to_owned(),
        };
        output.warn(&format!(
            "{} is a replica {at}; after a write to it, a sync from its source is refused, because it would overwrite what was \
             written",
            path.display()
        ));
    }
    Ok(promotion)
}

/// Runs the server until a signal ends it.
pub(crate) fn run(args: &args::Serve, state: &StateDir, output: &Output) -> Result<()> {
    if let Some(address) = args.tcp.filter(|a| !a.ip().is_loopback()) {
        return Err(Failure::usage(format!(
            "{address} is reachable from other hosts, and NBD is not encrypted: use a loopback address (127.0.0.1:{}), and ssh \
             to carry it further",
            address.port()
        ))
        .into());
    }
    let (all, sources) = open_all(args, state, output)?;
    // Before the first connection, so that a signal always ends everything in order.
    let mut signals =
        signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])?;
    let unix = args.socket.as_deref().map(listen_unix).transpose()?;
    let tcp = args
        .tcp
        .map(|address| {
            std::net::TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))
        })
        .transpose()?;
    let controls: Vec<ControlServer> =
        sources.iter().map(|(s, _)| ControlServer::start(s.clone())).collect::<Result<_, _>>()?;
    let address = tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
    let lines: Vec<String> = all.iter().map(|served| announcement(served, args, address)).collect();
    let server = nbd::Server::new(Arc::new(All(all)));
    server
        .on_trouble(|trouble| eprintln!("dsync: warning: {trouble} (limits: \"ulimit -n\", \"ulimit -u\")"));
    raise_descriptor_limit();
    let _socket = match unix {
        Some((listener, file)) => {
            server.serve_unix(listener)?;
            Some(file)
        }
        None => None,
    };
    if let Some(tcp) = tcp {
        server.serve_tcp(tcp)?;
    }
    for line in lines {
        output.ready(&line);
    }
    signals.forever().next();
    server.shutdown(PATIENCE);
    drop(server);
    drop(controls);
    end(sources, output)
}

/// The served sources, each with its promotion if it was a replica.
type Sources = Vec<(Arc<Source>, Option<Promotion>)>;

/// Opens everything to serve.
fn open_all(args: &args::Serve, state: &StateDir, output: &Output) -> Result<(Vec<ExportedImage>, Sources)> {
    let mut all: Vec<ExportedImage> = Vec::new();
    let mut sources = Vec::new();
    for image in &args.images {
        let name = export_name(image);
        if all.iter().any(|s| s.name == name) {
            return Err(Failure::usage(format!(
                "two images have the export name \"{name}\": serve them from separate servers, or rename one"
            ))
            .into());
        }
        if args.format.is_none() {
            check_format(image, state)?;
        }
        let what = if args.read_only {
            let options = device::Options { write: false, direct: args.direct, exclusive: false };
            What::ReadOnly(device::open(image, &options)?)
        } else {
            let (source, promotion) = open_tracked(image, args, state, output)?;
            sources.push((source.clone(), promotion));
            What::Tracked(source)
        };
        all.push(ExportedImage { name, what });
    }
    Ok((all, sources))
}

/// Opens an image to be tracked; promotes it if it is a replica.
fn open_tracked(
    image: &Path,
    args: &args::Serve,
    state: &StateDir,
    output: &Output,
) -> Result<(Arc<Source>, Option<Promotion>)> {
    let options = source::SourceOptions {
        block_size: crate::block_size(args.open.block_size)?,
        read_only: false,
        direct: args.direct,
        trust_device: args.open.trust_device,
        allow_shrink: args.open.allow_shrink,
        view_limit: args.view_limit,
        sweep_every: sweep_every(),
        ..source::SourceOptions::default()
    };
    let promotion = promote(image, state, replica::Use::Served, output)?;
    match Source::open(state, image, &options) {
        Ok(source) => Ok((Arc::new(source), promotion)),
        Err(error) => {
            promotion.map(Promotion::revert).transpose()?;
            Err(error.into())
        }
    }
}

/// The line printed when an export is ready.
fn announcement(served: &ExportedImage, args: &args::Serve, tcp: Option<std::net::SocketAddr>) -> String {
    let mut addresses = Vec::new();
    if let Some(socket) = &args.socket {
        // Clients would resolve a relative path in their own directory.
        let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.clone());
        let socket = escaped(&socket.to_string_lossy());
        addresses.push(format!("nbd+unix:///{}?socket={socket}", escaped(&served.name)));
    }
    if let Some(tcp) = tcp {
        addresses.push(format!("nbd://{tcp}/{}", escaped(&served.name)));
    }
    let about = match &served.what {
        What::ReadOnly(disk) => format!("{}, read-only", units::size(disk.len())),
        What::Tracked(source) => {
            let trust = match (source.lost(), source.with_history(|h| h.last())) {
                (Some(why), _) => format!("tracking starts now: {why}"),
                (None, Some(last)) => format!("tracked since epoch {}", last.number),
                (None, None) => "tracked".into(),
            };
            let (size, block) = (source.disk().len(), source.about().block_size.into());
            format!("{}, blocks of {}, {trust}", units::size(size), units::size(block))
        }
    };
    format!("serving {} on {} ({about})", served.name, addresses.join(" and "))
}

/// Closes what was served. An error with one disk does not keep others from being closed: the first one is returned, and
/// the others are printed.
fn end(sources: Vec<(Arc<Source>, Option<Promotion>)>, output: &Output) -> Result<()> {
    let mut result = Ok(());
    for (source, promotion) in sources {
        let path = source.about().path.clone();
        let ended = match Arc::try_unwrap(source) {
            Ok(source) => source.close().map_err(anyhow::Error::from).and_then(|()| {
                if promotion.map(Promotion::end).transpose()? == Some(true) {
                    output.more("nothing was written to the replica: it accepts syncs as before");
                }
                Ok(())
            }),
            Err(_) => {
                // A connection did not end in time: the next start will treat this as an unclean stop.
                output.warn(&format!("a client still had {} open when the server stopped", path.display()));
                Ok(())
            }
        };
        let ended = ended.with_context(|| format!("cannot close {} cleanly", path.display()));
        if let (Err(_), Err(error)) = (&result, &ended) {
            output.warn(&crate::failure::text(error));
        }
        result = result.and(ended);
    }
    result
}
