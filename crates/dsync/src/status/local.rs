//! The replicas of this host, as far as that is written down: a replica that is only looked at is not opened, because that would
//! refuse a sync to it meanwhile.

use std::path::{Path, PathBuf};

use replica::{Condition, KnownReplica, ReplicaReader, Verdict};
use serde::Serialize;
use source::StateDir;

use crate::output::Output;
use crate::status::membership::GroupInfo;
use crate::terms::{machine_name, units};

/// What is written down of a replica of this host.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Serialize)]
pub(crate) struct LocalReplica<'a> {
    kind: &'static str,
    pub path: &'a Path,
    pub source: Option<uuid::Uuid>,
    pub epoch: Option<u64>,
    /// It is ahead of that epoch by batches of a mirror.
    pub ahead: bool,
    /// Bytes in which it may not be what that epoch was.
    pub unsure: u64,
    pub state: &'static str,
    /// `replica`; `released` if its source has ended at its epoch; `demoted` if it was the source itself, and no sync has come
    /// since; `promoted`.
    pub role: &'static str,
    /// When its state was last written, in seconds since 1970: with the last commit of an epoch, or since.
    pub written: Option<u64>,
    /// When it came to what it holds, in seconds since 1970: that is no newer.
    pub at: Option<u64>,
    /// `dsync rewind` has brought it back to that, and no sync has come since.
    pub rewound: bool,
    /// The term of its source, at the last commit.
    pub term: u64,
    /// Its source has ended at its epoch.
    pub released: bool,
    /// It was the source itself, and no sync has come since.
    pub demoted: bool,
    /// The group that it is committed with.
    pub group: Option<GroupInfo>,
    /// What is wrong, as the part of a sentence that begins with its path; `None` if nothing is.
    pub problem: Option<String>,
    /// Where its source is.
    #[serde(skip)]
    pub origin: Option<String>,
    /// Who reads it at a moment.
    pub readers: &'a [ReplicaReader],
    /// A verification found that it differed from its source.
    pub verdict: Option<Verdict>,
}

/// A path as the list of replicas has it.
pub(crate) fn path_of(what: &str) -> std::io::Result<PathBuf> {
    match std::fs::canonicalize(what) {
        Err(_) => Ok(followed(device::absolute(what)?)),
        found => found,
    }
}

/// A path that leads nowhere, behind the links in it: their file system may not be mounted.
fn followed(path: PathBuf) -> PathBuf {
    let mut path = path;
    for _ in 0..LINKS_MAX {
        let mut places: Vec<&Path> = path.ancestors().collect();
        places.reverse();
        let found = places.into_iter().find_map(|at| Some((at, std::fs::read_link(at).ok()?)));
        let Some((at, target)) = found else { break };
        let rest = path.strip_prefix(at).unwrap_or(Path::new(""));
        path = at.parent().unwrap_or(at).join(target).join(rest);
    }
    path
}

/// Links that are followed in a path, as by the kernel.
const LINKS_MAX: u32 = 40;

/// The values of [`LocalReplica::role`].
pub(crate) const ROLES: [&str; 4] = ["replica", "released", "demoted", "promoted"];

/// The values of [`LocalReplica::state`].
pub(crate) const STATES: [&str; 8] =
    ["exact", "fuzzy", "interrupted", "incomplete", "changed", "promoted", "missing", "unreadable"];

