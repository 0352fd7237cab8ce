//! What a machine needs besides its disks, as files of the state directory: they are sources like any other, and committed with the disks.

use std::fs::Permissions;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use source::StateDir;

use super::definition::Definition;
use super::domain::Domain;
use super::hypervisor::Hypervisor;
use crate::failure::Failure;

/// The definition's file has a multiple of these bytes, so that it seldom changes its size.
const STEP: usize = 64 << 10;
/// There are passwords in it.
const MODE: u32 = 0o600;

/// The definition of a machine, its NVRAM and the state of its TPM, as of one moment.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Carried {
    definition: Definition,
    nvram: Option<Vec<u8>>,
    tpm: Option<Vec<u8>>,
}

impl Carried {
    /// Reads them as they are now.
    ///
    /// # Errors
    /// If libvirt does not tell, or a file cannot be read.
    pub(super) fn read(host: &dyn Hypervisor, domain: &Domain) -> Result<Carried, Failure> {
        let definition = host.definition()?;
        let read = |path: &Option<PathBuf>, what: &str| match path
            .as_ref()
            .map(|path| (path, std::fs::read(path)))
        {
            None => Ok(None),
            // libvirt makes it at the first start.
            Some((_, Err(error))) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Some((path, read)) => read.map(Some).map_err(|error| {
                Failure::failed(format!("cannot read {}, {what} of {}: {error}", path.display(), domain.name))
            }),
        };
        let nvram = read(&domain.nvram, "the NVRAM")?;
        let tpm = read(&domain.tpm, "the state of the TPM")?;
        Ok(Carried { definition, nvram, tpm })
    }

    /// Writes them to their files, whose paths it returns. The definition says of each disk, by its target, which replica is that.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn write(
        &self,
        state: &StateDir,
        name: &str,
        disks: &[(String, String)],
    ) -> Result<Vec<PathBuf>, Failure> {
        let folder = state.machines_folder();
        let failed = |path: &Path| {
            let text = format!("cannot write {}", path.display());
            move |error: io::Error| Failure::failed(format!("{text}: {error}"))
        };
        device::Dir::open(&folder).map_err(failed(&folder))?;
        let [xml, json, of_nvram, of_tpm] = files(state, name);
        let path = if let Definition::Libvirt(_) = self.definition { xml } else { json };
        let was = path.metadata().map_or(0, |file| file.len() as usize);
        put(&path, &padded(&self.definition.text(disks), was)).map_err(failed(&path))?;
        let mut paths = vec![path];
        for (content, file) in [(&self.nvram, of_nvram), (&self.tpm, of_tpm)] {
            let Some(content) = content else { continue };
            put(&file, content).map_err(failed(&file))?;
            paths.push(file);
        }
        Ok(paths)
    }
}

/// The files of the machine with this plain name.
pub(super) fn files(state: &StateDir, name: &str) -> [PathBuf; 4] {
    ["xml", "json", "nvram", "tpm"].map(|end| state.machines_folder().join(format!("{name}.{end}")))
}

/// Removes a file, if it is there.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The definition with newlines behind it, which XML and JSON ignore there: a file that shrinks is refused as a source.
fn padded(definition: &str, least: usize) -> Vec<u8> {
    let mut bytes = definition.trim_end().as_bytes().to_vec();
    let len = (bytes.len() + 1).max(least).next_multiple_of(STEP);
    bytes.resize(len, b'\n');
    bytes
}

/// Makes this the content of a file that its owner alone may read, and leaves one alone that has it already. What is under that name may be another
/// user's: nothing is followed, or written to that is.
pub(super) fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidFilename)?;
    let mut file = device::Dir::existing(folder)?.file(name, OFlags::RDWR | OFlags::CREATE, MODE)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    let mut is = Vec::new();
    file.read_to_end(&mut is)?;
    if is == content {
        return Ok(());
    }
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
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn what_has_passwords_is_open_to_nobody_else_and_goes_through_no_link() {
        let temp = tempfile::tempdir().unwrap();
        let [open, target, link] = ["open", "target", "link"].map(|name| temp.path().join(name));
        std::fs::write(&open, "was").unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o644)).unwrap();
        put(&open, b"<domain/>").unwrap();
        assert_eq!(open.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(put(&link, b"<domain/>").unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(std::fs::read(&target).unwrap(), b"kept");
    }
}
