//! Unix sockets that a server listens on, as files that are removed with it.

use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::failure::Failure;

/// A Unix socket's file, removed with the server.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The mode of a socket that is for its owner alone.
pub(crate) const OWN: u32 = 0o600;

/// Listens on a path, where a server that was killed may have left its socket, for those whom the mode of the file lets in.
pub(crate) fn listen(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile)> {
    if UnixStream::connect(path).is_ok() {
        return Err(
            Failure::refused(format!("another server is already listening on {}", path.display())).into()
        );
    }
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {
            std::fs::remove_file(path)
                .with_context(|| format!("cannot remove the stale socket {}", path.display()))?;
        }
        Ok(_) => bail!("cannot listen on {}: it exists and is not a socket", path.display()),
        Err(_) => {}
    }
    let listener = device::listen_at(path, mode).with_context(|| {
        match path.parent().is_none_or(|folder| folder.as_os_str().is_empty() || folder.is_dir()) {
            true => format!("cannot listen on {}", path.display()),
            false => format!("cannot listen on {}: create its folder first", path.display()),
        }
    })?;
    Ok((listener, SocketFile(path.to_path_buf())))
}
