//! `vm:NAME`, a virtual machine, where a source or a destination may stand; and `qemu:SOCKET`, one that QEMU alone runs, by its monitor.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use source::{SourceMembership, SourceMetadata, StateDir};

use crate::failure::Failure;

/// What the name of a machine follows.
const PREFIX: &str = "vm:";

/// What the socket of a monitor follows.
const MONITOR: &str = "qemu:";

/// A machine, as its user names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MachineWord<'a> {
    /// By its name.
    Name(&'a str),
    /// By the socket of the monitor of its QEMU.
    Monitor(&'a Path),
}

impl<'a> MachineWord<'a> {
    /// The machine that is meant by a word. What has a slash is a path of the host `vm`; a monitor is an absolute path, or one that begins with a dot.
    pub(crate) fn read(word: &'a str) -> Option<MachineWord<'a>> {
        let socket = word.strip_prefix(MONITOR).filter(|path| path.starts_with(['/', '.']));
        named(word).map(MachineWord::Name).or(socket.map(|path| MachineWord::Monitor(path.as_ref())))
    }

    /// Its name. Of a monitor that is not known it is the path.
    pub(crate) fn name(self, state: &StateDir) -> String {
        match self {
            MachineWord::Name(name) => name.to_owned(),
            MachineWord::Monitor(socket) => {
                let is_it =
                    |known: &Monitored| std::path::absolute(socket).is_ok_and(|is| known.monitor == is);
                let known = definitions::<Monitored>(state).into_iter().map(|(_, known)| known).find(is_it);
                known.map_or_else(|| socket.display().to_string(), |known| known.name)
            }
        }
    }
}

impl fmt::Display for MachineWord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineWord::Name(name) => write!(f, "{PREFIX}{name}"),
            MachineWord::Monitor(socket) => write!(f, "{MONITOR}{}", socket.display()),
        }
    }
}

/// What is known of a machine that QEMU alone runs.
#[derive(Debug, Deserialize)]
struct Monitored {
    name: String,
    /// The socket of its monitor.
    monitor: PathBuf,
}

/// What the definitions of the machines that QEMU alone runs say, with their plain names. What cannot be read is none.
pub(crate) fn definitions<T: serde::de::DeserializeOwned>(state: &StateDir) -> Vec<(String, T)> {
    let files = std::fs::read_dir(state.machines_folder()).into_iter().flatten().flatten();
    let read = |path: PathBuf| {
        let plain = path.file_name()?.to_str()?.strip_suffix(".json")?.to_owned();
        Some((plain, serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?))
    };
    files.filter_map(|file| read(file.path())).collect()
}

/// The plain name of the machine that was synced under this name, and the socket of its monitor; `None` if it was not, or libvirt runs it.
pub(crate) fn monitor_of(name: &str, state: &StateDir) -> Option<(String, PathBuf)> {
    let known = definitions::<Monitored>(state).into_iter();
    let mut known = known.filter(|(plain, _)| is_group_of(name, &group(plain)));
    known.next().map(|(plain, known)| (plain, known.monitor))
}

fn named(word: &str) -> Option<&str> {
    word.strip_prefix(PREFIX).filter(|name| !name.is_empty() && !name.contains('/'))
}

/// The most characters of a machine's name in that of its group.
const LONGEST: usize = 48;

/// The name of a machine where only some characters are allowed: its own, or one that begins like it and ends with a part of its UUID.
pub(crate) fn plain(name: &str, uuid: &str) -> String {
    match is_plain(name) {
        true => name.to_owned(),
        false => format!("{}{}", begin(name), uuid.chars().take(ID).collect::<String>()),
    }
}

/// The name of the group of a machine with a [plain] name.
pub(crate) fn group(plain: &str) -> String {
    format!("vm.{plain}")
}

/// The plain name of the machine whose group this is.
pub(crate) fn of_group(group: &str) -> Option<&str> {
    group.strip_prefix("vm.").filter(|plain| !plain.is_empty())
}

/// What a group is called where `dsync sync` is told what to copy.
pub(crate) fn as_source(group: &str) -> String {
    of_group(group).map_or_else(|| format!("--group {group}"), |plain| format!("{PREFIX}{plain}"))
}

/// True if this is the group of a machine of this name, which may be the plain one.
pub(crate) fn is_group_of(name: &str, group: &str) -> bool {
    let plain = of_group(group).unwrap_or_default();
    match is_plain(name) {
        true => plain == name,
        false => plain.strip_prefix(&begin(name)).is_some_and(|id| id.len() == ID),
    }
}

