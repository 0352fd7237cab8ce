//! `dsync serve`: tracked exports for NBD clients.

use std::io;
use std::ops::Range;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use device::{Disk, ExportUri, NbdServer};
use extents::Bitmap;
use nbd::{BlockStatus, Context, Export, ExportInfo, ExportRefusal, Exports, state};
use source::{ControlServer, SharedView, Source, SourceGroup, StateDir, export_name};

use crate::Failure;
use crate::args;
use crate::commands::rehearsal::{self, Rehearsal};
use crate::jobs::service::{self, Inherited, Manager};
use crate::output::Output;
use crate::status::metrics;
use crate::terms::units;
use crate::unix_socket::{self, SocketFile};
use crate::wait::until_free;

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
    Rehearsed(Rehearsal),
}

struct All(Vec<ExportedImage>);

impl Exports for All {
    fn list(&self) -> Vec<ExportInfo> {
        let describe = |s: &ExportedImage| match &s.what {
            What::Tracked(source) => format!("{}, tracked", source.about().path.display()),
            What::ReadOnly(_) => "read-only".to_owned(),
            What::Rehearsed(rehearsal) => rehearsal.moment(),
        };
        self.0.iter().map(|s| ExportInfo { name: s.name.clone(), description: describe(s) }).collect()
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        let (plain, view) = match name.rsplit_once(VIEW) {
            Some((plain, view)) if !self.0.iter().any(|s| s.name == name) => (plain, Some(view)),
            _ => (name, None),
        };
        let Some(served) = self.0.iter().find(|s| s.name == plain) else {
            let names: Vec<&str> = self.0.iter().map(|s| s.name.as_str()).collect();
            return Err(ExportRefusal::unknown(format!(
                "no export \"{name}\"; available: {}",
                names.join(", ")
            )));
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
            (What::Rehearsed(rehearsal), _) => {
                let mut export = Export::new(name, rehearsal.disk());
                export.description = rehearsal.moment();
                export.read_only = !rehearsal.is_writable();
                Ok(export)
            }
        }
    }
}

/// Opens the view of a source as the export `name`, whose part after `@view` is `private`: nothing, or a dot and a name.
fn open_view(source: &Arc<Source>, name: &str, private: &str) -> Result<Export, ExportRefusal> {
    let private = match private.strip_prefix('.') {
        Some(private) if source::is_plain(private) => private,
        None if private.is_empty() => "",
        _ => {
            return Err(ExportRefusal::unknown(format!(
                "no export \"{name}\": a snapshot is NAME{VIEW} or NAME{VIEW}.READER, where READER is a letter, then letters, \
                 digits, dots, dashes or underscores"
            )));
        }
    };
    let path = source.about().path.display();
    let shared = source
        .shared_view(private)
        .map_err(|e| ExportRefusal::denied(format!("cannot open a snapshot of {path}: {e}")))?;
    let mut export = Export::new(name, Arc::new(shared.view.clone()));
    // Readers take the id from here: see docs/incremental-backup.md.
    let epoch = shared.view.epoch();
    export.description = format!("epoch {} {} of {path}", epoch.number, epoch.id);
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
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        if self.source.lost().is_some() {
            // Without a record everything counts as dirty.
            return Ok(vec![BlockStatus { len, flags: state::DIRTY }]);
        }
        let disk = self.source.disk();
        let block_size = u64::from(disk.block_size());
        let runs = disk.dirty_runs(blocks(offset, len, block_size), limit)?;
        Ok(runs_of(offset, len, block_size, runs))
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
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        let changes = self.changes()?;
        let block_size = u64::from(self.source.about().block_size);
        let runs = changes.runs_in(blocks(offset, len, block_size)).take(limit).collect();
        Ok(runs_of(offset, len, block_size, runs))
    }
}

/// The blocks of a range of bytes.
fn blocks(offset: u64, len: u64, block_size: u64) -> Range<u64> {
    offset / block_size..(offset + len).div_ceil(block_size)
}

