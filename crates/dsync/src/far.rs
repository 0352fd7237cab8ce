//! `dsync receive`: the far end of a sync.

use anyhow::Result;
use link::Link;
use source::StateDir;

/// Talks over standard input and output. Errors travel over the link; who started this end reads them there.
pub fn receive(state: &StateDir) -> Result<()> {
    let link = Link::stdio()?;
    sync::receive(link, state).map_err(|error| {
        // The near side has shown it: nothing more is said here.
        anyhow::Error::from(error)
    })
}
