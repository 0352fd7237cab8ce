//! What can go wrong on a link.

use crate::Key;

/// Shorthand for results of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a link can't go on. The same error may be told to both halves of a link, and again to whoever asks again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The link ended without a goodbye: the peer, its process, or what lies between has gone.
    #[error("the link to {peer} was cut{}", because(.why))]
    Cut {
        /// Who was at the other end.
        peer: String,
        /// What is known of the cause; may be empty.
        why: String,
    },
    /// The remote shell failed before the far side said a word.
    #[error("{rsh} to {host} failed ({status}){}: try \"{rsh} {host} true\" by hand", because(.said))]
    Rsh {
        /// The remote shell's name, as a user would type it.
        rsh: String,
        /// The host, as it was given.
        host: String,
        /// How it ended: "exit 255".
        status: String,
        /// The last of what it wrote to its standard error.
        said: String,
    },
    /// The host was reached, but the command is not there.
    #[error(
        "{program} is not installed on {host}, or not in the PATH of its non-interactive shell{}: install it there, or give its path with --remote-dsync",
        because(.said)
    )]
    Absent {
        /// The program that was asked for.
        program: String,
        /// The host, as it was given.
        host: String,
        /// The last of what the far shell wrote.
        said: String,
    },
    /// The host was reached, and the command ended before it said a word.
    #[error("{}", command_failed(.rsh, .command, .host, .status, .said))]
    Command {
        /// The remote shell's name, as a user would type it.
        rsh: String,
        /// The command that was asked for.
        command: String,
        /// The host, as it was given.
        host: String,
        /// How it ended.
        status: String,
        /// The last of what it wrote to its standard error.
        said: String,
    },
    /// The remote shell can't be started here.
    #[error("can't start \"{program}\" ({why}): install it, or name another remote shell with --rsh")]
    Start {
        /// The program that was to be started.
        program: String,
        /// What the system said.
        why: String,
    },
    /// What was given for a host can't be one.
    #[error("\"{0}\" is no host: a host is not empty and does not begin with a dash")]
    Host(String),
    /// The other end does not speak as dsync does.
    #[error(
        "{peer} does not answer as dsync does; it said {said:?}: see that the command is dsync's, and that the shell's start-up files there print nothing"
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
    /// The other end sent what no dsync sends.
    #[error("{peer} sent {what}: the link is damaged, or another program writes to it")]
    Bad {
        /// Who was at the other end.
        peer: String,
        /// What came.
        what: String,
    },
    /// A message that is too long to be sent.
    #[error("a message of kind {kind} has a {part} of {len} bytes; {limit} is the most")]
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
    /// A value that JSON can't hold.
    #[error("a message of kind {kind} can't be written as JSON: {why}")]
    Json {
        /// The message's kind.
        kind: u8,
        /// What the encoder said.
        why: String,
    },
    /// The keys kept here can't be used.
    #[error("can't use {path}: {why}")]
    Keys {
        /// The file or folder.
        path: String,
        /// What is wrong with it, and the way out.
        why: String,
    },
    /// What was given for a key, or for the name of one, can't be it.
    #[error("\"{text}\" is no {what}")]
    NotAKey {
        /// What was given.
        text: String,
        /// What it should have been.
        what: String,
    },
    /// A name is pinned with another key already.
    #[error(
        "{name} is pinned with another key, {pinned}: if it has a new one, run: dsync key forget {name}, then this command again"
    )]
    Pinned {
        /// The name.
        name: String,
        /// The fingerprint of the key that is pinned.
        pinned: String,
    },
    /// A name for which no key is pinned.
    #[error("no key is pinned under the name \"{0}\": dsync key list shows those that are")]
    NoPin(String),
    /// The peer showed a key that is not pinned here.
    #[error(
        "{peer} shows a key that is not pinned here, {}: if \"dsync key\" shows the same there, run: dsync key trust {name} {key}",
        key.fingerprint()
    )]
    Unknown {
        /// Who showed it.
        peer: String,
        /// The name under which it would be pinned.
        name: String,
        /// The key.
        key: Key,
    },
    /// The peer showed another key than the one that is pinned under its name.
    #[error(
        "THE KEY OF {peer} HAS CHANGED. Somebody may be standing between this host and {name}. Pinned here is {}, shown was {}. \
         Nothing was sent. Only if \"dsync key\" on {name} itself shows the new one, run: dsync key forget {name} && dsync key trust {name} {shown}",
        pinned.fingerprint(),
        shown.fingerprint()
    )]
    Swapped {
        /// Who showed it.
        peer: String,
        /// The name under which another key is pinned.
        name: String,
        /// The key that is pinned.
        pinned: Key,
        /// The key that was shown.
        shown: Key,
    },
    /// The peer's key is pinned, and the pin has expired.
    #[error(
        "the pin of {name}'s key, {}, has expired: if it is still to be trusted, run: dsync key trust {name} {key}",
        key.fingerprint()
    )]
    Expired {
        /// The name under which it is pinned.
        name: String,
        /// The key.
        key: Key,
    },
    /// The key is pinned, and does not serve here.
    #[error("the key of {name}, {}, may not be used here: name it with --from", key.fingerprint())]
    NotFrom {
        /// The name under which it is pinned.
        name: String,
        /// The key.
        key: Key,
    },
    /// The far side does not accept this side's key.
    #[error("{peer} does not accept this host's key: on {peer}, run: dsync key trust {name} {key}")]
    NotTrusted {
        /// Who refused it.
        peer: String,
        /// The name under which it could be pinned there.
        name: String,
        /// This side's key.
        key: Key,
    },
    /// The far side can't be reached over the network.
    #[error(
        "can't reach {peer} ({why}): see that \"dsync receive --listen\" runs there and that no firewall is between"
    )]
    Connect {
        /// Who was to be reached.
        peer: String,
        /// What the system said.
        why: String,
    },
    /// There is no TLS to be had with the other end.
    #[error("{peer} does not talk TLS as \"dsync receive --listen\" does: {why}")]
    Tls {
        /// Who was at the other end.
        peer: String,
        /// What went wrong.
        why: String,
    },
    /// The far side takes no session now.
    #[error("{peer} takes no session: {why}")]
    Busy {
        /// Who refused it.
        peer: String,
        /// Why, and the way out.
        why: String,
    },
    /// The address can't be listened on.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        why: String,
    },
    /// The system refused a file descriptor.
    #[error("can't use standard input and output as a link: {0}")]
    Stdio(String),
}

impl Error {
    /// True if the link was cut in the middle of a conversation, so that trying again later may help.
    pub fn is_cut(&self) -> bool {
        matches!(self, Error::Cut { .. })
    }

    /// True if a key is in the way: one side does not trust the other, and trying again does not help until somebody says
    /// that it may.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::Unknown { .. }
                | Error::Swapped { .. }
                | Error::Expired { .. }
                | Error::NotFrom { .. }
                | Error::NotTrusted { .. }
                | Error::Pinned { .. }
        )
    }
}

/// Where neither the shell nor the command wrote a word, the shell is what to look at first.
fn command_failed(rsh: &str, command: &str, host: &str, status: &str, said: &str) -> String {
    if said.is_empty() {
        return format!(
            "the remote shell \"{rsh}\" ended ({status}) without an answer from dsync on {host}: run \"{rsh} {host} {command}\" \
             by hand to see why, or name another remote shell with --rsh"
        );
    }
    format!("\"{command}\" on {host} failed ({status}): {said}")
}

fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}
