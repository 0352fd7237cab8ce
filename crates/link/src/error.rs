//! Errors of a link.

use crate::keys::key::Key;
use crate::keys::roles::Roles;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a link cannot continue. Both halves of a link may return the same error, repeatedly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The link ended without a goodbye: the peer, its process, or the way to it is gone.
    #[error("the link to {peer} was cut{}", because(.why))]
    Cut {
        /// Who was at the other end.
        peer: String,
        /// The cause; may be empty.
        why: String,
    },
    /// The remote shell failed before the far side's hello.
    #[error("{rsh} to {host} failed ({status}){}: try \"{rsh} {host} true\" by hand", because(.said))]
    Rsh {
        /// The remote shell's name, as a user would type it.
        rsh: String,
        /// The host, as it was given.
        host: String,
        /// How it ended: "exit 255".
        status: String,
        /// The end of its standard error.
        said: String,
    },
    /// The host was reached, but the command is not there.
    #[error(
        "{program} is not installed on {host}, or not in the PATH of its non-interactive shell{}: install it there, or give its path with --remote-dsync",
        because(.said)
    )]
    Absent {
        /// The requested program.
        program: String,
        /// The host, as it was given.
        host: String,
        /// The end of the far shell's output.
        said: String,
    },
    /// The host was reached, and the command ended before its hello.
    #[error("{}", command_failed(.rsh, .command, .host, .status, .said))]
    Command {
        /// The remote shell's name, as a user would type it.
        rsh: String,
        /// The requested command.
        command: String,
        /// The host, as it was given.
        host: String,
        /// How it ended.
        status: String,
        /// The end of its standard error.
        said: String,
    },
    /// The remote shell cannot be started here.
    #[error("cannot start \"{program}\" ({why}): install it, or choose another remote shell with --rsh")]
    Start {
        /// The program.
        program: String,
        /// The system's error.
        why: String,
    },
    /// Invalid host name.
    #[error("invalid host \"{0}\": a host is not empty and does not begin with a dash")]
    Host(String),
    /// The other end does not speak dsync's protocol.
    #[error(
        "{peer} does not answer as dsync does, it sent {said:?}: check that the command is dsync's, and that the shell's start-up files there print nothing"
    )]
    NotDsync {
        /// Who was at the other end.
        peer: String,
        /// The beginning of what came instead.
        said: String,
    },
    /// The other end speaks another version.
    #[error(
        "{peer} speaks version {theirs} of the link, this dsync speaks version {ours}: install the same version of dsync on both sides"
    )]
    Version {
        /// Who was at the other end.
        peer: String,
        /// The version spoken here.
        ours: u16,
        /// The version spoken there.
        theirs: u16,
    },
    /// The other end sent something invalid.
    #[error("{peer} sent {what}: the link is damaged, or another program writes to it")]
    Bad {
        /// Who was at the other end.
        peer: String,
        /// What came.
        what: String,
    },
    /// A message that is too long to be sent.
    #[error("the {part} of a message of kind {kind} has {len} bytes; the limit is {limit}")]
    TooLong {
        /// The message's kind.
        kind: u8,
        /// Which part of it.
        part: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The bound in bytes.
        limit: usize,
    },
    /// A value that JSON cannot hold.
    #[error("a message of kind {kind} cannot be written as JSON: {why}")]
    Json {
        /// The message's kind.
        kind: u8,
        /// The encoder's error.
        why: String,
    },
    /// The keys kept here cannot be used.
    #[error("cannot use {path}: {why}")]
    Keys {
        /// The file or folder.
        path: String,
        /// The error, and the way out.
        why: String,
    },
    /// Invalid name for a key.
    #[error("invalid name \"{0}\" for a key: use the host's name, or HOST:PORT")]
    InvalidName(String),
    /// A name is pinned with another key already.
    #[error(
        "{name} is already pinned with another key, {pinned}: if it has a new one, run: dsync key forget {name}, then this command again"
    )]
    Pinned {
        /// The name.
        name: String,
        /// The fingerprint of the key that is pinned.
        pinned: String,
    },
    /// A name under which no key is pinned.
    #[error("no key is pinned under the name \"{0}\": \"dsync key list\" shows those that are")]
    NoPin(String),
    /// The peer showed a key that is not pinned here.
    #[error(
        "{peer} shows a key that is not pinned here, {}: if \"dsync key\" shows the same there, run: {command} trust {name} {key} --for {roles}",
        key.fingerprint()
    )]
    Unknown {
        /// Who showed it.
        peer: String,
        /// The name under which it would be pinned.
        name: String,
        /// The key.
        key: Key,
        /// The command for the keys that are pinned here.
        command: Box<str>,
        /// What it would be trusted for.
        roles: Roles,
    },
    /// The peer showed a key other than the one pinned under its name.
    #[error(
        "THE KEY OF {peer} HAS CHANGED. Someone may be intercepting the connection to {name}. Pinned here is {}, shown was {}. \
         Nothing was sent. Only if \"dsync key\" on {name} itself shows the new one, run: {command} forget {name} && {command} trust {name} {shown} --for {roles}",
        pinned.fingerprint(),
        shown.fingerprint()
    )]
    Swapped {
        /// Who showed it.
        peer: Box<str>,
        /// The name under which another key is pinned.
        name: Box<str>,
        /// The key that is pinned.
        pinned: Box<Key>,
        /// The key that was shown.
        shown: Key,
        /// The command for the keys that are pinned here.
        command: Box<str>,
        /// What it would be trusted for.
        roles: Roles,
    },
    /// The peer's key is pinned, and the pin has expired.
    #[error(
        "the pin of {name}'s key, {}, has expired: to trust it again, run: {command} trust {name} {key} --for {roles}",
        key.fingerprint()
    )]
    Expired {
        /// The name under which it is pinned.
        name: String,
        /// The key.
        key: Key,
        /// The command for the keys that are pinned here.
        command: Box<str>,
        /// What it would be trusted for.
        roles: Roles,
    },
    /// The key of a peer whose session is open was forgotten here.
    #[error(
        "the key of {name}, {}, is no longer trusted here, so the session was ended: to trust it again, run: {command} trust {name} {key} --for {roles}",
        key.fingerprint()
    )]
    Forgotten {
        /// The name under which it was pinned.
        name: String,
        /// The key.
        key: Key,
        /// The command for the keys that are pinned here.
        command: Box<str>,
        /// What it would be trusted for.
        roles: Roles,
    },
    /// The key is pinned, but this listener accepts only others.
    #[error("the key of {name}, {}, is not among those accepted here: add it with --from", key.fingerprint())]
    NotFrom {
        /// The name under which it is pinned.
        name: String,
        /// The key.
        key: Key,
    },
    /// The key is pinned, but for something else.
    #[error(
        "the key of {name}, {}, is pinned here, but not for {needed}: if it is to be, run: {command} trust {name} --for {roles}",
        key.fingerprint()
    )]
    NotFor {
        /// The name under which it is pinned.
        name: String,
        /// The key.
        key: Key,
        /// The role that it lacks.
        needed: Roles,
        /// The command for the keys that are pinned here.
        command: Box<str>,
        /// All its roles with that one.
        roles: Roles,
    },
    /// The far side does not accept this side's key.
    #[error(
        "{peer} does not accept this host's key: on that host, run: dsync key trust {name} {key} --for serve (with the --state-dir and as the user of its \
         receiver, if it has its own; its log names the command)"
    )]
    NotTrusted {
        /// Who refused it.
        peer: String,
        /// The name under which it could be pinned there.
        name: String,
        /// This side's key.
        key: Key,
    },
    /// The far side cannot be reached over the network.
    #[error(
        "cannot reach {peer} ({why}): check that \"dsync receive --listen\" runs there, or \"dsync send --listen\" for a source, and that no firewall is in the way"
    )]
    Connect {
        /// What was to be reached.
        peer: String,
        /// The system's error.
        why: String,
    },
    /// The TLS handshake with the other end failed.
    #[error("{peer} does not speak TLS as dsync does: {why}")]
    Tls {
        /// Who was at the other end.
        peer: String,
        /// What went wrong.
        why: String,
    },
    /// The far side accepts no session now.
    #[error("{peer} accepts no session: {why}")]
    Busy {
        /// Who refused it.
        peer: String,
        /// Why, and the way out.
        why: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        why: String,
    },
    /// The system refused a file descriptor.
    #[error("cannot use standard input and output as a link: {0}")]
    Stdio(String),
}

