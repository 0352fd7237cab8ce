//! What a tracker in the kernel has recorded of a disk, of which another program shows a moment.
//!
//! ```text
//!     begin: the record is ended ──▶ the moment ──▶ flush ──▶ what was written ──▶ the epoch is durable ──▶ release
//!              a                        m                       z
//! ```
//!
//! The list of a moment is what was written from the last epoch up to *z*, which is more than up to *m*; and the record that the next list is
//! made of begins at *a*, which is before *m*. So what is written between *a* and *z* is in both lists, and nothing is in none. The flush is for
//! what was written before *m* and is still in the page cache: the tracker sees it on its way to the disk only, and it must be in this list, as
//! the moment has it. As it is durable then, a power cut takes nothing away that a replica has and no record.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::Epoch;
use extents::Bitmap;
use trackers::{Tracker, TrackerLock};

use crate::live::{OTHER_HISTORY, follows};
use crate::record::history::History;
use crate::{Gap, SourceError};

/// What a tracker has recorded of a disk. It is held as long as this, so that nobody else ends a part of it.
#[derive(Clone)]
pub struct Recorded(Arc<Held>);

struct Held {
    path: PathBuf,
    tracker: Box<dyn Tracker>,
    /// What was written before the moment.
    ended: Bitmap,
    _hold: TrackerLock,
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorded({})", self.0.path.display())
    }
}

impl Recorded {
    /// Ends what was recorded so far of the device at `path`, before a moment of it begins. `None` if it is not tracked.
    ///
    /// # Errors
    /// `Busy` if another program uses the record; and if the tracker fails.
    pub fn begin(path: &Path) -> Result<Option<Recorded>, SourceError> {
        let Some(tracker) = trackers::find(path)? else { return Ok(None) };
        let hold = TrackerLock::take(path)?;
        let _hold = hold.map_err(|holder| SourceError::Busy { path: path.to_path_buf(), holder })?;
        let ended = tracker.checkpoint()?;
        Ok(Some(Recorded(Arc::new(Held { path: path.to_path_buf(), tracker, ended, _hold }))))
    }

    /// `bpf` or `dm`.
    pub fn kind(&self) -> &'static str {
        self.0.tracker.kind()
    }

    /// Bytes that were written since the last epoch of a history up to now, after the moment began; or why that is not known. `size` is that
    /// of the moment, `was` that of the epoch.
    ///
    /// # Errors
    /// If the disk cannot be flushed, or its tracker fails.
    pub(crate) fn since(
        &self,
        history: &History,
        (was, size): (u64, u64),
    ) -> Result<Result<Vec<Range<u64>>, Gap>, SourceError> {
        let Held { path, tracker, ended, .. } = &*self.0;
        #[allow(clippy::disallowed_methods, reason = "the disk, which its user names")]
        let flushed = std::fs::File::open(path).and_then(|disk| disk.sync_all());
        flushed.map_err(SourceError::state("flush", path))?;
        let written = tracker.dirty()?;
        // Asked last: what was lost up to then.
        let lost = match tracker.released()? {
            _ if tracker.size() != size || was != size => Some(Gap::Resized),
            None => Some("the disk was not tracked before".into()),
            // The record has all since that epoch, and so since any later one.
            Some(id) if follows(&**tracker, history, id)? => tracker.lost()?.map(Gap::from),
            Some(_) => Some(OTHER_HISTORY.into()),
        };
        if let Some(why) = lost {
            return Ok(Err(why));
        }
        written.union_with(ended);
        let block = u64::from(tracker.block_size());
        let bytes = |run: Range<u64>| run.start * block..(run.end * block).min(size);
        Ok(Ok(written.runs().map(bytes).collect()))
    }

    /// Drops what was recorded before the moment: it is in the history, as this epoch. What fails only widens the next list.
    pub(crate) fn release(&self, epoch: Epoch) {
        let _ = self.0.tracker.release(epoch.id);
    }
}
