//! The promotions that led to a source. By them two disks with one id are known to be of one branch, or of two.
//!
//! ```text
//!     term 1 ──1──2──3──4──5──▶            Each later term begins at an epoch of the term before it. The line of term 3 is
//!                 ╰─ term 2 ──4──5──▶      (2, from epoch 3), (3, from epoch 4): epochs 1 to 3 of term 1 and epoch 4 of
//!                             ╰─ term 3    term 2 are in its past, and epochs 4 and 5 of term 1 are not.
//! ```

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::Epoch;

/// A term that began with a promotion; or a part of a term, from where a source that was restored from a copy has gone another way than a
/// replica of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Term {
    /// Its number, one above that of the term before.
    pub number: u64,
    /// Names the promotion: two may have led to terms of one number.
    pub id: Uuid,
    /// The epoch of the term before at which it began.
    pub began: Epoch,
    /// Nothing of the term before was given up: its source had ended at that epoch.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub planned: bool,
}

/// The promotions that led to a source, oldest first; or that they are not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// From the first term on.
    #[serde(default)]
    whole: bool,
    #[serde(default)]
    terms: Vec<Term>,
}

/// The terms of two lines from where they go apart.
type Fork<'a> = (&'a [Term], &'a [Term]);

impl Line {
    /// The most promotions that are kept; of more, the last.
    pub const MOST: usize = 32;

    /// The line of a source that is in its first term.
    pub fn first() -> Line {
        Line { whole: true, terms: Vec::new() }
    }

    /// The line after another promotion.
    pub fn and(&self, term: Term) -> Line {
        let mut terms = self.terms.clone();
        terms.push(term);
        let dropped = terms.len().saturating_sub(Line::MOST);
        terms.drain(..dropped);
        Line { whole: self.whole && dropped == 0, terms }
    }

    /// True if nothing is known of it.
    pub fn is_unknown(&self) -> bool {
        !self.whole && self.terms.is_empty()
    }

    /// The last promotion; `None` if there was none, or none is known.
    pub fn last(&self) -> Option<&Term> {
        self.terms.last()
    }

    /// False for a line that no dsync writes.
    pub fn is_sound(&self) -> bool {
        self.terms.len() <= Line::MOST
    }

    /// Where the two go apart; `None` if that is not known.
    fn fork<'a>(&'a self, other: &'a Line) -> Option<Fork<'a>> {
        let shared =
            self.terms.iter().enumerate().rev().find_map(|(at, term)| {
                Some((at, other.terms.iter().position(|theirs| theirs.id == term.id)?))
            });
        match shared {
            Some((ours, theirs)) => Some((&self.terms[ours + 1..], &other.terms[theirs + 1..])),
            None => (self.whole && other.whole).then_some((&self.terms, &other.terms)),
        }
    }

    /// The last epoch that two sources have in common, each of which has gone on since; `None` if that is not known.
    pub fn common(&self, other: &Line) -> Option<Epoch> {
        let (ours, theirs) = self.fork(other)?;
        // A later one may have begun at an earlier epoch, to which a replica was rewound.
        ours.iter().chain(theirs).map(|term| term.began).min_by_key(|epoch| epoch.number)
    }

    /// True if one of the terms began at an epoch that two sources have in common, or later: it is in this one's past, whether its history goes
    /// back so far or not.
    pub fn has_begun_from(&self, common: &Epoch) -> bool {
        self.terms.iter().any(|term| term.began.number >= common.number)
    }

    /// Whether an epoch of a disk that follows `other` is in the past of a source with this line; `None` if the lines do not
    /// tell.
    pub fn leads_from(&self, other: &Line, epoch: &Epoch) -> Option<bool> {
        let (ours, theirs) = self.fork(other)?;
        let upto = |term: &Term| match epoch.number.cmp(&term.began.number) {
            std::cmp::Ordering::Equal => *epoch == term.began,
            order => order.is_lt(),
        };
        match (ours, theirs) {
            // Of the term that the source is in, its history tells.
            ([], []) => None,
            // A later one may have begun at an earlier epoch.
            _ => Some(ours.iter().chain(theirs).all(upto)),
        }
    }

    /// True if the source with this line went on from this very epoch of the last term of `other`, and has it in its past still.
    pub fn goes_on_from(&self, other: &Line, epoch: &Epoch) -> bool {
        let Some((ours, [])) = self.fork(other) else { return false };
        // A later one may have begun at an earlier epoch, to which a replica was rewound.
        ours.first().is_some_and(|next| next.began == *epoch)
            && ours.iter().all(|term| term.began.number >= epoch.number)
    }