/// Turns dirty runs of blocks into runs of bytes with flags, gapless from `offset` as far as the runs are known.
fn runs_of(offset: u64, len: u64, block_size: u64, dirty: Vec<Range<u64>>) -> Vec<BlockStatus> {
    let end = offset + len;
    let mut statuses = Vec::new();
    let mut at = offset;
    for run in dirty {
        let (start, stop) = ((run.start * block_size).max(at), (run.end * block_size).min(end));
        if start >= stop {
            continue;
        }
        if start > at {
            statuses.push(BlockStatus { len: start - at, flags: 0 });
        }
        statuses.push(BlockStatus { len: stop - start, flags: state::DIRTY });
        at = stop;
    }
    // If the list of runs was cut off, the rest is not known here; clients ask again from the end of the answer.
    if statuses.is_empty() {
        statuses.push(BlockStatus { len, flags: 0 });
    }
    statuses
}

/// How the disk in an image is served: what is known of a source, or what its name and its first bytes say, which a guest may have
/// written to a raw disk. That must not keep it from being served again either. An image in a format that cannot be served is refused.
fn format_of(image: &Path, args: &args::Serve, state: &StateDir) -> Result<device::Format> {
    if let Some(format) = args.format {
        return Ok(format.into());
    }
    let path = device::identity(image)?.path;
    let known = state.source(&path.to_string_lossy())?;
    let copied =
        known.as_ref().is_some_and(|(place, about)| about.format.is_raw() && !source::was_served(place));
    if let Some((_, about)) = known.filter(|_| !copied) {
        return Ok(about.format);
    }
    let format = match device::container_format(image) {
        None => return Ok(device::Format::Raw),
        Some("qcow2") if !copied && device::Format::of_name(image) == device::Format::Qcow2 => {
            return Ok(device::Format::Qcow2);
        }
        Some(other) => other,
    };
    let way_out = match format {
        "qcow2" if copied => {
            "Its replicas are copies of the container: run \"dsync forget\" on it to serve the disk, and give that new replicas"
        }
        "qcow2" => "Pass --format qcow2 to serve the disk",
        _ => "Convert it with \"qemu-img convert\"",
    };
    Err(Failure::refused(format!(
        "{} is a {format} image: a client would see the container's bytes, not the disk in it. {way_out}, or pass --format raw to serve \
         the container itself",
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

/// The time between sweeps of the write-intent log. Set by a test that waits for regions to become idle.
fn sweep_every() -> Duration {
    let set = std::env::var("DSYNC_SWEEP_MS").ok().and_then(|ms| ms.parse().ok());
    set.map_or(source::SourceOptions::SWEEP_EVERY, |ms: u64| Duration::from_millis(ms.max(1)))
}

/// Where clients connect.
#[derive(Default)]
struct Places {
    unix: Option<UnixListener>,
    tcp: Option<std::net::TcpListener>,
    /// The file of a socket that this server has made.
    file: Option<SocketFile>,
}

impl Places {
    /// A socket that the service manager has passed.
    fn passed(socket: Inherited, args: &args::PlaceArgs) -> Result<Places> {
        if args.socket.is_some() || args.tcp.is_some() {
            return Err(Failure::usage("a socket was passed in LISTEN_FDS: omit --socket and --tcp").into());
        }
        match socket {
            Inherited::Unix(unix) => Ok(Places { unix: Some(unix), ..Places::default() }),
            Inherited::Tcp(tcp) => {
                check_tcp(tcp.local_addr()?, args)?;
                Ok(Places { tcp: Some(tcp), ..Places::default() })
            }
        }
    }

    /// Listens where the arguments say.
    fn listen(args: &args::PlaceArgs) -> Result<Places> {
        let unix =
            args.socket.as_deref().map(|path| unix_socket::listen(path, args.socket_mode)).transpose()?;
        let (unix, file) = unix.map_or((None, None), |(unix, file)| (Some(unix), Some(file)));
        let bind = |address| {
            std::net::TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))
        };
        Ok(Places { unix, tcp: args.tcp.map(bind).transpose()?, file })
    }

    /// The URIs of an export.
    fn uris(&self, export: &str) -> Vec<String> {
        let mut servers = Vec::new();
        let bound = self.unix.as_ref().and_then(|unix| unix.local_addr().ok());
        if let Some(path) = bound.as_ref().and_then(|address| address.as_pathname()) {
            // Clients would resolve a relative path in their own directory.
            let path = device::absolute(path).unwrap_or_else(|_| path.to_path_buf());
            servers.push(NbdServer::Unix(path));
        }
        if let Some(address) = self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok()) {
            servers.push(NbdServer::Tcp(address.ip().to_string(), address.port()));
        }
        let uri = |server| ExportUri { server, export: export.to_owned() }.to_string();
        servers.into_iter().map(uri).collect()
    }

    /// Accepts clients. The file is removed when what is returned is dropped.
    fn serve(self, server: &nbd::Server) -> Result<Option<SocketFile>> {
        self.unix.map(|unix| server.serve_unix(unix)).transpose()?;
        self.tcp.map(|tcp| server.serve_tcp(tcp)).transpose()?;
        Ok(self.file)
    }
}

/// Refuses an address that other hosts can reach, and one that all users of this host can, unless they may.
fn check_tcp(address: std::net::SocketAddr, args: &args::PlaceArgs) -> Result<(), Failure> {
    if address.ip().to_canonical().is_loopback() {
        if args.allow_local_users {
            return Ok(());
        }
        return Err(Failure::usage(format!(
            "every user of this host could read and write the disk at {address}, as NBD over TCP asks nobody who they are: use --socket \
             PATH, which lets its owner in (--socket-mode for others), or pass --allow-local-users"
        )));
    }
    Err(Failure::usage(format!(
        "{address} is reachable from other hosts, and NBD is not encrypted: use a loopback address (127.0.0.1:{}), and ssh to \
         carry it further",
        address.port()
    )))
}

/// Runs the server until a signal ends it.
pub(crate) fn run(args: &args::Serve, state: &StateDir, output: &Output) -> Result<()> {
    // Before anything starts a thread.
    let at = &args.places;
    let passed = service::inherited()?.map(|socket| Places::passed(socket, at)).transpose()?;
    let is_passed = passed.is_some();
    at.tcp.map(|address| check_tcp(address, at)).transpose()?;
    if !is_passed && at.socket.is_none() && at.tcp.is_none() {
        let how = "nothing to listen on: pass --socket or --tcp, or start this from a socket unit";
        return Err(Failure::usage(how).into());
    }
    let manager = Manager::find(output);
    // First: a server that cannot listen leaves no source behind.
    let places = passed.map_or_else(|| Places::listen(at), Ok)?;
    let _metrics = metrics::serve(args.metrics.metrics.as_ref(), state, output)?;
    let (all, tracked) = until_free(&args.run.wait, output, || open_all(args, state, output))?;
    service::outlive_terminal()?;
    // Before the first connection, so that a signal always ends everything in order.
    let mut signals =
        signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])?;
    let sources: Vec<Arc<Source>> = tracked.iter().map(|(_, source)| source.clone()).collect();
    let name = args.group.as_deref().filter(|_| !sources.is_empty());
    // Nothing else may hold the sources when they are closed: without a group, these are dropped here.
    let members = tracked.into_iter().filter(|_| name.is_some()).collect();
    let group = name.map(|name| SourceGroup::new(state, name, members)).transpose()?.map(Arc::new);
    let controls: Vec<ControlServer> = sources
        .iter()
        .map(|source| ControlServer::start_in(source.clone(), group.clone()))
        .collect::<Result<_, _>>()?;
    drop(group);
    let lines: Vec<String> = all.iter().map(|served| announcement(served, &places)).collect();
    for source in &sources {
        if let Some(why) = source.disk().failed() {
            output.warn(&format!(
                "{}: the server before could not write all that it had answered for ({why}), so flushes fail here: stop what uses the disk, start this \
                 server again, and that after it",
                source.about().path.display()
            ));
        }
    }
    let rehearsals = all.iter().filter_map(|served| match &served.what {
        What::Rehearsed(rehearsal) => Some(rehearsal.clone()),
        What::Tracked(_) | What::ReadOnly(_) => None,
    });
    let watch = rehearsal::Watch::start(rehearsals.collect(), output)?;
    let server = nbd::Server::new(Arc::new(All(all)));
    server
        .on_trouble(|trouble| eprintln!("dsync: warning: {trouble} (limits: \"ulimit -n\", \"ulimit -u\")"));
    raise_descriptor_limit();
    let _file = places.serve(&server)?;
    for line in &lines {
        match is_passed {
            // Standard output is that of a client which has started this.
            true => output.note(line),
            false => output.ready(line),
        }
    }
    manager.ready(&lines.join("; "));
    manager.watched(|| server.is_awake(), || signals.forever().next())?;
    manager.stopping();
    server.shutdown(PATIENCE);
    drop(server);
    drop(controls);
    let watched = watch.end();
    end(sources, output).and(watched)
}

