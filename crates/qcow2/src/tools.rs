//! `qemu-img`, on a file that is open.

use std::fs::File;
use std::io;
use std::process::{Command, Stdio};

/// Moves what a child was given as standard input and output to the descriptors 3 and 4, in the words of a shell.
pub(crate) const DESCRIPTORS: &str = "3<&0 0</dev/null 4<&1 1>/dev/null";

/// The place of the image for QEMU: what is open, whatever its name leads to by now.
pub(crate) fn path_of_image(prefix: &str) -> String {
    format!("{prefix}driver=file,{prefix}filename={IMAGE}")
}

const IMAGE: &str = "/proc/self/fd/4";

/// The error where a program is not installed.
pub(crate) fn missing(programs: &[&str]) -> io::Result<()> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |program: &&&str| std::env::split_paths(&places).any(|place| place.join(program).is_file());
    let Some(program) = programs.iter().find(|program| !is_there(program)) else { return Ok(()) };
    let package = match *program {
        "setpriv" => "util-linux",
        _ => "QEMU's tools (Debian: apt install qemu-utils; Fedora: qemu-img)",
    };
    let text = format!("{program} is needed for qcow2 files, and not found: install {package}");
    Err(io::Error::new(io::ErrorKind::NotFound, text))
}

/// What QEMU said, with the image as its user knows it: the last line, without the program's name.
pub(crate) fn said(text: &str) -> String {
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it did not say why");
    let last = last
        .split_once(": ")
        .filter(|(program, _)| program.starts_with("qemu-"))
        .map_or(last, |(_, rest)| rest);
    let options = last.find("driver=qcow2").zip(last.find(IMAGE)).filter(|(from, to)| from < to);
    let image = options.map_or(IMAGE, |(from, to)| &last[from..to + IMAGE.len()]);
    last.replace(image, "the image").replace("Could not", "could not").replace("Failed to", "failed to")
}

/// Runs `qemu-img WHAT ARGS… IMAGE REST…` on a file. Returns what it printed.
fn qemu_img(image: &File, what: &str, before: &[&str], after: &[&str]) -> io::Result<String> {
    missing(&["qemu-img"])?;
    let mut command = Command::new("sh");
    // What it prints goes where a shell has its errors: the image takes the place of the output.
    command.arg("-c").arg(format!("exec qemu-img \"$@\" {DESCRIPTORS} 1>&2")).arg("sh").arg(what);
    command.args(before).arg(match what {
        // It makes what has no format yet.
        "create" => IMAGE.to_owned(),
        _ => format!("driver=qcow2,lazy-refcounts=off,{}", path_of_image("file.")),
    });
    command.args(after).stdin(Stdio::null()).stdout(image.try_clone()?).stderr(Stdio::piped());
    let done = command.spawn()?.wait_with_output()?;
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    if done.status.success() {
        return Ok(text);
    }
    let full = text.contains("No space left on device");
    let kind = if full { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, format!("qemu-img {what}: {}", said(&text))))
}

/// Makes an empty file a qcow2 file with a disk of no bytes.
///
/// # Errors
/// If qemu-img is missing, or fails.
pub fn create(image: &File) -> io::Result<()> {
    qemu_img(image, "create", &["-q", "-f", "qcow2", "-o", "compat=1.1,lazy_refcounts=off"], &["0"]).map(drop)
}

/// Has QEMU check the tables of a file, which nobody may have open. Returns whether parts of its disk are compressed.
///
/// # Errors
/// If qemu-img fails, or finds errors.
pub fn check(image: &File) -> io::Result<bool> {
    let found = qemu_img(image, "check", &["--output=json", "--image-opts"], &[])?;
    Ok(found.contains("\"compressed-clusters\""))
}

/// Frees clusters that are allocated and used by nothing. Nobody may have the file open.
///
/// # Errors
/// If qemu-img fails, also because it finds more than such clusters.
pub(crate) fn reclaim(image: &File) -> io::Result<()> {
    qemu_img(image, "check", &["-q", "-r", "leaks", "--image-opts"], &[]).map(drop)
}

/// Refuses a size that no disk in a qcow2 file can have.
///
/// # Errors
/// `Unsupported`, with the reason.
pub fn check_size(len: u64) -> io::Result<()> {
    if len % 512 == 0 {
        return Ok(());
    }
    let text = format!(
        "a qcow2 disk consists of sectors of 512 bytes, and cannot have {len} bytes: use a raw replica"
    );
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

/// Changes the size of the disk in a file. Nobody may have it open.
pub(crate) fn resize(image: &File, len: u64) -> io::Result<()> {
    qemu_img(image, "resize", &["-q", "--shrink", "--image-opts"], &[&len.to_string()]).map(drop)
}
