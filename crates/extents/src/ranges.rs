//! Sets as sorted ranges.

use std::ops::Range;

use crate::{DecodeError, varint};

/// A set of numbers as ranges that are sorted, not empty, and neither overlap nor touch. What a number counts, bytes or
/// blocks, is up to the caller. `u64::MAX` itself cannot be a member.
///
/// Adding at the end is cheap; adding in the middle moves what follows. Whole-set operations take time linear in the
/// number of ranges.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Extents {
    ranges: Vec<(u64, u64)>,
}

impl Extents {
    /// The empty set.
    pub fn new() -> Extents {
        Extents::default()
    }

    /// Numbers in the set.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|r| r.1 - r.0).sum()
    }

    /// True if no number is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Ranges in the set.
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// The smallest member.
    pub fn start(&self) -> Option<u64> {
        self.ranges.first().map(|r| r.0)
    }

    /// One past the largest member; 0 for the empty set.
    pub fn end(&self) -> u64 {
        self.ranges.last().map_or(0, |r| r.1)
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> Iter<'_> {
        Iter { ranges: self.ranges.iter() }
    }

    /// Adds a range. Empty ranges add nothing.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        // Most sets are built in order.
        match self.ranges.last_mut() {
            Some(last) if range.start > last.1 => return self.ranges.push((range.start, range.end)),
            Some(last) if range.start >= last.0 => {
                last.1 = last.1.max(range.end);
                return;
            }
            None => return self.ranges.push((range.start, range.end)),
            Some(_) => {}
        }
        // Adjacent ranges are joined, so the bounds count as inside.
        let from = self.ranges.partition_point(|r| r.1 < range.start);
        let to = self.ranges.partition_point(|r| r.0 <= range.end);
        let mut joined = (range.start, range.end);
        if from < to {
            joined = (joined.0.min(self.ranges[from].0), joined.1.max(self.ranges[to - 1].1));
        }
        self.ranges.splice(from..to, [joined]);
    }

    /// Removes a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        let touched = self.touched(&range);
        let (Some(&first), Some(&last)) =
            (self.ranges[touched.clone()].first(), self.ranges[touched.clone()].last())
        else {
            return;
        };
        let before = (first.0 < range.start).then_some((first.0, range.start));
        let after = (last.1 > range.end).then_some((range.end, last.1));
        self.ranges.splice(touched, before.into_iter().chain(after));
    }

    /// True if `number` is in the set.
    pub fn contains(&self, number: u64) -> bool {
        self.ranges.get(self.ranges.partition_point(|r| r.1 <= number)).is_some_and(|r| r.0 <= number)
    }

    /// True if any number of the range is in the set.
    pub fn overlaps(&self, range: Range<u64>) -> bool {
        range.start < range.end && !self.touched(&range).is_empty()
    }

    /// True if every number of the range is in the set; so it is for an empty range.
    pub fn covers(&self, range: Range<u64>) -> bool {
        range.start >= range.end
            || self
                .ranges
                .get(self.ranges.partition_point(|r| r.1 <= range.start))
                .is_some_and(|r| r.0 <= range.start && range.end <= r.1)
    }

    /// What either set has.
    pub fn union(&self, other: &Extents) -> Extents {
        let mut out = Extents { ranges: Vec::with_capacity(self.ranges.len().max(other.ranges.len())) };
        let (mut a, mut b) = (&self.ranges[..], &other.ranges[..]);
        while let Some(next) = match (a.first(), b.first()) {
            (Some(x), Some(y)) if y.0 < x.0 => take(&mut b),
            (Some(_), _) => take(&mut a),
            (None, _) => take(&mut b),
        } {
            out.insert(next.0..next.1);
        }
        out
    }

    /// What this set has and `other` has not.
    pub fn difference(&self, other: &Extents) -> Extents {
        let mut out = Extents::new();
        let mut cut = other.ranges.iter().peekable();
        for &(mut start, end) in &self.ranges {
            while let Some(&&(from, to)) = cut.peek() {
                if from >= end {
                    break;
                }
                if start < from {
                    out.ranges.push((start, from));
                }
                start = start.max(to);
                if to > end {
                    // It may cut the next range as well.
                    break;
                }
                cut.next();
            }
            if start < end {
                out.ranges.push((start, end));
            }
        }
        out
    }

    /// What this set has within `range`.
    pub fn clip(&self, range: Range<u64>) -> Extents {
        if range.start >= range.end {
            return Extents::new();
        }
        let mut ranges = self.ranges[self.touched(&range)].to_vec();
        if let Some(first) = ranges.first_mut() {
            first.0 = first.0.max(range.start);
        }
        if let Some(last) = ranges.last_mut() {
            last.1 = last.1.min(range.end);
        }
        Extents { ranges }
    }

    /// Appends a compact form of the set: the number of ranges, then for each the gap before it and its length less one.
    pub fn encode(&self, out: &mut Vec<u8>) {
        varint::put(out, self.ranges.len() as u64);
        let mut at = 0;
        for &(start, end) in &self.ranges {
            varint::put(out, start - at);
            varint::put(out, end - start - 1);
            at = end;
        }
    }

    /// Takes an encoded set from the front of `bytes`. Memory stays within eight times the length of `bytes`.
    pub fn decode(bytes: &mut &[u8]) -> Result<Extents, DecodeError> {
        let mut rest = *bytes;
        let count = varint::get(&mut rest)?;
        // At least two bytes per range: a larger count is invalid, and refused before memory is allocated.
        if count > rest.len() as u64 / 2 {
            return Err(DecodeError::Truncated);
        }
        let mut ranges = Vec::with_capacity(count as usize);
        let mut at = 0u64;
        for i in 0..count {
            let gap = varint::get(&mut rest)?;
            let len = varint::get(&mut rest)?;
            if i > 0 && gap == 0 {
                return Err(DecodeError::Order);
            }
            let start = at.checked_add(gap).ok_or(DecodeError::PastEnd)?;
            at = start.checked_add(len).and_then(|e| e.checked_add(1)).ok_or(DecodeError::PastEnd)?;
            ranges.push((start, at));
        }
        *bytes = rest;
        Ok(Extents { ranges })
    }

    /// The indices of the ranges that share a number with `range`, which is not empty.
    fn touched(&self, range: &Range<u64>) -> Range<usize> {
        let from = self.ranges.partition_point(|r| r.1 <= range.start);
        let to = self.ranges.partition_point(|r| r.0 < range.end);
        from..to
    }
}

