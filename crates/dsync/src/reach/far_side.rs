//! What runs on the far side: `dsync receive` and `dsync send`.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Result;
use link::{Link, Listener, ListenerLimits, Peer};
use source::{CutOptions, StateDir};
use sync::{AllowedPaths, PullClient, SyncError};

use crate::args::{ListenArgs, Receive, Send};
use crate::failure::Failure;
use crate::jobs::service::{self, Inherited, Manager};
use crate::output::Output;
use crate::status::metrics;

/// How long sessions may take to end when the listener stops.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `dsync receive`.
pub(crate) fn receive(args: &Receive, state: &StateDir, output: &Output) -> Result<()> {
    if !args.listens() {
        args.listen.check_unused()?;
        return over_stdio(|link| sync::receive(link, state));
    }
    if args.into.is_empty() {
        return Err(Failure::usage("--listen needs --into PATH: a folder for the replicas of peers").into());
    }
    let allowed = AllowedPaths::replicas(&args.into)?.with_hidden(args.listen.hidden_files);
    let here = state.clone();
    listen(&args.listen, state, output, move |link, _| sync::receive_within(link, &here, &allowed))
}

/// Runs `dsync send`.
pub(crate) fn send(args: &Send, state: &StateDir, output: &Output) -> Result<()> {
    if !args.listens() {
        args.listen.check_unused()?;
        return over_stdio(|link| sync::send(link, state, &AllowedPaths::Anything, None));
    }
    if args.offer.is_empty() {
        return Err(Failure::usage("--listen needs --offer PATH: a source that peers may read").into());
    }
    let allowed = AllowedPaths::sources(&args.offer)?.with_hidden(args.listen.hidden_files);
    let here = state.clone();
    let freeze_limit = args.freeze_limit.unwrap_or(CutOptions::default().limit);
    listen(&args.listen, state, output, move |link, peer| {
        sync::send(link, &here, &allowed, Some(PullClient { name: &peer.name, freeze_limit }))
    })
}

/// Serves one session over standard input and output, to the program that started this.
fn over_stdio(serve: impl FnOnce(Link) -> Result<(), SyncError>) -> Result<()> {
    if std::io::stdout().is_terminal() {
        let how = "without --listen this is started by dsync on another host, and speaks to that: pass --listen to serve a port";
        return Err(Failure::usage(how).into());
    }
    serve(Link::stdio()?).map_err(|error| match error {
        // If it is not dsync that connected, a person started this by hand: print the error.
        SyncError::Link(ref link) if !link.is_cut() => error.into(),
        // The near side prints other errors, which are sent over the link, and reports a cut itself.
        told => Failure::told(&told).into(),
    })
}

/// Serves sessions over TLS until a signal ends it.
fn listen(
    args: &ListenArgs,
    state: &StateDir,
    output: &Output,
    serve: impl Fn(Link, &Peer) -> Result<(), SyncError> + std::marker::Send + Sync + 'static,
) -> Result<()> {
    // Before anything starts a thread.
    let inherited = service::inherited()?;
    let manager = Manager::find(output);
    let keys = crate::reach::key::keys(state);
    let limits = ListenerLimits {
        timeout: args.timeout.unwrap_or(ListenerLimits::default().timeout),
        from: args.from.clone(),
        ..ListenerLimits::default()
    };
    // Before the first connection, so that a signal always ends everything in order.
    let mut signals =
        signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])?;
    let log = output.alike();
    let log = move |line: &str| log.note(line);
    let listener = match (args.listen, inherited) {
        (Some(address), None) => Listener::bind(address, &keys, limits, log)?,
        (None, Some(Inherited::Tcp(socket))) => Listener::on(socket, &keys, limits, log)?,
        (_, given) => return Err(Failure::usage(wrong_socket(given.as_ref())).into()),
    };
    let stop = listener.stop();
    let listening = format!("listening on {}", listener.address());
    output.ready(&listening);
    output.more(&format!("with the key {}", keys.own()?));
    let log = output.alike();
    let serving = std::thread::Builder::new().name("listener".into()).spawn(move || {
        listener.run(move |link, peer| {
            log.note(&format!("{peer}: session started"));
            match serve(link, peer) {
                Ok(()) => log.note(&format!("{peer}: session ended")),
                Err(error) => log.note(&format!("{peer}: session failed: {error}")),
            }
        });
    })?;
    let _metrics = metrics::serve(args.metrics.metrics.as_ref(), state, output)?;
    manager.ready(&listening);
    manager.watched(|| stop.is_awake(), || signals.forever().next())?;
    manager.stopping();
    stop.stop(PATIENCE);
    let _ = serving.join();
    Ok(())
}

/// Why there is nothing to listen on, with what the service manager has passed.
fn wrong_socket(inherited: Option<&Inherited>) -> &'static str {
    match inherited {
        None => "nothing to listen on: pass --listen, or start this from a socket unit",
        Some(Inherited::Unix(_)) => {
            "a Unix socket was passed in LISTEN_FDS, and peers come over TCP: use an address in the socket unit"
        }
        Some(Inherited::Tcp(_)) => "a socket was passed in LISTEN_FDS: omit --listen",
    }
}
