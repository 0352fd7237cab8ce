//! The process of a QEMU.

use std::path::{Path, PathBuf};

/// The command line of a process, and its folder.
///
/// # Errors
/// If they cannot be read.
pub(super) fn command_line(pid: u32) -> std::io::Result<(Vec<String>, PathBuf)> {
    let process = Path::new("/proc").join(pid.to_string());
    let words = std::fs::read(process.join("cmdline"))?;
    let words = words.strip_suffix(&[0]).unwrap_or(&words).split(|byte| *byte == 0);
    let words = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    Ok((words, std::fs::read_link(process.join("cwd"))?))
}

/// Names a process, of all that this host will ever have: by its number, and when it was started since the host was.
///
/// # Errors
/// If that cannot be read.
pub(super) fn process_id(pid: u32) -> std::io::Result<String> {
    let said = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind its name, which may have any characters in it; the twentieth number from there.
    let behind = said.rsplit_once(") ").map(|(_, behind)| behind);
    let began = behind.and_then(|behind| behind.split(' ').nth(19));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    began
        .map(|began| format!("{pid}-{began}-{}", boot.trim()))
        .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_once() {
        let own = process_id(std::process::id()).unwrap();
        assert_eq!(own, process_id(std::process::id()).unwrap());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert_ne!(process_id(child.id()).unwrap(), own);
        let (words, _) = command_line(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(words, ["sleep", "600"]);
    }
}
