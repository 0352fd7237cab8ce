//! Connecting to the far side.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use link::{ConnectOptions, Link, Roles};
use source::StateDir;

use crate::args::FarArgs;
use crate::failure::Failure;

/// How another host is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Through the remote shell, at a port if it is not the usual one.
    Ssh(Option<u16>),
    /// At the port of a listener.
    Tls(u16),
}

/// A link to the far side: to a listener, or through the remote shell, which runs `dsync VERB`.
pub(crate) fn call(host: &str, reach: Reach, verb: &str, far: &FarArgs, state: &StateDir) -> Result<Link> {
    let port = match reach {
        Reach::Ssh(port) => port,
        Reach::Tls(port) => return call_tls(host, port, verb, far, state),
    };
    let mut rsh = words("--rsh", &far.rsh())?;
    rsh.extend(port.into_iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
    let mut command = words("--remote-dsync", far.remote_dsync())?;
    command.push(verb.into());
    // Somebody at a terminal may be asked for a password, at first.
    static CALLED: AtomicBool = AtomicBool::new(false);
    let waits = std::io::stdin().is_terminal() && !CALLED.load(Ordering::SeqCst);
    let link = Link::ssh(&rsh, host, &command, far.timeout(), (!waits).then(|| far.timeout()))?;
    CALLED.store(true, Ordering::SeqCst);
    Ok(link)
}

fn call_tls(host: &str, port: u16, verb: &str, far: &FarArgs, state: &StateDir) -> Result<Link> {
    let connections = far.connections.map(usize::from);
    let role = if verb == "send" { Roles::PULL } else { Roles::PUSH };
    let options = ConnectOptions { connections, timeout: far.timeout(), role, ..ConnectOptions::default() };
    Ok(Link::tls(&crate::reach::key::keys(state), host, port, &options)?)
}

/// A command and its arguments, as a shell would split them.
fn words(option: &str, command: &str) -> Result<Vec<String>, Failure> {
    shlex::split(command).filter(|words| !words.is_empty()).ok_or_else(|| {
        Failure::usage(format!(
            "invalid command \"{command}\" of {option}: it is empty, or a quote in it is not closed"
        ))
    })
}