/// Characters of a UUID in a plain name.
const ID: usize = 8;

fn is_plain(name: &str) -> bool {
    name.len() <= LONGEST && source::is_plain(&group(name))
}

fn begin(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '_' };
    name.chars().map(allowed).take(LONGEST).chain(['-']).collect()
}

/// The sources that are the disks of a machine, and what was carried with them.
///
/// # Errors
/// If there are none.
pub(crate) fn members(name: &str, state: &StateDir) -> Result<Vec<(PathBuf, SourceMetadata)>, anyhow::Error> {
    let mut found = Vec::new();
    for (place, about) in state.survey()?.sources {
        let group = SourceMembership::read(&device::Dir::existing(&place)?)?;
        if group.is_some_and(|group| is_group_of(name, &group.name)) {
            found.push((place, about));
        }
    }
    match found.is_empty() {
        true => Err(unknown(name).into()),
        false => Ok(found),
    }
}

/// Of a machine that was never synced.
fn unknown(name: &str) -> Failure {
    let word = format!("{}{name}", if name.contains('/') { MONITOR } else { PREFIX });
    Failure::usage(format!(
        "no VM {name} was synced with this state directory: \"dsync status\" lists those that were, and \"dsync sync {word} DIR\" begins"
    ))
}

/// Refuses to demote the group of a machine: what runs it then is the other host.
///
/// # Errors
/// That.
pub(crate) fn refuse_demotion(group: &str, state: &StateDir) -> Result<(), anyhow::Error> {
    let Ok(folder) = state.machines_folder().canonicalize() else { return Ok(()) };
    let members = source::group_members(state, group)?;
    if !members.iter().any(|(_, about, _)| about.path.starts_with(&folder)) {
        return Ok(());
    }
    let name = of_group(group).unwrap_or(group);
    Err(Failure::refused(format!(
        "{group} is the group of a VM, which is moved in another way: shut it down, run \"dsync sync vm:{name} DIR\" once more, then \"dsync promote --force \
         --group\" where the replicas are, and start it there alone"
    ))
    .into())
}

/// Refuses the name of a machine where none is taken.
///
/// # Errors
/// Bad usage, with the way.
pub(crate) fn refuse_name(word: &str) -> Result<(), Failure> {
    named(word).map_or(Ok(()), |name| {
        Err(Failure::usage(format!(
            "vm:{name} is a VM, which is not taken here: give its disks and replicas by their paths, which \"dsync status vm:{name}\" lists, or its \
             group. A path on a host that is called vm is ssh://vm/~/{name}"
        )))
    })
}

/// Refuses the options of a machine for another source.
///
/// # Errors
/// Bad usage.
pub(crate) fn refuse_options(given: bool) -> Result<(), Failure> {
    match given {
        false => Ok(()),
        true => Err(Failure::usage("--without and --scratch are for a VM as the source: omit them")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_machine_is_known_by_its_name() {
        let uuid = "0123abcd-0000-4000-8000-000000000001";
        for (name, is) in [("web1", "vm.web1"), ("my vm", "vm.my_vm-0123abcd"), ("a&b", "vm.a_b-0123abcd")] {
            let group = group(&plain(name, uuid));
            assert_eq!(group, is);
            assert!(is_group_of(name, &group));
        }
        for (name, group) in
            [("web1", "vm.web"), ("web1", "web1"), ("my vm", "vm.my_vm"), ("my vm", "vm.my_vm-1-0123abcd")]
        {
            assert!(!is_group_of(name, group), "{name} {group}");
        }
        let long = "x".repeat(60);
        assert!(is_group_of(&long, &group(&plain(&long, uuid))));
    }

    #[test]
    fn a_machine_is_told_from_a_path_on_a_host() {
        for (word, name) in [("vm:web1", Some("web1")), ("vm:my vm", Some("my vm")), ("vm:~x", Some("~x"))] {
            assert_eq!(named(word), name);
            assert!(refuse_name(word).is_err());
        }
        assert_eq!(MachineWord::read("qemu:/run/a"), Some(MachineWord::Monitor(Path::new("/run/a"))));
        for path in [
            "vm",
            "vm:",
            "vm:/srv/a.raw",
            "qemu:",
            "qemu:a.raw",
            "qemu",
            "vm:~/a.raw",
            "/vm:a",
            "ssh://vm/a",
            "vm2:a",
        ] {
            assert_eq!(MachineWord::read(path), None, "{path}");
        }
    }
}
