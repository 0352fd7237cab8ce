//! A replica as a disk of its own: who may take the mark of a promotion back, and what may be read.

use std::path::Path;

use super::real::alone;
use super::world::*;
use crate::{Commit, Options, Replica, ReplicaError, Use, inspect, promote, settle};

fn options() -> Options {
    Options::default()
}

fn source() -> Source {
    Source::new(5, &[400, 480])
}

fn seeded(path: &Path, source: &Source) {
    merge(&mut Replica::open(path, &options()).unwrap(), &source.seed(0), Commit::Journal).unwrap();
}

fn is_marked(path: &Path) -> bool {
    inspect(path, &options()).unwrap().unwrap().promoted.is_some()
}

/// The mark goes with the promotion that set it, and with no other.
#[test]
fn a_mark_is_taken_back_only_by_who_set_it_last() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    seeded(&path, &source());
    let promoted = || promote(&path, &options(), Use::Served).unwrap().unwrap();
    assert!(promoted().end().unwrap());
    assert!(!is_marked(&path));
    // Another begins before the first has ended.
    for revert in [false, true] {
        let (first, second) = (promoted(), promoted());
        if revert {
            first.revert().unwrap();
        } else {
            assert!(!first.end().unwrap());
        }
        assert!(is_marked(&path), "the second serves");
        assert!(!second.end().unwrap());
        assert!(is_marked(&path), "nobody knows what was written before the second");
        let adopt = Options { adopt: true, ..options() };
        let mut replica = Replica::open(&path, &adopt).unwrap();
        let source = source();
        let delta = source.lacks(replica.status(), std::fs::read(&path).ok().as_deref(), 0);
        merge(&mut replica, &delta, Commit::Journal).unwrap();
        drop(replica);
        assert!(!is_marked(&path));
    }
    // The second could not begin: the first ends as if it had never been.
    let (first, second) = (promoted(), promoted());
    second.revert().unwrap();
    assert!(is_marked(&path));
    assert!(first.end().unwrap());
    assert!(!is_marked(&path));
    // Another has it in use when the first ends.
    let first = promoted();
    let held = Replica::open(&path, &Options { doubt: true, ..options() }).unwrap();
    assert!(!first.end().unwrap());
    drop(held);
    assert!(is_marked(&path));
}

/// What may be looked at may not be merged into.
#[test]
fn doubt_does_not_make_a_promoted_replica_mergeable() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    seeded(&path, &source());
    let doubting = Options { doubt: true, ..options() };
    Replica::open(&path, &doubting).unwrap().mergeable().unwrap();
    promote(&path, &options(), Use::Served).unwrap().unwrap();
    let refused = Replica::open(&path, &doubting).unwrap().mergeable();
    assert!(matches!(refused, Err(ReplicaError::Promoted { .. })), "{refused:?}");
    Replica::open(&path, &Options { adopt: true, ..options() }).unwrap().mergeable().unwrap();
}

/// What a crash left in the midst of a merge is merged before it is read.
#[test]
fn a_half_merged_replica_is_settled_before_it_is_read() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    settle(&path, &options()).unwrap();
    seeded(&path, &source);
    settle(&path, &options()).unwrap();
    let mut replica = Replica::open(&path, &options()).unwrap();
    let mut units = units(&source.tracked(0, 1)).into_iter();
    let mut receipt = replica.receive(units.next().unwrap(), Commit::Journal).unwrap();
    units.for_each(|unit| receipt.unit(unit).unwrap());
    receipt.keep().unwrap();
    drop(replica);
    let folder = temp.path().join(".vm.raw.dsync");
    std::fs::rename(folder.join("journal"), folder.join("journal-whole")).unwrap();
    settle(&path, &options()).unwrap();
    assert!(std::fs::read(&path).unwrap() == source.images[1], "it holds neither epoch");
}

/// A commit in place that was cut off is finished by its source alone.
#[test]
fn a_replica_between_two_epochs_is_not_read() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    seeded(&path, &source);
    let mut replica = Replica::open(&path, &options()).unwrap();
    receive_part(&mut replica, &source.tracked(0, 1), Commit::InPlace, 1).unwrap();
    drop(replica);
    let refused = settle(&path, &options()).unwrap_err();
    assert!(refused.is_refusal(), "{refused}");
    let said = refused.to_string();
    for word in ["cut off between", "dsync sync", "dsync forget"] {
        assert!(said.contains(word), "{said}");
    }
    let promotion = promote(&path, &options(), Use::Served).unwrap().unwrap();
    assert!(promotion.was().unsettled().is_some());
    promotion.revert().unwrap();
    let mut replica = Replica::open(&path, &options()).unwrap();
    let delta = source.lacks(replica.status(), None, 1);
    merge(&mut replica, &delta, Commit::InPlace).unwrap();
    drop(replica);
    settle(&path, &options()).unwrap();
    assert!(std::fs::read(&path).unwrap() == source.images[1]);
}
