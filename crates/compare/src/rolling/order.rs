//! Rebuilding a file in place: the order in which its copies can be made, and what must be sent because no order allows it.
//! After "In-Place Rsync: File Synchronization for Mobile and Wireless Devices" (Rasch and Burns).
//!
//! A copy must be made before another one overwrites what it reads. So the copies of a window are the nodes of a graph, with
//! an edge from each to all that write into what it reads, and are made in topological order. Where the edges form a cycle,
//! something in it is sent instead. Sent data and zeroes are written after all copies.
//!
//! No two copies write the same byte, so the copies that write into a range are adjacent when sorted by destination: edges
//! need not be stored, and there are few more of them than copies and blocks.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::scan::Move;

/// How a cycle is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Cycles {
    /// Send the overlap of the copy that reads least of what the next one overwrites: the paper's trim-node.
    #[default]
    Trim,
    /// Send all of the shortest copy of the cycle: the paper's delete-node.
    Delete,
}

/// How many of the last edges of a cycle are considered for breaking.
const BACK: usize = 64;

/// A copy, in an order in which it can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OrderedCopy {
    pub at: u64,
    pub from: u64,
    pub len: u64,
    /// XXH3-128 of the bytes; `None` if the copy was trimmed and must be hashed again.
    pub hash: Option<[u8; 16]>,
}

/// State of a node in the depth-first search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    New,
    Open,
    Done,
    Sent,
}

struct Graph<'a> {
    /// Ascending by destination, without overlap.
    nodes: &'a [Move],
    cycles: Cycles,
    state: Vec<Visit>,
    /// The next edge of each node to follow; earlier edges are done.
    cursor: Vec<u32>,
    /// The ranges of each node that are sent: relative to its beginning, ascending, disjoint.
    cut: HashMap<u32, Vec<Range<u64>>>,
    /// Finished nodes, in reverse order of copying.
    done: Vec<u32>,
}

/// Orders copies, which must ascend by destination and not overlap there. Returns them in order, and the ranges that must be
/// sent, ascending.
pub(super) fn order(nodes: &[Move], cycles: Cycles) -> (Vec<OrderedCopy>, Vec<Range<u64>>) {
    let mut graph = Graph {
        nodes,
        cycles,
        state: vec![Visit::New; nodes.len()],
        cursor: nodes.iter().map(|node| graph_first(nodes, node.from) as u32).collect(),
        cut: HashMap::new(),
        done: Vec::with_capacity(nodes.len()),
    };
    let mut path = Vec::new();
    for root in 0..nodes.len() as u32 {
        graph.follow(root, &mut path);
    }
    graph.result()
}

/// The first node that writes beyond `offset`.
fn graph_first(nodes: &[Move], offset: u64) -> usize {
    nodes.partition_point(|node| node.at + node.len <= offset)
}

