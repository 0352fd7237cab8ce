//! What two disks are to each other, a line for each situation. (The form is that of zrepl's `diff_test.go`.)
//!
//! A disk is what became of it, from left to right:
//!
//! ```text
//!     L1:1-2-3    in the life L1 the commits 1, 2 and 3
//!     P L2:1      promoted where it was: the life L2 begins, and has the commit 1
//!     O L2:1      opened again: the same
//!     O? L2:1     the record was not trusted then
//!     .5          the mirror has drawn, or brought, number 5 of this life
//!     ~3          this commit was compared or copied, so that its changes are not known
//!     3'          a commit of the same number and another id
//!     x3          the entry of this commit is damaged
//!     ?3          the log has no entry of this commit
//!     @L1:2       rewound to there
//!     +L1:2       the rest of it stands there
//!     own, unsure, any, fuzzy, short, other
//!                 has writes of its own; is unsure of blocks, of all of them; was copied in use; its log is too short; its content is not
//!                 what its log ends with
//! ```
//!
//! `A` is asked what `B` is to it.

use std::collections::BTreeMap;

use crate::{Changes, Commit, Doubt, Gap, Head, Kind, Log, Part, Point, Relation, Set, Side, relation};
use extents::Extents;
use uuid::Uuid;

fn life(name: &str) -> Uuid {
    Uuid::from_u128(name.bytes().fold(0, |sum, byte| sum << 8 | u128::from(byte)))
}

struct Disk {
    log: Log,
    head: Head,
    doubt: Option<Doubt>,
}

fn some() -> Set {
    let mut blocks = Extents::new();
    blocks.insert(3..4);
    Set::Blocks(blocks)
}

/// What is said of the commit that comes.
#[derive(Default)]
struct Said {
    births: BTreeMap<Uuid, Option<Point>>,
    begins: Option<(Kind, bool)>,
}

impl Disk {
    fn parse(text: &str) -> Disk {
        let mut disk =
            Disk { log: Log::default(), head: Head::at(Point { life: life(""), n: 0 }), doubt: None };
        let mut said = Said::default();
        for word in text.split_whitespace() {
            disk.word(word, &mut said);
        }
        disk
    }

    fn at(&mut self) -> &mut Point {
        &mut self.head.parts[0].at
    }

    fn word(&mut self, word: &str, said: &mut Said) {
        match word {
            "P" => said.begins = Some((Kind::Promoted, true)),
            "O" => said.begins = Some((Kind::Opened, true)),
            "O?" => said.begins = Some((Kind::Opened, false)),
            "own" => self.head.own = some(),
            "unsure" => self.head.unsure = some(),
            "any" => self.head.unsure = Set::All,
            "fuzzy" => self.head.fuzzy = true,
            "short" => self.head.confirmed = 100,
            "other" => self.doubt = Some(Doubt::OtherContent),
            _ if word.starts_with('.') => self.at().n = word[1..].parse().expect("a number"),
            _ if word.starts_with('@') => *self.at() = point(&word[1..]),
            _ if word.starts_with('+') => {
                let part = Part { at: point(&word[1..]), upto: u64::MAX };
                self.head.parts.push(part);
            }
            _ => {
                let (name, numbers) = word.split_once(':').unwrap_or_else(|| panic!("{word}?"));
                self.enter(life(name), said);
                numbers
                    .split('-')
                    .filter(|number| !number.is_empty())
                    .for_each(|number| self.commit(number, said));
            }
        }
    }

    /// Goes on in a life, which may begin here.
    fn enter(&mut self, life: Uuid, said: &mut Said) {
        let before = *self.at();
        let parent = Some(before).filter(|point| !point.life.is_nil());
        let fresh = !said.births.contains_key(&life);
        said.births.entry(life).or_insert(parent);
        self.at().life = life;
        if let Some((kind, trusted)) = said.begins.take().filter(|_| fresh) {
            self.at().n = 0;
            let changes = if trusted { Changes::Known } else { Changes::Unknown(Gap::NotTrusted) };
            self.push(0, kind, None, changes, said);
        }
    }

    fn commit(&mut self, number: &str, said: &Said) {
        let n = number.trim_matches(|c: char| !c.is_ascii_digit()).parse().expect("a number");
        self.at().n = n;
        let id = Uuid::from_u128(u128::from(number.ends_with('\'')) << 64 | u128::from(n));
        let gap = match number.as_bytes()[0] {
            b'~' => Some(Gap::Compared),
            b'x' => return self.log.damaged(),
            b'?' => return,
            _ => None,
        };
        self.push(n, Kind::Cut, Some(id), gap.map_or(Changes::Known, Changes::Unknown), said);
    }

    fn push(&mut self, n: u64, kind: Kind, id: Option<Uuid>, changes: Changes, said: &Said) {
        let life = self.at().life;
        let (at, birth) = (Point { life, n }, said.births[&life]);
        self.log.push(Commit { changes, ..Commit::made(at, birth, kind, id) });
    }

    fn side(&self) -> Side<'_> {
        Side { log: &self.log, head: &self.head, doubt: self.doubt }
    }
}

fn point(text: &str) -> Point {
    let (name, n) = text.split_once(':').expect("LIFE:NUMBER");
    Point { life: life(name), n: n.parse().expect("a number") }
}

fn told(point: Point) -> String {
    let bytes = point.life.as_u128().to_be_bytes();
    let name: String = bytes.iter().filter(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
    format!("{name}:{}", point.n)
}

fn words(relation: Relation) -> String {
    match relation {
        Relation::Same => "same".into(),
        Relation::Behind(Ok(point)) => format!("behind {}", told(point)),
        Relation::Behind(Err(gap)) => format!("behind, compare: {gap:?}"),
        Relation::Ahead => "ahead".into(),
        Relation::Forked(point) => format!("forked {}", told(point)),
        Relation::Unknown(doubt) => format!("unknown: {doubt:?}"),
    }
}

const SITUATIONS: &str = include_str!("situations.txt");

#[test]
fn every_situation_is_told() {
    let mut wrong = Vec::new();
    for line in SITUATIONS.lines().filter(|line| line.starts_with("A:")) {
        let (disks, expected) = line.split_once("=>").expect("A: ...  B: ...  => ...");
        let (a, b) = disks[2..].split_once("B:").expect("B:");
        let (a, b) = (Disk::parse(a), Disk::parse(b));
        let found = words(relation(a.side(), b.side()));
        if found != expected.trim() {
            wrong.push(format!("{line}\n    but it is {found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Seen from the other side, ahead is behind, and the rest is the same.
#[test]
fn what_one_is_to_the_other_holds_both_ways() {
    for line in SITUATIONS.lines().filter(|line| line.starts_with("A:")) {
        let (disks, _) = line.split_once("=>").expect("A: ...  B: ...  => ...");
        let (a, b) = disks[2..].split_once("B:").expect("B:");
        let (a, b) = (Disk::parse(a), Disk::parse(b));
        let (one, other) = (relation(a.side(), b.side()), relation(b.side(), a.side()));
        let fits = match (one, other) {
            (Relation::Behind(_), other) => matches!(other, Relation::Ahead | Relation::Behind(_)),
            (Relation::Ahead, other) => matches!(other, Relation::Behind(_)),
            (one, other) => one == other,
        };
        assert!(fits, "{line}\n    {one} and {other}");
    }
}
