//! What was written to a source before it is given up: a delta in a file of its own.

use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Write};
use std::path::Path;

use delta::{Epoch, Reader};
use device::NewFile;
use source::Handle;
use uuid::Uuid;

use crate::error::SyncError;
use crate::report::Progress;
use crate::transfer::extract::extract;

/// Refuses to save in a folder that is missing: where its file system is not mounted, another would have what is saved. That of a group is made.
#[allow(clippy::disallowed_methods, reason = "named by the user, wherever it is")]
pub(crate) fn look_for_folder_of(file: &Path, is_groups: bool) -> Result<(), SyncError> {
    match file.parent().filter(|folder| !folder.exists()) {
        None => Ok(()),
        Some(folder) if is_groups => std::fs::create_dir(folder)
            .map_err(SyncError::io(format!("make the folder {}", folder.display()))),
        Some(folder) => Err(SyncError::Refused(format!(
            "folder {}, in which --save-there is to save, does not exist: mount its file system, or create it",
            folder.display()
        ))),
    }
}

/// Writes what changed since an epoch to a new file, durably. A file that has all of it, of an earlier try, is as good.
pub(crate) fn save(
    handle: &Handle,
    since: &Epoch,
    file: &Path,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let fail = |what: &str| SyncError::io(format!("{what} {}", file.display()));
    let exists = || {
        SyncError::Refused(format!(
            "{} exists, and is not a delta of all that was written to {} since epoch {}: give --save-there the name of a new file",
            file.display(),
            handle.about().path.display(),
            since.number
        ))
    };
    let mut new = match NewFile::begin(file) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return if has_all(handle, since, file)? { Ok(()) } else { Err(exists()) };
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            return Err(SyncError::Refused(format!(
                "another process is saving in {0} ({0}.partial is locked): give --save-there the name of another file",
                file.display()
            )));
        }
        begun => begun.map_err(fail("create"))?,
    };
    let mut out = BufWriter::with_capacity(1 << 20, new.file());
    let written = extract(handle, Some(&since.number.to_string()), None, &mut out, progress);
    written.and_then(|_| out.flush().map_err(fail("write"))).map_err(|error| match error {
        SyncError::Delta(error) => fail("save what was written since in")(std::io::Error::other(error)),
        other => other,
    })?;
    drop(out);
    new.name(file).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(),
        _ => fail("create")(error),
    })
}

/// True if a file is a whole delta of this source from that epoch on, to one after which nothing was written.
fn has_all(handle: &Handle, since: &Epoch, file: &Path) -> Result<bool, SyncError> {
    let Some(to) = whole_delta(file, handle.about().uuid, since)? else { return Ok(false) };
    Ok(handle.written_after(&to).is_ok_and(|(blocks, later)| blocks.is_clean() && later.is_empty()))
}

/// The epoch to which a file leads, if it is a whole delta of this source from that epoch on.
#[allow(clippy::disallowed_methods, reason = "named by the user, wherever it is")]
pub(crate) fn whole_delta(file: &Path, source: Uuid, since: &Epoch) -> Result<Option<Epoch>, SyncError> {
    let input = File::open(file).map_err(SyncError::io(format!("open {}", file.display())))?;
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, input));
    let Ok(header) = reader.header().cloned() else { return Ok(None) };
    let to = header.to().copied().filter(|to| to.number >= since.number);
    if header.source != source || header.chain.first() != Some(since) || header.partial {
        return Ok(None);
    }
    loop {
        match reader.next() {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(to.filter(|_| reader.expect_end().is_ok())),
            Err(_) => return Ok(None),
        }
    }
}
