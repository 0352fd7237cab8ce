//! What is held open around the cut of a sync, such as a database that is told to write everything out.

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::SyncError;

/// Is told of the cut: the moment of the source that the replica will be. A mirror tells it of the cuts of its syncs, and of those
/// that end an epoch.
pub trait CutHook: Debug + Send + Sync {
    /// The cut is about to be made.
    ///
    /// # Errors
    /// Its error ends the sync before the cut.
    fn before(&self) -> Result<(), SyncError>;

    /// The cut was made, or failed.
    fn after(&self, made: bool);
}

/// Makes a cut between what its hook is told.
pub(crate) fn around<T>(
    hook: &Option<Arc<dyn CutHook>>,
    cut: impl FnOnce() -> Result<T, SyncError>,
) -> Result<T, SyncError> {
    let Some(hook) = hook else { return cut() };
    hook.before()?;
    let made = cut();
    hook.after(made.is_ok());
    made
}