impl LocalReplica<'_> {
    pub(crate) fn of(known: &KnownReplica) -> LocalReplica<'_> {
        let lineage = known.lineage.as_ref();
        let unsure = lineage.map_or(0, |lineage| lineage.unsure_bytes());
        let (state, problem) = told(known, unsure);
        LocalReplica {
            kind: "replica",
            path: &known.path,
            source: lineage.and_then(|lineage| lineage.source),
            epoch: lineage.and_then(|lineage| lineage.epoch).map(|epoch| epoch.number),
            ahead: lineage.is_some_and(|lineage| lineage.is_ahead()),
            unsure,
            state,
            role: match lineage.map(|lineage| &lineage.role) {
                Some(role) if role.promoted.is_some() => "promoted",
                Some(role) if role.demoted.is_some() => "demoted",
                Some(role) if role.released.is_some() => "released",
                _ => "replica",
            },
            written: known.written.map(|nanoseconds| nanoseconds / 1_000_000_000),
            at: known.past.at,
            rewound: known.past.rewound,
            term: lineage.map_or(1, |lineage| lineage.role.term),
            released: lineage.is_some_and(|lineage| lineage.role.released.is_some()),
            demoted: lineage.is_some_and(|lineage| lineage.role.demoted.is_some()),
            group: lineage.and_then(|lineage| GroupInfo::of_replica(&known.path, lineage)),
            problem,
            origin: known.past.origin.as_deref().map(shown_origin),
            readers: &known.readers,
            verdict: known.past.verdict,
        }
    }

    /// The moment and the term of the replica, and whether a rewind has brought it there.
    fn age(&self) -> String {
        if self.epoch.is_none() || self.demoted || self.role == "promoted" {
            return String::new();
        }
        let at =
            self.at.map_or(String::new(), |at| format!(", of {} ({})", device::moment(at), units::age(at)));
        format!("{at}, term {}{}", self.term, if self.rewound { ", to which it was rewound" } else { "" })
    }

    /// Prints it as a part of `dsync status`.
    pub(crate) fn say(&self, output: &Output) {
        let at = match (self.epoch, self.source) {
            (Some(epoch), Some(source)) if self.demoted && self.unsure > 0 => format!(
                "the former source {source}, at epoch {epoch}; {} written since will be overwritten by the next sync to it",
                units::size(self.unsure)
            ),
            (Some(epoch), Some(source)) if self.demoted => {
                format!("the former source {source}, at epoch {epoch}")
            }
            (Some(epoch), Some(source)) if self.ahead => {
                format!("at a batch of a mirror after epoch {epoch} of source {source}")
            }
            (Some(epoch), Some(source)) if self.released => {
                format!("at epoch {epoch} of source {source}, the last one: it can be promoted")
            }
            (Some(epoch), Some(source)) => format!("at epoch {epoch} of source {source}"),
            _ => "at no epoch yet".into(),
        };
        let problem = self.problem.as_ref().map(|problem| format!("; it {problem}")).unwrap_or_default();
        let group = self.group.as_ref().map(|group| format!(", {}", group.told())).unwrap_or_default();
        let age = self.age();
        output.say(&format!("replica {}, {at}{age}{group}{problem}", self.path.display()));
        say_origin(self.origin.as_deref(), output);
        say_verdict(self.verdict, output);
        say_readers(self.readers, output);
        output.summary(self);
    }
}

/// Where a source is, `HOST:PATH`, or its path if that is on this host.
pub(crate) fn shown_origin(place: &str) -> String {
    let here = place.strip_prefix(&link::host_name()).and_then(|rest| rest.strip_prefix(':'));
    here.unwrap_or(place).to_owned()
}

/// Prints where the source of a replica is.
pub(crate) fn say_origin(origin: Option<&str>, output: &Output) {
    origin.iter().for_each(|origin| output.say(&format!("  its source is {origin}")));
}

/// Prints what a verification found.
pub(crate) fn say_verdict(verdict: Option<Verdict>, output: &Output) {
    if let Some(found) = verdict {
        output.say(&format!(
            "  it differed from its source in {} when it was verified on {}, not repaired: \"dsync verify --repair\" where that is",
            units::size(found.bytes_differing),
            device::moment(found.time)
        ));
    }
}

/// Prints who reads a replica at a moment.
pub(crate) fn say_readers(readers: &[ReplicaReader], output: &Output) {
    for reader in readers {
        let after = if reader.ahead { "after epoch" } else { "epoch" };
        let of = reader.at.map_or(String::new(), |at| format!(" ({})", device::moment(at)));
        let what = format!("{after} {}{of}", reader.epoch);
        let (process, since) = (reader.process, device::moment(reader.since));
        output.say(&match &reader.lost {
            None => format!(
                "  process {process} reads {what} since {since}, {} kept for it",
                units::size(reader.bytes)
            ),
            Some(why) => format!("  process {process} has lost {what}, which it read since {since}: {why}"),
        });
    }
}

/// The command that completes an interrupted promotion of the replica at this path.
pub(crate) fn completion(path: &std::path::Path, lineage: &replica::Lineage) -> String {
    match replica::promotes_still(path, lineage) {
        Ok(Some((_, dir))) => format!("dsync promote --group {}", dir.display()),
        _ => format!("dsync promote {}", path.display()),
    }
}

