//! Opening what is to be read.

use std::path::PathBuf;

use source::{About, GroupHandle, Handle, SourceOptions, StateDir};

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

/// Attaches to the members of a group.
pub fn attach_group(state: &StateDir, name: &str, options: &SourceOptions) -> Result<GroupHandle, SyncError> {
    source::check_name(name)?;
    let known = source::group_members(state, name)?;
    if known.is_empty() {
        return Err(SyncError::Refused(format!(
            "there is no group {name}: make it with \"dsync serve --group {name} IMAGE...\""
        )));
    }
    let mut members = Vec::new();
    // A promotion on the host of the old sources leaves two of each disk, of which the later ones have gone on.
    let later = |about: &About| known.iter().any(|(_, o)| o.uuid == about.uuid && o.term > about.term);
    for (_, about) in known.iter().filter(|(_, about)| !later(about)) {
        members.push(attach(state, &about.path.to_string_lossy(), options)?);
    }
    Ok(GroupHandle::new(name, members)?)
}

/// Closes a source after what was done with it, also if that failed: then its error is the one to report.
pub(crate) fn close<T>(handle: Handle, done: Result<T, SyncError>) -> Result<T, SyncError> {
    let closed = handle.close();
    let done = done?;
    closed?;
    Ok(done)
}
