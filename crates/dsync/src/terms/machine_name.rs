//! `vm:NAME`, a virtual machine of libvirt, where a source or a destination may stand.

use crate::failure::Failure;

/// What the name of a machine follows.
const PREFIX: &str = "vm:";

/// The machine that is meant by a word, which is a path of the host `vm` if it has a slash.
pub(crate) fn named(word: &str) -> Option<&str> {
    word.strip_prefix(PREFIX).filter(|name| !name.is_empty() && !name.contains('/'))
}

/// Refuses the name of a machine where none is taken.
///
/// # Errors
/// Bad usage, with the way.
pub(crate) fn refuse_name(word: &str) -> Result<(), Failure> {
    named(word).map_or(Ok(()), |name| {
        Err(Failure::usage(format!(
            "vm:{name} is a VM of libvirt, which only \"dsync sync vm:{name} DIR\" takes: elsewhere, give its disks and replicas by their paths, or its \
             group, which \"dsync status\" lists. A path on a host that is called vm is ssh://vm/~/{name}"
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