/// The images of which writes are recorded, with their paths as the user gave them.
type Tracked = Vec<(PathBuf, Arc<Source>)>;

/// Opens everything to serve.
fn open_all(args: &args::Serve, state: &StateDir, output: &Output) -> Result<(Vec<ExportedImage>, Tracked)> {
    let mut all: Vec<ExportedImage> = Vec::new();
    let mut sources = Vec::new();
    if let Some((dir, moment)) = args.group.as_deref().and_then(rehearsal::group_parts) {
        if !args.images.is_empty() {
            return Err(
                Failure::usage("--group DIR@EPOCH serves the replicas in DIR: omit the images").into()
            );
        }
        for (path, rehearsal) in rehearsal::open_group(&dir, &moment, args.writes(), state, output)? {
            all.push(ExportedImage { name: export_name(&path), what: What::Rehearsed(rehearsal) });
        }
        return Ok((all, sources));
    }
    if args.images.is_empty() {
        return Err(Failure::usage("--group NAME makes a group of the images that follow: give them").into());
    }
    let mut together = rehearsal::open_together(args, state)?;
    for image in &args.images {
        let name = export_name(image);
        let rehearsed = rehearsal::parts(image);
        let name = rehearsed.as_ref().map_or(name, |(replica, _)| export_name(replica));
        if all.iter().any(|s| s.name == name) {
            return Err(Failure::usage(format!(
                "two images have the export name \"{name}\": serve them from separate servers, or rename one"
            ))
            .into());
        }
        if let Some((replica, moment)) = rehearsed {
            let rehearsal = match together.iter().position(|(of, _)| of == image) {
                Some(at) => together.swap_remove(at).1,
                None => Rehearsal::open(&replica, &moment, args, state)?,
            };
            all.push(ExportedImage { name, what: What::Rehearsed(rehearsal) });
            continue;
        }
        if args.writable {
            return Err(Failure::usage(format!(
                "--writable is for a replica at a moment, such as {}@now; what is written to a served image is kept",
                image.display()
            ))
            .into());
        }
        let block_size = crate::reach::source::block_size(args.open.block_size)?;
        let format = format_of(image, args, state)?;
        if format.is_raw() {
            warn_odd(image, output);
        }
        let what = if args.read_only {
            check_whole(image, state, output)?;
            let options = device::DiskOptions { write: false, direct: args.direct, exclusive: false };
            What::ReadOnly(match format {
                device::Format::Raw => device::open(image, &options)?,
                device::Format::Qcow2 => source::read_image(image)?,
            })
        } else {
            let source = open_tracked(image, (format, block_size), args, state)?;
            if args.group.is_none() {
                warn_alone(&source, state, output)?;
            }
            source.note_served_as(&name)?;
            sources.push((image.clone(), source.clone()));
            What::Tracked(source)
        };
        all.push(ExportedImage { name, what });
    }
    Ok((all, sources))
}

