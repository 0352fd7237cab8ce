//! `vm:NAME`, a virtual machine of libvirt, where a source or a destination may stand.

use std::path::PathBuf;

use source::{SourceMembership, SourceMetadata, StateDir};

use crate::failure::Failure;

/// What the name of a machine follows.
const PREFIX: &str = "vm:";

/// The machine that is meant by a word, which is a path of the host `vm` if it has a slash.
pub(crate) fn named(word: &str) -> Option<&str> {
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
    Failure::usage(format!(
        "no VM {name} was synced with this state directory: \"dsync status\" lists those that were, and \"dsync sync vm:{name} DIR\" begins"
    ))
}

/// Refuses to demote the group of a machine: what runs it then is libvirt of the other host.
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
            "vm:{name} is a VM of libvirt, which is not taken here: give its disks and replicas by their paths, which \"dsync status vm:{name}\" lists, or its \
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
        true => Err(Failure::usage("--without and --scratch are for vm:NAME as the source: omit them")),
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
        for path in ["vm", "vm:", "vm:/srv/a.raw", "vm:~/a.raw", "/vm:a", "ssh://vm/a", "vm2:a"] {
            assert_eq!(named(path), None, "{path}");
        }
    }
}
