//! How a replica is opened.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use device::Format;

use crate::error::Result;
use crate::state::intent::ReplicaMembership;
use crate::state::keep::Keep;

/// How to open a replica.
#[derive(Debug, Clone, Default)]
pub struct ReplicaOptions {
    /// Where a reader keeps what it needs, if the file system of the replica's state is mounted read-only.
    pub scratch: Option<PathBuf>,
    /// The folder of the replica's state. Without it: `.NAME.dsync/` beside a file, one within `devices` for a device.
    pub folder: Option<PathBuf>,
    /// Where the folders of replicas on devices are, usually in the state directory; each is named after its disk.
    pub devices: PathBuf,
    /// Adopt what is there, replica or not: a compare will prove it.
    pub adopt: bool,
    /// Let a seed replace what is there.
    pub replace: bool,
    /// Let a seed begin another replica where the file of one is gone.
    pub create: bool,
    /// Let it pass that others changed the destination, which [`crate::Status::changed`] then says: only a compare fits it.
    pub doubt: bool,
    /// How the disk is to lie in its file. `None`: as it does, and for a new one as its name says.
    pub format: Option<Format>,
    /// The source is a file that is copied as it is, whatever is in it: the name of a new file says the same of its copy.
    pub container: bool,
    /// What of its past is to be kept from the next commit on. `None`: what was kept before; nothing of a new replica.
    pub keep: Option<Keep>,
    /// The group with which deltas are committed.
    pub group: Option<ReplicaMembership>,
    /// The group of the source that sends: a replica of another one leaves that. Of no meaning where the term is not known.
    pub source_group: Option<String>,
    /// The source's term, to be remembered with what it sends; 0 where it is not known.
    pub term: u64,
    /// The time at the source. `None` where it is not known.
    pub source_time: Option<SourceTime>,
    /// Asked before the first write.
    pub herald: Option<Herald>,
}

/// A time that the source's host said.
#[derive(Debug, Clone, Copy)]
pub struct SourceTime {
    said: u64,
    heard: Instant,
}

impl SourceTime {
    /// The time of so many seconds since 1970, heard just now.
    pub fn said(said: u64) -> SourceTime {
        SourceTime { said, heard: Instant::now() }
    }

    /// The time there by now.
    pub(crate) fn now(self) -> u64 {
        self.said.saturating_add(self.heard.elapsed().as_secs())
    }
}

/// Called before a replica first writes to its disk; if it fails, nothing is written. It lets the host mark other uses of the disk, whose
/// times, if it has any, do not show who wrote.
#[derive(Clone)]
pub struct Herald(Arc<Ask>);

type Ask = dyn Fn(&Path, bool) -> Result<()> + Send + Sync;

impl Herald {
    /// A herald that calls `ask` with the path of the disk, and whether what it will hold does not follow what it held.
    pub fn new(ask: impl Fn(&Path, bool) -> Result<()> + Send + Sync + 'static) -> Herald {
        Herald(Arc::new(ask))
    }

    pub(crate) fn ask(&self, disk: &Path, goes_back: bool) -> Result<()> {
        (self.0)(disk, goes_back)
    }
}

impl fmt::Debug for Herald {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Herald")
    }
}
