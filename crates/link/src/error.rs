//! What can go wrong on a link.

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
    #[error("\"{command}\" on {host} failed ({status}){}", because(.said))]
    Command {
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
    /// The system refused a file descriptor.
    #[error("can't use standard input and output as a link: {0}")]
    Stdio(String),
}

impl Error {
    /// True if the link was cut in the middle of a conversation, so that trying again later may help.
    pub fn is_cut(&self) -> bool {
        matches!(self, Error::Cut { .. })
    }
}

fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}
