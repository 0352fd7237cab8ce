//! What was written to a source since its last epoch, as far as that is known without holding it.

use std::path::Path;

use extents::Bitmap;

use crate::SourceError;
use crate::control::Client;
use crate::history::History;
use crate::live::OTHER_HISTORY;
use crate::state::About;

/// Adds to `into`, in blocks of the source's block size, what was written since the last epoch of its history. Ends nothing and
/// takes no lock.
///
/// Returns a reason if that is not known: then `into` may be incomplete.
///
/// # Errors
/// If the source's server or its tracker fails.
pub fn written_since(
    place: &Path,
    about: &About,
    history: &History,
    into: &Bitmap,
) -> Result<Option<String>, SourceError> {
    if let Some(client) = Client::connect(place)? {
        let lost = client.status()?.lost;
        if lost.is_none() {
            client.dirty(into)?;
        }
        return Ok(lost);
    }
    let Some(tracker) = trackers::find(&about.path)? else {
        return Ok(Some("writes to the source are not recorded at present".into()));
    };
    if let Some(why) = tracker.lost()? {
        return Ok(Some(why));
    }
    if tracker.released()?.is_none_or(|id| !history.knows(id)) || tracker.block_size() != about.block_size {
        return Ok(Some(OTHER_HISTORY.into()));
    }
    for run in tracker.dirty()?.runs() {
        into.set(run.start.min(into.blocks())..run.end.min(into.blocks()));
    }
    Ok(None)
}
