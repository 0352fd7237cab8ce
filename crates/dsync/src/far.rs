//! Connecting to the far side.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use link::{ConnectOptions, Link};
use source::StateDir;

use crate::args::FarArgs;

/// A link to the far side: to a listener if a port is given, otherwise through the remote shell, which runs `dsync VERB`.
pub(crate) fn call(
    host: &str,
    port: Option<u16>,
    verb: &str,
    far: &FarArgs,
    state: &StateDir,
) -> Result<Link> {
    if let Some(port) = port {
        let connections = far.connections.map(usize::from);
        let options = ConnectOptions { connections, timeout: far.timeout(), ..ConnectOptions::default() };
        return Ok(Link::tls(&crate::key::keys(state), host, port, &options)?);
    }
    let rsh: Vec<String> = far.rsh().split_whitespace().map(str::to_owned).collect();
    let mut command: Vec<String> = far.remote_dsync().split_whitespace().map(str::to_owned).collect();
    command.push(verb.into());
    // Somebody at a terminal may be asked for a password, at first.
    static CALLED: AtomicBool = AtomicBool::new(false);
    let waits = std::io::stdin().is_terminal() && !CALLED.load(Ordering::SeqCst);
    let link = Link::ssh(&rsh, host, &command, far.timeout(), (!waits).then(|| far.timeout()))?;
    CALLED.store(true, Ordering::SeqCst);
    Ok(link)
}