    /// Whether all that was ever written in the last term of `other` is in the past of a source with this line; `None` if the lines do
    /// not tell.
    pub fn has_all_of(&self, other: &Line) -> Option<bool> {
        let (ours, theirs) = self.fork(other)?;
        Some(match ours.split_first() {
            _ if !theirs.is_empty() => false,
            None => true,
            // A later one may have begun at an earlier epoch, to which a replica was rewound.
            Some((next, later)) => {
                next.planned && later.iter().all(|term| term.began.number >= next.began.number)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(number: u64) -> Epoch {
        Epoch { number, id: Uuid::from_u128(number.into()) }
    }

    /// A line in words: "2a5 3b9" is term 2, promotion a, from epoch 5 on, and so forth; "2a5!" was planned.
    fn line(words: &str) -> Line {
        words.split_whitespace().fold(Line::first(), |line, word| {
            let planned = word.ends_with('!');
            let word = word.trim_end_matches('!');
            let (number, rest) = word.split_at(1);
            let (id, began) = rest.split_at(1);
            let id = Uuid::from_u128(id.as_bytes()[0].into());
            let began = epoch(began.parse().unwrap());
            line.and(Term { number: number.parse().unwrap(), id, began, planned })
        })
    }

    #[test]
    fn two_sources_have_in_common_what_was_before_the_earlier_fork() {
        for (one, other, common) in [
            ("", "", None),
            ("", "2a5", Some(5)),
            ("2a5", "2b7", Some(5)),
            ("2a5", "2a5", None),
            ("2a5 3b9", "2a5", Some(9)),
            ("2a5 3b9", "2a5 3c8", Some(8)),
            ("2a5 3b9 4d12", "", Some(5)),
            ("2a5 3b9 4d12", "2c4", Some(4)),
            // It was rewound before its promotion.
            ("2a6 3b1", "", Some(1)),
            ("2a6 3b1", "2a6", Some(1)),
        ] {
            let (one, other) = (line(one), line(other));
            let found = |a: &Line, b: &Line| a.common(b).map(|epoch| epoch.number);
            assert_eq!(found(&one, &other), common, "{one:?} {other:?}");
            assert_eq!(found(&other, &one), common, "{one:?} {other:?}");
            assert_eq!(found(&one, &Line::default()), None);
        }
    }

    #[test]
    fn a_promotion_goes_on_from_one_epoch() {
        for (source, demoted, at, goes_on) in [
            ("2a5!", "", 5, true),
            ("2a5", "", 5, true),
            ("2a5 3b9", "", 5, true),
            ("2a5 3b9", "2a5", 9, true),
            // From an earlier epoch, or not from this disk's term at all.
            ("2a4", "", 5, false),
            ("2a5", "", 6, false),
            ("2a5", "2a5", 9, false),
            ("2c5 3b9", "2a5", 9, false),
            // It was rewound since.
            ("2a5 3b4", "", 5, false),
        ] {
            assert_eq!(
                line(source).goes_on_from(&line(demoted), &epoch(at)),
                goes_on,
                "{source} {demoted} {at}"
            );
        }
        assert!(!line("2a5").goes_on_from(&Line::default(), &epoch(5)));
    }

    #[test]
    fn an_epoch_is_in_the_past_of_a_line_or_of_another_branch() {
        for (source, replica, at, past) in [
            // The first promotion: the replica follows the first term.
            ("2a5", "", 4, Some(true)),
            ("2a5", "", 5, Some(true)),
            ("2a5", "", 6, Some(false)),
            // Further back than the last promotion.
            ("2a5 3b9", "", 4, Some(true)),
            ("2a5 3b9", "", 7, Some(false)),
            ("2a5 3b9", "2a5", 7, Some(true)),
            ("2a5 3b9", "2a5", 4, Some(true)),
            ("2a5 3b9", "2a5", 10, Some(false)),
            // It followed another branch, from before the fork or after it.
            ("2a5 3b9", "2c7", 4, Some(true)),
            ("2a5 3b9", "2c7", 6, Some(false)),
            ("2a5", "2c3", 4, Some(false)),
            // It has heard of a later term, or of the same.
            ("2a5", "2a5 3b9", 8, Some(true)),
            ("2a5", "2a5 3b9", 10, Some(false)),
            ("2a5", "2a5", 4, None),
            // It, or what it followed, was rewound before its promotion.
            ("2a6 3b1", "", 1, Some(true)),
            ("2a6 3b1", "", 4, Some(false)),
            ("", "2a6 3b1", 4, Some(false)),
            ("2a9 3b4 4c12", "2a9", 7, Some(false)),
        ] {
            let told = line(source).leads_from(&line(replica), &epoch(at));
            assert_eq!(told, past, "{source} from {at} of {replica}");
            assert_eq!(line(source).leads_from(&Line::default(), &epoch(at)), None);
        }
        let other = Epoch { number: 5, id: Uuid::from_u128(77) };
        assert_eq!(line("2a5").leads_from(&Line::first(), &other), Some(false));
    }

    #[test]
    fn what_was_written_in_a_term_is_kept_by_a_planned_switch() {
        for (source, replica, all) in [
            ("", "", true),
            ("2a5", "2a5", true),
            ("2a5", "", false),
            ("2a5!", "", true),
            // What came after the switch was forced gave up nothing of the first term, unless it began before.
            ("2a5! 3b9", "", true),
            ("2a5! 3b4", "", false),
            ("2a5! 3b9", "2a5!", false),
            ("2a5 3b9!", "2a5", true),
            ("2a5 3b9!", "", false),
            // Of another branch, or of a later term.
            ("2a5!", "2c5!", false),
            ("2a5!", "2a5! 3b9", false),
        ] {
            let told = line(source).has_all_of(&line(replica));
            assert_eq!(told, Some(all), "{source} of {replica}");
            assert_eq!(line(source).has_all_of(&Line::default()), None);
        }
    }

    #[test]
    fn a_long_line_forgets_its_beginning() {
        let long = |count: u64, id: u128| {
            (0..count).fold(Line::first(), |line, at| {
                let id = Uuid::from_u128(id + u128::from(at));
                line.and(Term { number: at + 2, id, began: epoch(at * 10 + 5), planned: false })
            })
        };
        let line = long(40, 100);
        assert!(line.is_sound() && line.terms.len() == Line::MOST && !line.is_unknown());
        assert_eq!(line.common(&Line::first()), None);
        assert_eq!(line.common(&long(38, 100)), Some(epoch(385)));
        assert_eq!(line.common(&long(38, 1000)), None);
    }
}
