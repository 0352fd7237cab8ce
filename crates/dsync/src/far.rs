//! The far side: connecting to it, and `dsync receive`.

use std::time::Duration;

use anyhow::Result;
use link::{ConnectOptions, Keys, Limits, Link, Listener};
use source::StateDir;
use sync::{AllowedPaths, SyncError};

use crate::args::{FarArgs, Receive};
use crate::failure::Failure;
use crate::output::Output;

/// How long sessions may take to end when the listener stops.
const PATIENCE: Duration = Duration::from_secs(10);

/// A link to the far side: to a listener if a port is given, otherwise through the remote shell.
pub(crate) fn call(host: &str, port: Option<u16>, far: &FarArgs, state: &StateDir) -> Result<Link> {
    if let Some(port) = port {
        let connections = far.connections.map(usize::from);
        let options = ConnectOptions { connections, timeout: far.timeout(), ..ConnectOptions::default() };
        return Ok(Link::tls(&Keys::new(state.keys_folder()), host, port, &options)?);
    }
    let rsh: Vec<String> = far.rsh().split_whitespace().map(str::to_owned).collect();
    let mut command: Vec<String> = far.remote_dsync().split_whitespace().map(str::to_owned).collect();
    command.push("receive".into());
    Ok(Link::ssh(&rsh, host, &command, far.timeout())?)
}

/// Runs `dsync receive`.
pub(crate) fn receive(args: &Receive, state: &StateDir, output: &Output) -> Result<()> {
    let Some(address) = args.listen else {
        return sync::receive(Link::stdio()?, state).map_err(|error| match error {
            // If it is not dsync that connected, a person started this by hand: print the error.
            SyncError::Link(ref link) if !link.is_cut() => error.into(),
            // The near side prints other errors, which are sent over the link, and reports a cut itself.
            told => Failure::told(&told).into(),
        });
    };
    let allowed = AllowedPaths::within(&args.into)?;
    let keys = Keys::new(state.keys_folder());
    let limits = Limits { timeout: args.timeout, from: args.from.clone(), ..Limits::default() };
    // Before the first connection, so that a signal always ends everything in order.
    let mut signals =
        signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM])?;
    let log = output.alike();
    let listener = Listener::bind(address, &keys, limits, move |line| log.note(line))?;
    let stop = listener.stop()?;
    output.ready(&format!("listening on {}", listener.address()));
    output.more(&format!("with the key {}", keys.own()?));
    let (state, log) = (state.clone(), output.alike());
    let serving = std::thread::Builder::new().name("listener".into()).spawn(move || {
        listener.run(move |link, peer| {
            log.note(&format!("{peer}: session started"));
            match sync::receive_within(link, &state, &allowed) {
                Ok(()) => log.note(&format!("{peer}: session ended")),
                Err(error) => log.note(&format!("{peer}: session failed: {error}")),
            }
        });
    })?;
    signals.forever().next();
    stop.stop(PATIENCE);
    let _ = serving.join();
    Ok(())
}
