//! Opening what is to be read.

use std::path::PathBuf;

use source::{Handle, SourceOptions, StateDir};

use crate::error::SyncError;
use crate::roles::refuse_demoted;

/// Attaches to a source. A replica is read only when it holds what its source was: an interrupted step is completed first.
pub fn attach(state: &StateDir, what: &str, options: &SourceOptions) -> Result<Handle, SyncError> {
    let path = state.source(what)?.map_or_else(|| PathBuf::from(what), |(_, about)| about.path);
    if path.exists() {
        refuse_demoted(&path, state)?;
        let options = replica::Options { devices: state.replicas_folder(), ..Default::default() };
        replica::settle(&path, &options)?;
    }
    Ok(Handle::attach(state, what, options)?)
}

/// Closes a source after what was done with it, also if that failed: then its error is the one to report.
pub(crate) fn close<T>(handle: Handle, done: Result<T, SyncError>) -> Result<T, SyncError> {
    let closed = handle.close();
    let done = done?;
    closed?;
    Ok(done)
}
