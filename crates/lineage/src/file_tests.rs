//! The log as a file: what is read back, whatever became of the file.

use device::Dir;
use extents::Extents;
use uuid::Uuid;

use crate::{Commit, Gap, Head, Kind, Lives, LogFile, Point, Relation, Set, Side, relation};

const LIFE: u128 = 7;

fn commit(life: u128, n: u64, birth: Option<Point>, kind: Kind) -> Commit {
    let at = Point { life: Uuid::from_u128(life), n };
    let id = Some(Uuid::from_u128(life << 64 | u128::from(n)));
    Commit::made(at, birth, kind, id)
}

fn cut(n: u64) -> Commit {
    commit(LIFE, n, None, Kind::Cut)
}

fn blocks(n: u64) -> Extents {
    let mut blocks = Extents::new();
    blocks.insert(n..n + 1);
    blocks
}

struct Scene {
    scratch: tempfile::TempDir,
    folder: Dir,
}

impl Scene {
    fn new() -> Scene {
        let scratch = testing::in_memory();
        let folder = Dir::open(scratch.path()).expect("a folder");
        Scene { scratch, folder }
    }

    fn open(&self) -> LogFile {
        LogFile::open(&self.folder, true).expect("it can be read").expect("it was made")
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(self.scratch.path().join("log")).expect("the log")
    }

    fn write(&self, content: &[u8]) {
        std::fs::write(self.scratch.path().join("log"), content).expect("the log is written");
    }

    fn with(cuts: u64) -> Scene {
        let scene = Scene::new();
        let mut log = scene.open();
        for n in 1..=cuts {
            assert!(log.append(cut(n), &blocks(n)).expect("it is added"));
        }
        scene
    }
}

fn at(n: u64) -> Point {
    Point { life: Uuid::from_u128(LIFE), n }
}

#[test]
fn what_was_added_is_read_again() {
    let scene = Scene::with(3);
    let mut log = scene.open();
    assert!(!log.append(cut(2), &blocks(2)).expect("nothing fails"), "it is there already");
    let since = Lives::to(at(3), log.log()).changes_after(&at(1), log.log()).expect("all is known");
    assert_eq!(log.changed(&since).expect("it can be read"), blocks(2).union(&blocks(3)));
    let nothing = Scene::new();
    assert!(LogFile::open(&nothing.folder, false).expect("nothing fails").is_none());
}

/// Wherever the file ends, what comes before it is read, and what is added then is read too.
#[test]
fn a_torn_end_takes_nothing_else_with_it() {
    let scene = Scene::with(3);
    let (whole, mut before) = (scene.content(), 0);
    for len in 0..whole.len() {
        scene.write(&whole[..len]);
        let mut log = scene.open();
        let cuts = log.log().commits().len() as u64;
        assert!(cuts >= before && cuts < 3, "{cuts} cuts in {len} bytes");
        before = cuts;
        assert!(log.append(cut(cuts + 1), &blocks(cuts + 1)).expect("it is added"));
        assert_eq!(scene.open().log().commits().len() as u64, cuts + 1);
    }
}

/// The promotion was durable before the head was: whoever reads both goes on from it, and whoever finds it gone answers nothing.
#[test]
fn a_durable_promotion_is_gone_on_from_and_never_cut_away() {
    let scene = Scene::with(2);
    let mut log = scene.open();
    let mut head = Head::at(at(2));
    (head.confirmed, head.unsure) = (2, Set::All);
    log.append(commit(8, 0, Some(at(2)), Kind::Promoted), &Extents::new()).expect("it is added");
    let log = scene.open();
    head.roll_forward(log.log());
    assert_eq!((head.parts[0].at.life, head.confirmed), (Uuid::from_u128(8), 3));
    assert!(head.unsure.is_none() && Head::is_source(log.log()));
    let whole = scene.content();
    scene.write(&whole[..whole.len() - 1]);
    let short = scene.open();
    let side = Side { log: short.log(), head: &head, doubt: None };
    assert!(matches!(relation(side, side), Relation::Unknown(crate::Doubt::Incomplete)));
}

/// Every byte of it, one after another.
#[test]
fn damage_is_a_gap_and_never_another_answer() {
    let scene = Scene::with(4);
    let whole = scene.content();
    for at_byte in 8..whole.len() {
        let mut content = whole.clone();
        content[at_byte] ^= 0x40;
        scene.write(&content);
        let log = scene.open();
        let cuts = log.log().commits().len();
        assert!((3..=4).contains(&cuts), "{cuts} cuts are read with byte {at_byte} damaged");
        let tip = log.log().commits()[cuts - 1].at;
        let since = Lives::to(tip, log.log()).changes_after(&at(1), log.log());
        match since {
            Ok(found) => {
                let expected = (2..=tip.n).fold(Extents::new(), |all, n| all.union(&blocks(n)));
                assert_eq!(log.changed(&found).expect("it can be read"), expected, "byte {at_byte}");
            }
            Err(gap) => assert_eq!(gap, Gap::Damaged, "byte {at_byte}"),
        }
    }
    scene.write(b"not a log at all");
    assert!(LogFile::open(&scene.folder, true).is_err());
}

/// Ten years, a cut each minute and a reboot a week: small, read at once, and every point of it still on the path.
#[test]
fn ten_years_are_small_and_nothing_is_forgotten() {
    let scene = Scene::new();
    let (weeks, of_a_week) = (520, testing::rounds(20, 10_080));
    let (mut log, mut birth) = (scene.open(), None);
    for week in 1..=weeks {
        let life = u128::from(week as u64);
        log.append(commit(life, 0, birth, Kind::Opened), &Extents::new()).expect("it is added");
        for n in 1..=of_a_week {
            log.append(commit(life, n, birth, Kind::Cut), &blocks(n % 64)).expect("it is added");
        }
        birth = Some(Point { life: Uuid::from_u128(life), n: of_a_week });
        log.fold(&scene.folder, &[]).expect("it is folded");
    }
    let tip = birth.expect("there were weeks");
    let bytes = log.bytes();
    assert!(bytes < 1 << 20, "{bytes} bytes");
    drop(log);
    let log = scene.open();
    let path = Lives::to(tip, log.log());
    assert!(path.is_whole());
    for week in 1..=weeks {
        let life = Uuid::from_u128(u128::from(week as u64));
        assert!(path.has(&Point { life, n: 1 }) && path.has(&Point { life, n: of_a_week }));
        assert!(!path.has(&Point { life, n: of_a_week + 1 }), "that was another branch");
    }
    // What is folded names more than was asked for, and never less.
    let since =
        path.changes_after(&Point { life: tip.life, n: of_a_week - 2 }, log.log()).expect("all is known");
    let changed = log.changed(&since).expect("it can be read");
    assert!(changed.contains(of_a_week % 64) && changed.contains((of_a_week - 1) % 64));
}

/// A point that somebody needs is not folded over.
#[test]
fn what_is_needed_stays_apart() {
    let scene = Scene::with(600);
    let mut log = scene.open();
    log.fold(&scene.folder, &[at(50)]).expect("it is folded");
    let log = scene.open();
    let since = Lives::to(at(600), log.log()).changes_after(&at(50), log.log()).expect("all is known");
    let changed = log.changed(&since).expect("it can be read");
    assert!(!changed.contains(50) && changed.contains(51) && changed.contains(600));
    assert!(log.log().commits().len() < 300);
}
