//! Requirements of tests, and how missing ones are reported.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// True when the long campaigns are to run their full counts.
pub fn soak() -> bool {
    std::env::var_os("DSYNC_SOAK").is_some_and(|v| v == "1")
}

/// True where what needs guests is to run in full, as `make test-vm` and `make soak` do.
pub fn guests_in_full() -> bool {
    soak() || std::env::var_os("DSYNC_VM").is_some_and(|v| v == "1")
}

/// How often to do something: `sample` times in `make test`, `full` times in `make soak`.
pub fn rounds<N>(sample: N, full: N) -> N {
    if soak() { full } else { sample }
}

/// Writes past the capture of cargo's test harness, so that it is seen when the test passes too.
pub fn say(line: &str) {
    // A closed standard error must not fail a test.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Says that something was not tested, and why; a failure under `DSYNC_STRICT=1`.
pub fn skipped(what: &str, why: &str) {
    let strict = std::env::var_os("DSYNC_STRICT").is_some_and(|v| v == "1");
    assert!(!strict, "{why}, and DSYNC_STRICT=1 allows no skipping: {what}");
    beyond(what, why);
}

/// Says that something was not tested that this kernel, this architecture or this moment does not allow, whatever is installed.
pub fn beyond(what: &str, why: &str) {
    say(&format!("SKIPPED: {why}; not tested: {what}"));
}

/// Says that something is left out of `make test` because it takes long, and which command runs it.
pub fn left_out(what: &str, command: &str) {
    beyond(what, &format!("it takes long, run \"{command}\""));
}

/// True if all tools are here. Else says which one is missing and what goes untested: the test returns at once.
/// Tools are what `scripts/setup` installs, so under `DSYNC_STRICT=1` a missing one is a failure.
pub fn need(tools: &[&str], what: &str) -> bool {
    for tool in tools {
        if !got(find(tool).ok_or_else(|| format!("{tool} is missing")), what) {
            return false;
        }
    }
    true
}

/// True if there is what is needed. Else says why not, and what goes untested; a failure under `DSYNC_STRICT=1`.
pub fn got<T, E: std::fmt::Display>(thing: Result<T, E>, what: &str) -> bool {
    let Err(why) = thing else { return true };
    skipped(what, &why.to_string());
    false
}

/// True for root. Else says what goes untested; a failure under `DSYNC_STRICT=1`.
pub fn need_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(what, "this needs root");
    }
    root
}

/// The path of a program: in `PATH`, or in the folders of root's PATH, where Debian keeps mkfs and sshd.
pub fn find(program: &str) -> Option<PathBuf> {
    search_path().iter().map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// `PATH` with root's folders behind.
pub fn search_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    folders
}

/// What a program prints, without blanks around it; `None` if it fails or is missing. Looked up in root's PATH too.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) -> Option<String> {
    let path = std::env::join_paths(search_path()).expect("PATH");
    let mut command = Command::new(program);
    let output = command.args(arguments).env("PATH", path).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
