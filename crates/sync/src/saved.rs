//! What was written to a source before it is given up: a delta in a file of its own.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use delta::{Epoch, Reader};
use source::Handle;

use crate::error::SyncError;
use crate::extract::extract;
use crate::report::Progress;

/// Writes what changed since an epoch to a new file, durably. A file that has all of it, of an earlier try, is as good.
pub(crate) fn save(
    handle: &Handle,
    since: &Epoch,
    file: &Path,
    progress: Progress<'_>,
) -> Result<(), SyncError> {
    let fail = |what: &str| SyncError::io(format!("{what} {}", file.display()));
    if file.exists() {
        if has_all(handle, since, file)? {
            return Ok(());
        }
        return Err(SyncError::Refused(format!(
            "{} exists, and is not a delta of all that was written to {} since epoch {}: give --save the name of a new file",
            file.display(),
            handle.about().path.display(),
            since.number
        )));
    }
    let mut name = file.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(fail("create"))?);
    let written = extract(handle, Some(&since.number.to_string()), None, &mut out, progress).and_then(|_| {
        out.flush().map_err(fail("write"))?;
        out.get_ref().sync_all().map_err(fail("sync"))
    });
    if let Err(error) = written {
        let _ = std::fs::remove_file(&partial);
        return Err(match error {
            SyncError::Delta(error) => fail("save what was written since in")(std::io::Error::other(error)),
            other => other,
        });
    }
    std::fs::rename(&partial, file).map_err(fail("create"))?;
    let folder = std::path::absolute(file).map_err(fail("find"))?;
    let folder = folder.parent().unwrap_or(Path::new("/"));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail("sync the folder of"))
}

/// True if a file is a whole delta of this source from that epoch on, to one after which nothing was written.
fn has_all(handle: &Handle, since: &Epoch, file: &Path) -> Result<bool, SyncError> {
    let input = File::open(file).map_err(SyncError::io(format!("open {}", file.display())))?;
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, input));
    let Ok(header) = reader.header().cloned() else { return Ok(false) };
    let to = header.to().copied().filter(|to| to.number > since.number);
    let (true, Some(to)) =
        (header.source == handle.about().uuid && header.chain.first() == Some(since) && !header.partial, to)
    else {
        return Ok(false);
    };
    if !handle.written_after(&to).is_ok_and(|(blocks, later)| blocks.is_clean() && later.is_empty()) {
        return Ok(false);
    }
    loop {
        match reader.next() {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(reader.expect_end().is_ok()),
            Err(_) => return Ok(false),
        }
    }
}