/// Takes the first range off a slice.
fn take(ranges: &mut &[(u64, u64)]) -> Option<(u64, u64)> {
    let (first, rest) = ranges.split_first()?;
    *ranges = rest;
    Some(*first)
}

impl From<Range<u64>> for Extents {
    fn from(range: Range<u64>) -> Extents {
        Extents::from_iter([range])
    }
}

/// Ranges in any order; they may overlap.
impl FromIterator<Range<u64>> for Extents {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Extents {
        let mut out = Extents::new();
        out.extend(ranges);
        out
    }
}

impl Extend<Range<u64>> for Extents {
    fn extend<I: IntoIterator<Item = Range<u64>>>(&mut self, ranges: I) {
        // Unsorted ranges are collected and sorted: inserting them one by one would move the tail each time.
        let mut late = Vec::new();
        for range in ranges {
            if range.start >= range.end {
                continue;
            }
            if self.ranges.last().is_none_or(|last| range.start >= last.0) {
                self.insert(range);
            } else {
                late.push((range.start, range.end));
            }
        }
        if !late.is_empty() {
            late.sort_unstable();
            let mut sorted = Extents { ranges: Vec::with_capacity(late.len()) };
            for (start, end) in late {
                sorted.insert(start..end);
            }
            *self = self.union(&sorted);
        }
    }
}

/// The ranges of an [`Extents`], ascending.
#[derive(Clone)]
pub struct Iter<'a> {
    ranges: std::slice::Iter<'a, (u64, u64)>,
}

impl Iterator for Iter<'_> {
    type Item = Range<u64>;
    fn next(&mut self) -> Option<Range<u64>> {
        self.ranges.next().map(|r| r.0..r.1)
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ranges.size_hint()
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<Range<u64>> {
        self.ranges.next_back().map(|r| r.0..r.1)
    }
}

impl ExactSizeIterator for Iter<'_> {}

impl<'a> IntoIterator for &'a Extents {
    type Item = Range<u64>;
    type IntoIter = Iter<'a>;
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl std::fmt::Debug for Extents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    type Model = BTreeSet<u64>;

    /// Short and long ranges in a small space, so that they meet; some empty, some upside down.
    fn range() -> impl Strategy<Value = Range<u64>> {
        (0u64..120, prop_oneof![0u64..4, 0u64..60], 0u8..15).prop_map(|(start, len, odd)| match odd {
            0 => start..start / 2,
            _ => start..start + len,
        })
    }

    fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        prop::collection::vec(range(), 0..30)
    }

    fn model(ranges: &[Range<u64>]) -> Model {
        ranges.iter().cloned().flatten().collect()
    }

    /// The members are the model's, and the ranges are as few as can be.
    fn same(set: &Extents, model: &Model) {
        assert_eq!(&set.iter().flatten().collect::<Model>(), model);
        assert!(set.iter().all(|r| r.start < r.end), "{set:?}");
        let pairs = set.ranges.windows(2);
        assert!(pairs.into_iter().all(|p| p[0].1 < p[1].0), "{set:?} has ranges that touch");
        assert_eq!(set.len(), model.len() as u64);
        assert_eq!(set.is_empty(), model.is_empty());
        assert_eq!(set.start(), model.first().copied());
        assert_eq!(set.end(), model.last().map_or(0, |m| m + 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        #[test]
        fn inserts_and_removes(steps in prop::collection::vec((range(), any::<bool>()), 0..60)) {
            let (mut set, mut model) = (Extents::new(), Model::new());
            for (range, add) in steps {
                if add {
                    set.insert(range.clone());
                    model.extend(range);
                } else {
                    set.remove(range.clone());
                    model.retain(|m| !range.contains(m));
                }
                same(&set, &model);
            }
        }

        #[test]
        fn gathers_in_any_order(first in ranges(), then in ranges()) {
            let mut set = Extents::from_iter(first.clone());
            same(&set, &model(&first));
            set.extend(then.clone());
            same(&set, &model(&[first, then].concat()));
        }

        #[test]
        fn algebra(a in ranges(), b in ranges(), within in range()) {
            let (x, y) = (Extents::from_iter(a.clone()), Extents::from_iter(b.clone()));
            let (a, b) = (model(&a), model(&b));
            same(&x.union(&y), &a.union(&b).copied().collect());
            same(&x.difference(&y), &a.difference(&b).copied().collect());
            same(&x.clip(within.clone()), &a.iter().copied().filter(|m| within.contains(m)).collect());
        }

        #[test]
        fn questions(a in ranges(), asked in range()) {
            let set = Extents::from_iter(a.clone());
            let model = model(&a);
            prop_assert_eq!(set.contains(asked.start), model.contains(&asked.start));
            prop_assert_eq!(set.overlaps(asked.clone()), asked.clone().any(|m| model.contains(&m)));
            prop_assert_eq!(set.covers(asked.clone()), asked.clone().all(|m| model.contains(&m)));
            prop_assert_eq!(set.iter().rev().count(), set.count());
        }

        #[test]
        fn encodes_and_decodes(a in ranges(), shift in 0u32..56, behind in prop::collection::vec(any::<u8>(), 0..5)) {
            let set = Extents::from_iter(a.into_iter().map(|r| r.start << shift..r.end << shift));
            let mut bytes = Vec::new();
            set.encode(&mut bytes);
            let len = bytes.len();
            bytes.extend(&behind);
            let mut rest = &bytes[..];
            prop_assert_eq!(Extents::decode(&mut rest), Ok(set));
            prop_assert_eq!(rest, &behind[..]);
            for cut in 0..len {
                prop_assert_eq!(Extents::decode(&mut &bytes[..cut]), Err(DecodeError::Truncated));
            }
        }

        #[test]
        fn garbage_is_a_set_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut rest = &bytes[..];
            if let Ok(set) = Extents::decode(&mut rest) {
                let mut again = Vec::new();
                set.encode(&mut again);
                prop_assert_eq!(&again[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
    }

    #[test]
    fn reaches_to_the_last_number() {
        let mut set = Extents::from(5..u64::MAX);
        assert_eq!((set.len(), set.end()), (u64::MAX - 5, u64::MAX));
        assert!(set.contains(u64::MAX - 1) && !set.contains(u64::MAX));
        let mut bytes = Vec::new();
        set.encode(&mut bytes);
        assert_eq!(Extents::decode(&mut &bytes[..]).as_ref(), Ok(&set));
        set.remove(10..u64::MAX);
        assert_eq!(set.len(), 5);
        set.insert(0..u64::MAX);
        assert_eq!(set.count(), 1);
    }

    #[test]
    fn a_false_count_asks_for_no_memory() {
        let mut bytes = Vec::new();
        varint::put(&mut bytes, u64::MAX);
        bytes.extend([0; 64]);
        assert_eq!(Extents::decode(&mut &bytes[..]), Err(DecodeError::Truncated));
    }
}
