//! A source behind an NBD server. Nobody records what is written there, and nothing but the server's word tells that nobody writes: an
//! export that it offers read-only is one moment (a snapshot, a fleecing node of QEMU, `NAME@view` of `dsync serve`), and no other is read.

use std::io;
use std::path::Path;
use std::sync::Arc;

use device::{Boot, Disk, DiskKind, ExportUri, Identity};
use extents::Extents;
use nbd::NbdDisk;
use twox_hash::XxHash3_64;

use crate::SourceError;
use crate::disk::backing::Backing;

/// An export, held by one connection: many servers take no second one.
#[derive(Clone)]
pub(crate) struct ExportBacking {
    identity: Identity,
    pub(crate) disk: Arc<NbdDisk>,
}

impl ExportBacking {
    /// Connects to the export that stands in the place of a path; `None` if that is a path. `copies` where it is no more than read; `bitmap` is the
    /// context that will be asked for what changed.
    ///
    /// # Errors
    /// If its server cannot be reached; refused if it is more than copied, or is no moment.
    pub(crate) fn open(
        path: &Path,
        copies: bool,
        bitmap: Option<&str>,
    ) -> Result<Option<ExportBacking>, SourceError> {
        let Some(uri) = ExportUri::of(path) else { return Ok(None) };
        let uri = uri.map_err(|error| SourceError::Refused(error.to_string()))?;
        if !copies {
            return Err(unrecorded(path));
        }
        let failed = |error| {
            let text =
                format!("cannot reach source {uri}: {error}: start its NBD server, or give another URI");
            SourceError::Server(text)
        };
        let disk = NbdDisk::open(&uri, bitmap).map_err(failed)?;
        if !disk.is_read_only() {
            return Err(SourceError::Refused(format!(
                "{uri} can be written to while it is copied, so the copy would be of no one moment: have its NBD server export it read-only \
                 (\"qemu-nbd -r\", \"nbdkit -r\"), or copy a snapshot (\"NAME@view\" of \"dsync serve\")"
            )));
        }
        let path = uri.to_string();
        let identity = Identity {
            kind: DiskKind::Export,
            dev: 0,
            // It is another disk only by another name.
            ino: XxHash3_64::oneshot(path.as_bytes()),
            path: path.into(),
            diskseq: None,
            size: disk.len(),
            mtime_ns: 0,
            ctime_ns: 0,
            born_ns: None,
            part: None,
        };
        Ok(Some(ExportBacking { identity, disk: Arc::new(disk) }))
    }
}

/// The refusal of whatever needs a record of the writes to an export.
pub fn unrecorded(path: &Path) -> SourceError {
    SourceError::Refused(format!(
        "{} is behind an NBD server, where nobody records writes: \"dsync sync\" and \"dsync verify\" copy and compare it, but it cannot be \
         served, tracked or promoted, or be the source of a mirror",
        path.display()
    ))
}

impl Backing for ExportBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(self.identity.clone())
    }
    fn boot(&self) -> Boot {
        Boot::current()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(self.disk.clone())
    }
    fn bitmap(&self, context: &str) -> Result<Extents, SourceError> {
        let uri = self.identity.path.display();
        let mut changed = Extents::new();
        self.disk.marked(context, |range| changed.insert(range)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SourceError::Refused(format!(
                "{uri} does not offer {context}, so what changed is not known: have the server export that bitmap (a full backup of libvirt has none, \
                 an incremental one has), or omit --changes and --since, and the sync compares all of it"
            )),
            _ => SourceError::Server(format!(
                "cannot read {context} of {uri}: {error}: repeat the command, or omit --changes and --since, and the sync compares all of it"
            )),
        })?;
        Ok(changed)
    }
}