impl Graph<'_> {
    fn node(&self, number: u32) -> &Move {
        &self.nodes[number as usize]
    }

    /// Follows all edges from a root, depth first.
    fn follow(&mut self, root: u32, path: &mut Vec<u32>) {
        if self.state[root as usize] != Visit::New {
            return;
        }
        path.push(root);
        self.state[root as usize] = Visit::Open;
        while let Some(&top) = path.last() {
            let reads = self.node(top).from..self.node(top).from + self.node(top).len;
            let next = self.cursor[top as usize];
            match self.nodes.get(next as usize) {
                Some(node) if node.at < reads.end => {}
                _ => {
                    self.state[top as usize] = Visit::Done;
                    self.done.push(top);
                    path.pop();
                    continue;
                }
            }
            let state = self.state[next as usize];
            let free =
                next == top || matches!(state, Visit::Done | Visit::Sent) || self.clash(top, next) == 0;
            match state {
                _ if free => self.cursor[top as usize] += 1,
                Visit::New => {
                    self.state[next as usize] = Visit::Open;
                    path.push(next);
                }
                _ => self.open(path, next),
            }
        }
    }

    /// Bytes that `reader` reads, `writer` overwrites, and neither gets sent.
    fn clash(&self, reader: u32, writer: u32) -> u64 {
        let (r, w) = (self.node(reader), self.node(writer));
        let both = r.from.max(w.at)..(r.from + r.len).min(w.at + w.len);
        if both.is_empty() {
            return 0;
        }
        let mut left = vec![both];
        for (number, base) in [(reader, r.from), (writer, w.at)] {
            let Some(cuts) = self.cut.get(&number) else { continue };
            let first = cuts.partition_point(|c| base + c.end <= left.first().map_or(0, |l| l.start));
            for cut in &cuts[first..] {
                let cut = base + cut.start..base + cut.end;
                if left.last().is_none_or(|l| l.end <= cut.start) {
                    break;
                }
                left = left
                    .into_iter()
                    .flat_map(|l| [l.start..l.end.min(cut.start), l.start.max(cut.end)..l.end])
                    .filter(|l| !l.is_empty())
                    .collect();
            }
        }
        left.iter().map(|l| l.end - l.start).sum()
    }

    /// Bytes of a node that are copied, not sent.
    fn weight(&self, number: u32) -> u64 {
        let cut: u64 = self.cut.get(&number).map_or(0, |c| c.iter().map(|r| r.end - r.start).sum());
        self.node(number).len - cut
    }

    /// Breaks the cycle from `first`, which is on the path, to the end of the path and back.
    fn open(&mut self, path: &mut Vec<u32>, first: u32) {
        // Edges from the end backwards: the position of the reader on the path, and the writer.
        let mut best: Option<(u64, usize, u32)> = None;
        let mut writer = first;
        for place in (0..path.len()).rev().take(BACK) {
            let reader = path[place];
            let cost = match self.cycles {
                Cycles::Trim => self.clash(reader, writer),
                Cycles::Delete => self.weight(reader),
            };
            if best.is_none_or(|(least, ..)| cost < least) {
                best = Some((cost, place, writer));
            }
            if reader == first {
                break;
            }
            writer = reader;
        }
        let Some((_, place, writer)) = best else { return };
        let reader = path[place];
        // Nodes dropped from the path are followed again later, from their cursors.
        let keep = match self.cycles {
            Cycles::Trim => {
                self.trim(reader, writer);
                place + 1
            }
            Cycles::Delete => place,
        };
        for dropped in path.drain(keep..) {
            self.state[dropped as usize] = Visit::New;
        }
        if self.cycles == Cycles::Delete {
            self.state[reader as usize] = Visit::Sent;
        }
    }

    /// Marks what `reader` reads of what `writer` overwrites as sent.
    fn trim(&mut self, reader: u32, writer: u32) {
        let (r, w) = (*self.node(reader), *self.node(writer));
        let mut new = r.from.max(w.at) - r.from..(r.from + r.len).min(w.at + w.len) - r.from;
        let cuts = self.cut.entry(reader).or_default();
        let from = cuts.partition_point(|c| c.end < new.start);
        let to = cuts.partition_point(|c| c.start <= new.end);
        for joined in cuts.drain(from..to) {
            new = new.start.min(joined.start)..new.end.max(joined.end);
        }
        cuts.insert(from, new);
    }

    fn result(mut self) -> (Vec<OrderedCopy>, Vec<Range<u64>>) {
        let mut steps = Vec::with_capacity(self.done.len());
        let mut sent: Vec<Range<u64>> = Vec::new();
        for number in 0..self.nodes.len() as u32 {
            let node = *self.node(number);
            match self.cut.get(&number) {
                _ if self.state[number as usize] == Visit::Sent => sent.push(node.at..node.at + node.len),
                Some(cuts) => sent.extend(cuts.iter().map(|c| node.at + c.start..node.at + c.end)),
                None => {}
            }
        }
        while let Some(number) = self.done.pop() {
            let node = *self.node(number);
            let Some(cuts) = self.cut.get(&number) else {
                steps.push(OrderedCopy {
                    at: node.at,
                    from: node.from,
                    len: node.len,
                    hash: Some(node.hash),
                });
                continue;
            };
            let mut pieces = Vec::with_capacity(cuts.len() + 1);
            let mut begin = 0;
            let end = node.len..node.len;
            for cut in cuts.iter().chain([&end]) {
                if begin < cut.start {
                    let (at, from) = (node.at + begin, node.from + begin);
                    pieces.push(OrderedCopy { at, from, len: cut.start - begin, hash: None });
                }
                begin = cut.end;
            }
            // The copy may overlap itself.
            if node.from < node.at {
                pieces.reverse();
            }
            steps.append(&mut pieces);
        }
        (steps, sent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Makes the copies in order, and checks that each reads original bytes.
    fn copy(old: &[u8], steps: &[OrderedCopy]) -> Vec<u8> {
        let mut bytes = old.to_vec();
        for s in steps {
            let read = bytes[s.from as usize..(s.from + s.len) as usize].to_vec();
            assert!(
                read == old[s.from as usize..(s.from + s.len) as usize],
                "{s:?} reads what was overwritten"
            );
            bytes[s.at as usize..(s.at + s.len) as usize].copy_from_slice(&read);
        }
        bytes
    }

    /// Bytes sent with trimming and with deleting.
    fn check(nodes: &[Move], len: usize) -> [u64; 2] {
        let old: Vec<u8> = (0..len).map(|n| (n * 7 + n / 251 * 13) as u8).collect();
        let total: u64 = nodes.iter().map(|n| n.len).sum();
        [Cycles::Trim, Cycles::Delete].map(|cycles| {
            let (steps, sent) = order(nodes, cycles);
            let mut result = copy(&old, &steps);
            assert!(sent.windows(2).all(|w| w[0].end <= w[1].start));
            let lost: u64 = sent.iter().map(|s| s.end - s.start).sum();
            assert_eq!(steps.iter().map(|s| s.len).sum::<u64>() + lost, total);
            for n in nodes {
                for i in 0..n.len {
                    let place = n.at + i;
                    if sent.iter().any(|s| s.contains(&place)) {
                        result[place as usize] = old[(n.from + i) as usize];
                    }
                    assert_eq!(result[place as usize], old[(n.from + i) as usize]);
                }
            }
            lost
        })
    }

    fn node(at: u64, from: u64, len: u64) -> Move {
        Move { at, from, len, hash: [0; 16] }
    }

    #[test]
    fn a_shift_loses_nothing() {
        for shift in [1, 10, 100] {
            let up: Vec<Move> = (0..50).map(|n| node(shift + n * 10, n * 10, 10)).collect();
            assert_eq!(check(&up, 1000), [0, 0]);
            let down: Vec<Move> = (0..50).map(|n| node(n * 10, n * 10 + shift, 10)).collect();
            assert_eq!(check(&down, 1000), [0, 0]);
        }
    }

    #[test]
    fn a_cycle_loses_its_least_part() {
        // Two copies that swap places, and two that overlap a little.
        assert_eq!(check(&[node(0, 50, 50), node(50, 0, 50)], 100), [50, 50]);
        assert_eq!(check(&[node(0, 55, 50), node(50, 7, 50)], 200), [43, 50]);
        // A ring of three, with the cheapest edge and the shortest copy at each position.
        assert_eq!(check(&[node(0, 10, 10), node(10, 20, 10), node(20, 5, 5)], 100), [5, 5]);
        for turn in 0..3 {
            let skip = |n: usize| [2, 7, 4][(n + turn) % 3];
            let edges = [node(0, 100 + skip(0), 10), node(100, 200 + skip(1), 10), node(200, skip(2), 10)];
            assert_eq!(check(&edges, 300), [3, 10]);
            let len = |n: usize| [9, 3, 6][(n + turn) % 3];
            let copies = [node(0, 100, len(0)), node(100, 200, len(1)), node(200, 0, len(2))];
            assert_eq!(check(&copies, 300), [3, 3]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_copies_are_ordered(moves in prop::collection::vec((0u64..20, 0u64..400, 1u64..40), 1..60)) {
            let mut at = 0;
            let mut nodes = Vec::new();
            for (gap, from, len) in moves {
                nodes.push(node(at + gap, from, len));
                at += gap + len;
            }
            check(&nodes, (at as usize).max(500));
        }
    }

    #[test]
    fn many_copies_take_no_time() {
        let mut random = testing::Random::seeded(1);
        let began = std::time::Instant::now();
        // All shuffled; all from one place; long copies that read many short ones and the reverse.
        let n = 200_000;
        let shuffled: Vec<Move> = (0..n).map(|i| node(i * 8, random.below(n) * 8, 8)).collect();
        let same: Vec<Move> = (0..n).map(|i| node(i * 8, 800_000, 8)).collect();
        let mut long: Vec<Move> =
            (0..n).map(|i| node(i * 8, 10_000_000 + random.below(500) * 10_000, 8)).collect();
        long.extend((0..500).map(|i| node(10_000_000 + i * 10_000, random.below(n * 8 - 10_000), 10_000)));
        for nodes in [shuffled, same, long] {
            for cycles in [Cycles::Trim, Cycles::Delete] {
                order(&nodes, cycles);
            }
        }
        // It would be hours, and a busy machine takes its time.
        assert!(began.elapsed().as_secs() < 120, "{:?}", began.elapsed());
    }
}
