//! Small files of JSON in a source's folder, each replaced as a whole.

use device::Folder;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::SourceError;

/// Reads a file; `None` if it does not exist.
pub(crate) fn read_json<T: DeserializeOwned>(
    folder: &dyn Folder,
    name: &str,
) -> Result<Option<T>, SourceError> {
    let path = folder.path().join(name);
    let file = match folder.open(name, false) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(SourceError::state("open", &path)(e)),
    };
    let len = file.len().map_err(SourceError::state("read", &path))?;
    if len > 16 << 20 {
        return Err(SourceError::Damaged { path, why: "it is too large".into() });
    }
    let mut bytes = vec![0u8; len as usize];
    file.read_at(0, &mut bytes).map_err(SourceError::state("read", &path))?;
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(e) => Err(SourceError::Damaged { path, why: e.to_string() }),
    }
}

/// Replaces a file; durable on return.
pub(crate) fn write_json<T: Serialize>(
    folder: &dyn Folder,
    name: &str,
    value: &T,
) -> Result<(), SourceError> {
    let path = folder.path().join(name);
    let bytes = serde_json::to_vec_pretty(value).map_err(|e| SourceError::state("write", &path)(e.into()))?;
    device::replace(folder, name, &bytes).map_err(SourceError::state("write", &path))
}
