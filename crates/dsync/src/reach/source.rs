//! The source that a command means, opened and closed.

use anyhow::Result;
use source::{Handle, StateDir};

use crate::args;
use crate::failure::Failure;
use crate::terms::machine_name;

/// The block size that the arguments ask for.
pub(crate) fn block_size(size: Option<u64>) -> Result<Option<u32>> {
    let Some(size) = size else { return Ok(None) };
    match u32::try_from(size) {
        Ok(size) if size.is_power_of_two() && (4096..=1 << 20).contains(&size) => Ok(Some(size)),
        _ => Err(Failure::usage(format!(
            "invalid --block-size {}: use a power of two from 4K to 1M",
            device::exact_size(size)
        ))
        .into()),
    }
}

/// The source that is meant, which must be known.
pub(crate) fn known(what: &str, state: &StateDir) -> Result<(std::path::PathBuf, source::SourceMetadata)> {
    machine_name::refuse_name(what)?;
    state.source(what)?.ok_or_else(|| {
        let why = "is not a known source: \"dsync status\" lists them";
        source::SourceError::Unknown(format!("{what} {why}")).into()
    })
}

/// Attaches to what is to be read.
pub(crate) fn attach(state: &StateDir, what: &str, open: &args::SourceArgs) -> Result<Handle> {
    machine_name::refuse_name(what)?;
    Ok(sync::attach(state, what, &source_options(open)?)?)
}

/// Closes a source after what was done with it, also if that failed: then its error is the one to report.
pub(crate) fn close<T, E: Into<anyhow::Error>>(handle: Handle, done: Result<T, E>) -> Result<T> {
    let closed = handle.close();
    let done = done.map_err(Into::into)?;
    closed?;
    Ok(done)
}

/// How a source is opened where nothing serves it.
pub(crate) fn source_options(args: &args::SourceArgs) -> Result<source::SourceOptions> {
    Ok(source::SourceOptions {
        block_size: block_size(args.block_size)?,
        device_trust: source::DeviceTrust::of(args.trust_device),
        allow_shrink: args.allow_shrink,
        ..source::SourceOptions::default()
    })
}
