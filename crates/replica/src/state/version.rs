//! The version that each file of a replica begins with.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{ReplicaError, Result};

/// Reads JSON of this version.
///
/// # Errors
/// Refused if it has another one: that need not parse, and what would be made of it is not known.
pub(crate) fn of_version<T: DeserializeOwned>(
    bytes: &[u8],
    version: u32,
    path: &Path,
) -> Result<serde_json::Result<T>> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    match serde_json::from_slice::<Version>(bytes) {
        Ok(has) if has.version != version => Err(ReplicaError::Refused(format!(
            "{} has version {}, and this dsync knows version {version}: use the dsync that wrote it, or a newer one",
            path.display(),
            has.version
        ))),
        _ => Ok(serde_json::from_slice(bytes)),
    }
}