impl Error {
    /// True if the link was cut in the middle of a conversation, so that trying again later may help.
    pub fn is_cut(&self) -> bool {
        matches!(self, Error::Cut { .. })
    }

    /// True if the far side has as many sessions as it accepts.
    pub fn is_busy(&self) -> bool {
        matches!(self, Error::Busy { .. })
    }

    /// True if one side does not trust the other's key: trying again does not help until the key is pinned.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::Unknown { .. }
                | Error::Swapped { .. }
                | Error::Expired { .. }
                | Error::Forgotten { .. }
                | Error::NotFrom { .. }
                | Error::NotFor { .. }
                | Error::NotTrusted { .. }
                | Error::Pinned { .. }
        )
    }
}

/// If neither the shell nor the command wrote anything, the shell is the more likely cause.
fn command_failed(rsh: &str, command: &str, host: &str, status: &str, said: &str) -> String {
    if said.is_empty() {
        return format!(
            "the remote shell \"{rsh}\" ended ({status}) without an answer from dsync on {host}: run \"{rsh} {host} {command}\" \
             by hand to see why, or choose another remote shell with --rsh"
        );
    }
    let older = if said.contains("unrecognized subcommand") {
        ": install the same version of dsync on both sides"
    } else {
        ""
    };
    format!("\"{command}\" on {host} failed ({status}): {said}{older}")
}

fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}