/// Refuses a replica that holds what its source never was, and says of any other what its clients see.
fn check_whole(image: &Path, state: &StateDir, output: &Output) -> Result<()> {
    if let Some(replica) = sync::settle(state, image)? {
        output.warn(&format!(
            "{0} is a replica: clients that read it while a sync commits see parts of two moments. {0}@now shows one",
            replica.display()
        ));
    }
    Ok(())
}

/// Says that the end of an image cannot be reached by clients that read whole sectors.
fn warn_odd(image: &Path, output: &Output) {
    // One that cannot be looked at is not opened either.
    let rest = device::identity(image).map_or(0, |identity| identity.size % 512);
    if rest > 0 {
        output.warn(&format!(
            "the size of {} is not a multiple of 512 bytes: most clients see a disk without its last {rest}. Make it larger with \"truncate -s %512\"",
            image.display()
        ));
    }
}

/// Says that a disk is served without the others of its group.
fn warn_alone(source: &Source, state: &StateDir, output: &Output) -> Result<()> {
    let Some(group) = source::SourceMembership::read(source.folder())? else { return Ok(()) };
    let (name, path) = (group.name, source.about().path.display());
    let members = source::group_members(state, &name)?;
    let all: Vec<String> = members.iter().map(|(_, about, _)| about.path.display().to_string()).collect();
    output.warn(&format!(
        "{path} is in the group {name}, and is served without it: what is written to it is of no moment of the others, and the group is not \
         synced meanwhile. Serve all of its disks by one server, with \"dsync serve --group {name} {}\"; or take this one out, with \"dsync forget \
         --group {name} {path}\"",
        all.join(" ")
    ));
    Ok(())
}

