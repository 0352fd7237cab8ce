//! Unix sockets whose files have the mode that they are to have from the beginning.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::umask;

/// Connections that may wait to be accepted; the system bounds it.
const BACKLOG: i32 = 4096;

/// Listens on a path, where nothing is yet, with a socket file of this mode, whatever the umask: also while it is made, nobody else may
/// connect. A mode for others than the owner is for a process without other threads, which would make their files with no umask.
///
/// # Errors
/// If the path is too long, is taken, or cannot be written.
pub fn listen_at(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mode = Mode::from_raw_mode(mode);
    // The file gets the mode of the socket, without what the umask takes.
    fchmod(&socket, mode)?;
    let address = SocketAddrUnix::new(path)?;
    let usual = (!Mode::RWXU).intersects(mode).then(|| umask(Mode::empty()));
    let bound = bind(&socket, &address);
    usual.map(umask);
    bound?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_socket_has_its_mode_from_the_beginning() {
        let folder = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o660, 0o666] {
            let path = folder.path().join(format!("{mode:o}"));
            let _socket = listen_at(&path, mode).unwrap();
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, mode);
            assert!(listen_at(&path, mode).is_err(), "it is taken");
        }
    }
}
