//! Batches: parts of an epoch, one after the other, each with the view of its end.
//!
//! They are not durable at the source, where the epoch's record has the same bits: a replica that cannot continue from a batch
//! continues from the epoch, at the cost of a little more data.

use std::sync::Arc;

use delta::Epoch;
use device::Disk;
use extents::Bitmap;
use lineage::Lives;

use crate::SourceError;
use crate::control::{ControlClient, ServedBatch};
use crate::disk::backing::Backing;
use crate::record::state::SourceMetadata;
use crate::views::courtesy::Courtesy;
use crate::views::shared::View;

/// Follows a source that a server writes.
pub struct BatchFollower {
    client: ControlClient,
    disk: Arc<dyn Disk>,
    about: SourceMetadata,
    courtesy: Arc<Courtesy>,
}

/// What was written between two moments, and the source as it was at the second.
pub struct Batch {
    /// The lives that led to its end: a source that went back to an earlier state is told by them.
    pub lives: Lives,
    /// The last epoch before its end; the one that ends with it, if one does.
    pub epoch: Epoch,
    /// Blocks written.
    pub changes: Arc<Bitmap>,
    /// Shows those blocks, and no others.
    pub view: Arc<View>,
    number: u64,
}

impl BatchFollower {
    pub(crate) fn begin(
        client: ControlClient,
        backing: &dyn Backing,
        about: &SourceMetadata,
        courtesy: &Arc<Courtesy>,
    ) -> Result<BatchFollower, SourceError> {
        let direct = client.follow()?;
        // Recent writes are in the page cache; a direct read would wait until they are on disk.
        let disk = if direct { backing.reader()? } else { backing.cached_reader()? };
        Ok(BatchFollower { client, disk, about: about.clone(), courtesy: courtesy.clone() })
    }

    /// Blocks written since the last batch.
    pub fn pending(&self) -> Result<u64, SourceError> {
        self.client.pending()
    }

    /// Ends a batch now, and with it the epoch if `ends`, for a replica that was last at the epoch `since`, and has all batches since then. `None` if
    /// nothing was written and no epoch is to end.
    ///
    /// # Errors
    /// `Lost` if the writes since that epoch are not known any more, whoever has followed them. After any error the batch's blocks may be gone: follow
    /// again.
    pub fn next(&self, since: Option<Epoch>, ends: bool) -> Result<Option<Batch>, SourceError> {
        let Some(served) = self.client.batch(since, ends)? else { return Ok(None) };
        let ServedBatch { epoch, at, size, view: number, saved, changes: encoded } = served;
        if self.disk.len() < size {
            return Err(SourceError::Moved(self.about.path.clone()));
        }
        let changes = Bitmap::try_new(size.div_ceil(u64::from(self.about.block_size)))
            .map_err(SourceError::memory(&self.about.path))?;
        let wrong = |_| SourceError::Server("the server reported changes beyond the end of the disk".into());
        changes.decode_into(&encoded).map_err(wrong)?;
        let view = View::new(epoch, self.disk.clone(), size, Some(Arc::new(saved)), self.client.alive())
            .beside(&self.courtesy);
        let lives = self.about.lives.clone().reaching(at.n).upto(at.n);
        if lives.tip() != Some(&at) {
            return Err(SourceError::Server("it went on in a life that has ended: start it again".into()));
        }
        Ok(Some(Batch { lives, epoch, changes: Arc::new(changes), view: Arc::new(view), number }))
    }

    /// Returns the blocks of a batch: they are part of the next one.
    ///
    /// # Errors
    /// If the server went away: follow again.
    pub fn give_back(&self, changes: &Bitmap) -> Result<(), SourceError> {
        self.client.give_back(changes)
    }

    /// Releases a batch that has been read: nothing more is saved for it.
    pub fn done(&self, batch: &Batch) -> Result<(), SourceError> {
        self.client.drop_batch(batch.number)
    }
}
