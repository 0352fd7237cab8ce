//! The compact form of a bitmap.
//!
//! `varint blocks`, then parts in ascending order, each begun by `varint (n << 2 | kind)`:
//!
//! | kind | n | what follows |
//! | --- | --- | --- |
//! | 0 | blocks clear before it | nothing: one block set |
//! | 1 | blocks clear before it | `varint length - 2`: a run of two blocks or more |
//! | 2 | words skipped, from the word of the block after the last part | a byte, `words - 1`, then the words, 8 bytes each, little-endian |
//! | 3 | blocks set in all | nothing: the end |
//!
//! Sparse sets are written as runs; a group whose runs would take more space than its words is written as words.

use std::ops::{Deref, Range};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::bitmap::{Bitmap, GROUP_BLOCKS, GROUP_WORDS};
use crate::{DecodeError, varint};

const ONE: u64 = 0;
const RUN: u64 = 1;
const WORDS: u64 = 2;
const END: u64 = 3;

pub(crate) fn encode<S: Deref<Target = [AtomicU64]>>(map: &Bitmap<S>, out: &mut Vec<u8>) {
    let blocks = map.blocks();
    varint::put(out, blocks);
    let (mut at, mut count) = (0, 0);
    let mut runs = map.runs().peekable();
    while let Some(first) = runs.peek() {
        let group = first.start / GROUP_BLOCKS;
        let group_end = blocks.min((group + 1) * GROUP_BLOCKS);
        let before = (out.len(), at, count);
        // The last group may have few words.
        let first = (group as usize * GROUP_WORDS).max((at / 64) as usize);
        let words_len = (group_end.div_ceil(64) as usize - first) * 8;
        let mut too_long = false;
        while let Some(run) = runs.next_if(|run| run.start < group_end) {
            let len = run.end - run.start;
            varint::put(out, (run.start - at) << 2 | if len == 1 { ONE } else { RUN });
            if len > 1 {
                varint::put(out, len - 2);
            }
            (at, count) = (run.end, count + len);
            too_long = out.len() - before.0 > words_len;
            if too_long {
                break;
            }
        }
        if too_long {
            out.truncate(before.0);
            (at, count) = (before.1, before.2);
            let words = &map.group(group as usize)
                [first % GROUP_WORDS..group_end.div_ceil(64) as usize - group as usize * GROUP_WORDS];
            varint::put(out, (first as u64 - at / 64) << 2 | WORDS);
            out.push((words.len() - 1) as u8);
            for (i, word) in words.iter().enumerate() {
                let mut bits = word.load(Relaxed);
                if (first + i) as u64 == at / 64 {
                    // The previous run, which reaches into this word, covers these bits.
                    bits &= u64::MAX << (at % 64);
                }
                count += u64::from(bits.count_ones());
                out.extend_from_slice(&bits.to_le_bytes());
            }
            at = group_end;
            runs = map.runs_in(at..blocks).peekable();
        }
    }
    varint::put(out, count << 2 | END);
}

pub(crate) enum Item {
    Run(Range<u64>),
    /// A word's index and bits, not all clear.
    Word(usize, u64),
}

pub(crate) fn decode(mut bytes: &[u8], blocks: u64, mut each: impl FnMut(Item)) -> Result<(), DecodeError> {
    let found = varint::get(&mut bytes)?;
    if found != blocks {
        return Err(DecodeError::Blocks { expected: blocks, found });
    }
    let (mut at, mut count) = (0u64, 0u64);
    loop {
        let token = varint::get(&mut bytes)?;
        let (n, kind) = (token >> 2, token & 3);
        match kind {
            ONE | RUN => {
                let extra = if kind == RUN { varint::get(&mut bytes)?.checked_add(1) } else { Some(0) };
                // `n` has two bits to spare, so the sum of it and a position cannot overflow.
                let start = at.checked_add(n).ok_or(DecodeError::PastEnd)?;
                let end = extra.and_then(|e| start.checked_add(e)?.checked_add(1));
                let end = end.filter(|&end| end <= blocks).ok_or(DecodeError::PastEnd)?;
                each(Item::Run(start..end));
                (at, count) = (end, count + (end - start));
            }
            WORDS => {
                let (&len, rest) = bytes.split_first().ok_or(DecodeError::Truncated)?;
                let len = usize::from(len) + 1;
                if rest.len() < len * 8 {
                    return Err(DecodeError::Truncated);
                }
                let (words, rest) = rest.split_at(len * 8);
                let first = (at / 64).checked_add(n).ok_or(DecodeError::PastEnd)?;
                let end = first.checked_add(len as u64).filter(|&e| e <= blocks.div_ceil(64));
                let end = end.ok_or(DecodeError::PastEnd)?;
                for (word, chunk) in (first..end).zip(words.chunks_exact(8)) {
                    let bits = chunk.iter().rev().fold(0, |bits, &b| bits << 8 | u64::from(b));
                    if word == at / 64 && bits & !(u64::MAX << (at % 64)) != 0 {
                        return Err(DecodeError::Order);
                    }
                    if word == blocks / 64 && bits & u64::MAX << (blocks % 64) != 0 {
                        return Err(DecodeError::PastEnd);
                    }
                    if bits != 0 {
                        each(Item::Word(word as usize, bits));
                        count += u64::from(bits.count_ones());
                    }
                }
                bytes = rest;
                at = blocks.min(end.saturating_mul(64));
            }
            _ => {
                return match n {
                    _ if n != count => Err(DecodeError::Count { expected: n, found: count }),
                    _ if !bytes.is_empty() => Err(DecodeError::Trailing),
                    _ => Ok(()),
                };
            }
        }
    }
}
