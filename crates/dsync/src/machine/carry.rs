//! What a machine needs besides its disks, as files of the state directory: they are sources like any other, and committed with the disks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use source::StateDir;

use super::domain::Domain;
use super::virsh::Virsh;
use crate::failure::Failure;

/// The definition's file has a multiple of these bytes, so that it seldom changes its size.
const STEP: usize = 64 << 10;

/// The definition and the NVRAM of a machine, as of one moment.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Carried {
    definition: String,
    nvram: Option<Vec<u8>>,
}

impl Carried {
    /// Reads them as they are now.
    ///
    /// # Errors
    /// If libvirt does not tell, or the NVRAM cannot be read.
    pub(super) fn read(virsh: &Virsh, domain: &Domain) -> Result<Carried, Failure> {
        let definition = virsh.definition()?;
        let nvram = match domain.nvram.as_ref().map(|path| (path, std::fs::read(path))) {
            None => None,
            // libvirt makes it at the first start.
            Some((_, Err(error))) if error.kind() == io::ErrorKind::NotFound => None,
            Some((path, read)) => Some(read.map_err(|error| {
                Failure::failed(format!(
                    "cannot read {}, the NVRAM of {}: {error}",
                    path.display(),
                    domain.name
                ))
            })?),
        };
        Ok(Carried { definition, nvram })
    }

    /// Writes them to their files, whose paths it returns.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn write(&self, state: &StateDir, name: &str) -> Result<Vec<PathBuf>, Failure> {
        let folder = state.machines_folder();
        let failed = |path: &Path| {
            let text = format!("cannot write {}", path.display());
            move |error: io::Error| Failure::failed(format!("{text}: {error}"))
        };
        device::Dir::open(&folder).map_err(failed(&folder))?;
        let path = folder.join(format!("{name}.xml"));
        let was = path.metadata().map_or(0, |file| file.len() as usize);
        put(&path, &padded(&self.definition, was)).map_err(failed(&path))?;
        let mut paths = vec![path];
        if let Some(nvram) = &self.nvram {
            let path = folder.join(format!("{name}.nvram"));
            put(&path, nvram).map_err(failed(&path))?;
            paths.push(path);
        }
        Ok(paths)
    }
}

/// The definition with newlines behind it, which XML ignores there: a file that shrinks is refused as a source.
fn padded(definition: &str, least: usize) -> Vec<u8> {
    let mut bytes = definition.trim_end().as_bytes().to_vec();
    let len = (bytes.len() + 1).max(least).next_multiple_of(STEP);
    bytes.resize(len, b'\n');
    bytes
}

/// Makes this the content of a file that its owner alone may read, and leaves one alone that has it already.
pub(super) fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|is| is == content) {
        return Ok(());
    }
    let file: File = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.write_all_at(content, 0)?;
    file.set_len(content.len() as u64)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_never_shrinks_and_is_read_as_before() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a.xml");
        let long = format!("<domain><name>{}</name></domain>\n", "x".repeat(STEP));
        for (text, bytes) in [("<domain/>\n", STEP), (long.as_str(), 2 * STEP), ("<domain/>", 2 * STEP)] {
            let was = path.metadata().map_or(0, |file| file.len() as usize);
            put(&path, &padded(text, was)).unwrap();
            let read = std::fs::read_to_string(&path).unwrap();
            assert_eq!(read.len(), bytes);
            assert_eq!(read.trim_end(), text.trim_end());
            assert!(roxmltree::Document::parse(&read).is_ok());
        }
        let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
    }
}