/// The state directory with which a replica is the source itself, if that is another one.
pub(crate) fn made_elsewhere(known: &KnownReplica, state: &StateDir) -> Option<PathBuf> {
    let lineage = known.lineage.as_ref().filter(|_| known.is_source())?;
    sync::made_elsewhere(&known.path, lineage, &state.absolute())
}

/// The state's name, and what to do about it.
fn told(known: &KnownReplica, unsure: u64) -> (&'static str, Option<String>) {
    let path = known.path.display();
    match &known.condition {
        Condition::Exact => ("exact", None),
        Condition::Fuzzy => {
            ("fuzzy", Some("was copied from a disk in use without a freeze: sync it again with one".into()))
        }
        Condition::Interrupted => {
            let what = format!(
                "may be between two moments: a merge to it was interrupted; the next sync completes it, and so does \"dsync recover {path}\""
            );
            ("interrupted", Some(what))
        }
        Condition::Incomplete if known.lineage.as_ref().is_some_and(|l| l.role.demoted.is_some()) => (
            "incomplete",
            Some("is a former source that no sync has reached yet: sync to it from the present one".into()),
        ),
        Condition::Incomplete if unsure > 0 => {
            let what = format!(
                "is incomplete: {} are not of its epoch (unreadable at the source, or not in what was merged), and the next sync \
                 sends them",
                units::size(unsure)
            );
            ("incomplete", Some(what))
        }
        Condition::Incomplete => {
            let what = "is incomplete: a sync to it is under way or was interrupted; run it again";
            ("incomplete", Some(what.into()))
        }
        Condition::Changed(why) => {
            let group = known.lineage.as_ref().and_then(|lineage| Some(&lineage.group.as_ref()?.name));
            let mends = group.map_or("verify --repair".to_owned(), |name| {
                format!("sync --adopt {} DIR", machine_name::as_source(name))
            });
            let what = format!(
                "was changed by another program since its last commit ({why}), and syncs to it are refused: find out who \
                 writes there. \"dsync verify\" shows what differs, and \"dsync {mends}\" overwrites it with the source; if it was restored to be \
                 used again, \"dsync forget --replica {path}\" makes it an ordinary disk{}",
                match group.is_none() && !known.past.is_empty {
                    true =>
                        ". If nothing was written, the moments kept by --keep stay; otherwise they are lost",
                    false => "",
                }
            );
            ("changed", Some(what))
        }
        Condition::Promoted => {
            let promoted = known.lineage.as_ref().and_then(|lineage| lineage.role.promoted);
            let said = promoted.map(|promoted| promoted.said()).unwrap_or_default();
            let command = known.lineage.as_ref().map(|lineage| completion(&known.path, lineage));
            let command = command.unwrap_or_else(|| format!("dsync promote {path}"));
            let what = format!(
                "{said}, and its promotion was interrupted (\"{command}\" completes it), or it was made with another state directory (pass \
                 that with --state-dir)"
            );
            ("promoted", Some(what))
        }
        Condition::Missing => {
            let what = format!(
                "is missing: mount its file system or attach its disk; if it is gone for good: dsync forget {path}"
            );
            ("missing", Some(what))
        }
        Condition::Stateless(folder) => {
            let what = format!(
                "is there, but its state is missing: put {} back; without it, \"dsync sync --adopt\" compares all of it with its source, and \"dsync \
                 forget {path}\" leaves it as a plain disk",
                folder.display()
            );
            ("missing", Some(what))
        }
        Condition::Unreadable(why) => ("unreadable", Some(format!("cannot be looked at: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_whose_file_system_is_away_is_the_one_behind_its_links() {
        let temp = tempfile::tempdir().unwrap();
        let (mount, link) = (temp.path().join("mnt"), temp.path().join("link"));
        std::os::unix::fs::symlink("mnt/b", &link).unwrap();
        std::os::unix::fs::symlink(temp.path().join("link"), temp.path().join("other")).unwrap();
        let named = path_of(temp.path().join("other/r.raw").to_str().unwrap()).unwrap();
        assert_eq!(named, mount.join("b/r.raw"));
        std::os::unix::fs::symlink("round", temp.path().join("round")).unwrap();
        path_of(temp.path().join("round").to_str().unwrap()).unwrap();
    }
}
