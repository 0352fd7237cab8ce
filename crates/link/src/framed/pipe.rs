//! Links over any pair of byte streams, and over a process's standard input and output.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::framed::stream::{PipeStream, Wake};
use crate::framed::{FramedStream, NEVER, StreamOptions};
use crate::{Error, Link, Result};

impl Link {
    /// An end over two byte streams. A thread reads `reader` until it ends, and no longer than both halves live unless it
    /// is stuck in a read. The peer's hello is awaited by [`Link::ready`] or the first message.
    pub fn pipe(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Link {
        Link::over(FramedStream::open("the far side", reader, writer, StreamOptions::of(NEVER), None))
    }

    /// The end of a process that was started to be the far side: its standard input and output. Later prints to standard
    /// output go to standard error, so that they cannot damage the link. It has no timeout of its own: the near side's applies.
    ///
    /// # Errors
    /// [`Error::Stdio`] if the descriptors cannot be duplicated.
    pub fn stdio() -> Result<Link> {
        let (reader, writer, wake) = take_stdio().map_err(|error| Error::Stdio(error.to_string()))?;
        widen(&reader);
        widen(&writer);
        Ok(Link::over(FramedStream::open(
            "the far side",
            reader,
            writer,
            StreamOptions::of(NEVER),
            Some(wake),
        )))
    }
}

/// Takes the process's standard input and output, and replaces them by harmless ones.
fn take_stdio() -> io::Result<(PipeStream, PipeStream, Arc<Wake>)> {
    let reader = io::stdin().as_fd().try_clone_to_owned()?;
    let writer = io::stdout().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    let wake = Wake::new()?;
    Ok((wake.stream(reader)?, wake.stream(writer)?, Arc::new(wake)))
}

/// Enlarges a pipe to 1 MiB if the system allows it, which triples its throughput. Does nothing to other streams.
pub fn widen(pipe: &impl AsFd) {
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, 1 << 20);
}