/// Opens an image to be tracked.
fn open_tracked(
    image: &Path,
    (format, block_size): (device::Format, Option<u32>),
    args: &args::Serve,
    state: &StateDir,
) -> Result<Arc<Source>> {
    let options = source::SourceOptions {
        format: Some(format),
        block_size,
        read_only: false,
        direct: args.direct,
        device_trust: source::DeviceTrust::of(args.open.trust_device),
        allow_shrink: args.open.allow_shrink,
        view_limit: args.view_limit,
        sweep_every: sweep_every(),
        ..source::SourceOptions::default()
    };
    refuse_partial(image, state)?;
    sync::refuse_replica(image, state, READ_ONLY)?;
    let source = Source::open(state, image, &options)?;
    source.be_polite(args.polite);
    // Nothing makes it a replica from here on.
    sync::refuse_replica(image, state, READ_ONLY)?;
    Ok(Arc::new(source))
}

/// Refuses the file of a copy that is not complete: the next sync writes to it, and gives it the name of its replica.
fn refuse_partial(image: &Path, state: &StateDir) -> Result<()> {
    let Some(name) = image.to_str().and_then(|name| name.strip_suffix(".partial")) else { return Ok(()) };
    let options = sync::open_options(None, state);
    match replica::inspect(Path::new(name), &options) {
        Ok(Some(lineage)) if lineage.step.is_some() => Err(Failure::refused(format!(
            "{} is the file of a copy to {name} that is not complete: run \"dsync sync\" again, which completes it",
            image.display()
        ))
        .into()),
        // Whatever else is there is served as any image.
        _ => Ok(()),
    }
}

/// What else can be done with a replica.
const READ_ONLY: &str = "; to read it, serve it as REPLICA@now, or pass --read-only";

/// The line printed when an export is ready.
fn announcement(served: &ExportedImage, places: &Places) -> String {
    let about = match &served.what {
        What::ReadOnly(disk) => format!("{}, read-only", units::size(disk.len())),
        What::Rehearsed(rehearsal) => rehearsal.about(),
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
    let uris = places.uris(&served.name);
    let on = if uris.is_empty() { String::new() } else { format!(" on {}", uris.join(" and ")) };
    format!("serving {}{on} ({about})", served.name)
}

/// Closes what was served. An error with one disk does not keep others from being closed: the first one is returned, and
/// the others are printed.
fn end(sources: Vec<Arc<Source>>, output: &Output) -> Result<()> {
    let mut result = Ok(());
    for source in sources {
        let path = source.about().path.clone();
        let ended = match Arc::try_unwrap(source) {
            Ok(source) => source.close().map_err(anyhow::Error::from),
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
