//! What of a replica's past is kept: `24h`, `24h/10m,7d/1h`, the last N moments, so many bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which earlier moments of a replica are kept: those that any of the rules keeps, as long as all of them take no more room than
/// is allowed. Without a rule, none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// Moments of these times.
    pub spans: Vec<Span>,
    /// The last so many moments.
    pub last: u64,
    /// Bytes that all may take. `None`: as many as the file system has left.
    pub bytes: Option<u64>,
}

/// Moments of the last `seconds`: all, or the last one of each period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// How far back it reaches, in seconds.
    pub seconds: u64,
    /// One moment is kept of each period of so many seconds since 1970; 0: all.
    pub every: u64,
}

impl Keep {
    /// True if nothing is kept.
    pub fn is_nothing(&self) -> bool {
        self.spans.is_empty() && self.last == 0
    }

    /// The shortest period, in seconds, of which a moment is kept; `None` if no rule says so.
    pub fn every(&self) -> Option<u64> {
        self.spans.iter().map(|span| span.every).filter(|every| *every > 0).min()
    }

    /// True for what can be asked for; what a peer sends need not be.
    pub fn is_sound(&self) -> bool {
        let sound = |span: &Span| (1..1 << 40).contains(&span.seconds) && span.every < span.seconds;
        self.spans.len() <= 64 && self.spans.iter().all(sound)
    }

    /// Which of a replica's states are kept, by the times at which it came to them: ascending, with the present time for the
    /// present state as the last. A state belongs to a span if the replica was still at it then.
    pub(crate) fn kept(&self, times: &[u64]) -> Vec<bool> {
        let before = times.len().saturating_sub(1) as u64;
        let now = times.last().copied().unwrap_or(0);
        let kept = |(number, pair): (usize, &[u64])| {
            let [at, next] = [pair[0], pair[1]];
            let in_span = |span: &Span| {
                next >= now.saturating_sub(span.seconds)
                    && (span.every == 0 || at / span.every != next / span.every)
            };
            before - number as u64 <= self.last || self.spans.iter().any(in_span)
        };
        times.windows(2).enumerate().map(kept).chain(times.last().map(|_| true)).collect()
    }
}

/// Reads `24h`, or `24h/10m,7d/1h`: all of the last 24 hours, or one each ten minutes of them, and one each hour of the last 7
/// days. `none` keeps nothing.
impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Keep, String> {
        if text.trim() == "none" {
            return Ok(Keep::default());
        }
        let span = |part: &str| {
            let (reach, every) =
                part.split_once('/').map_or((part, None), |(reach, every)| (reach, Some(every)));
            let every = every.map(seconds).transpose()?.unwrap_or(0);
            let span = Span { seconds: seconds(reach)?, every };
            match every < span.seconds {
                true => Ok(span),
                false => Err("the period must be shorter than the time that it divides".to_owned()),
            }
        };
        let spans = text.split(',').map(|part| span(part.trim())).collect::<Result<_, String>>()?;
        Ok(Keep { spans, ..Keep::default() })
    }
}

/// Reads `90s`, `10m`, `24h`, `7d` or `4w`.
fn seconds(text: &str) -> Result<u64, String> {
    let wrong = || "use a form like 24h, 7d/1h or 4w, with a unit".to_owned();
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let unit = match &text[split..] {
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..split].parse().map_err(|_| wrong())?;
    number.checked_mul(unit).filter(|seconds| (1..1 << 40).contains(seconds)).ok_or_else(wrong)
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |seconds: u64| match seconds {
            _ if seconds % 86_400 == 0 && seconds > 86_400 => format!("{}d", seconds / 86_400),
            _ if seconds % 3600 == 0 => format!("{}h", seconds / 3600),
            _ if seconds % 60 == 0 => format!("{}m", seconds / 60),
            _ => format!("{seconds}s"),
        };
        let mut parts: Vec<String> = self
            .spans
            .iter()
            .map(|span| match span.every {
                0 => time(span.seconds),
                every => format!("{}/{}", time(span.seconds), time(every)),
            })
            .collect();
        if self.last > 0 {
            parts.push(format!("the last {}", self.last));
        }
        f.write_str(&if parts.is_empty() { "none".into() } else { parts.join(", ") })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keep(text: &str) -> Keep {
        text.parse().unwrap()
    }

    #[test]
    fn spans_are_read_as_people_write_them() {
        let span = |seconds, every| Span { seconds, every };
        assert_eq!(keep("24h").spans, [span(86_400, 0)]);
        assert_eq!(keep("24h/10m, 7d/1h").spans, [span(86_400, 600), span(604_800, 3600)]);
        assert!(keep("none").is_nothing());
        assert_eq!(keep("24h/10m, 7d/1h").every(), Some(600));
        assert_eq!(keep("24h, 7d/1h").every(), Some(3600));
        assert_eq!(keep("24h").every(), None);
        for text in ["24h", "1d/10m,7d/1h", "90s", "4w/1d", "none"] {
            assert_eq!(keep(&keep(text).to_string()), keep(text), "{text}");
        }
        for text in
            ["", "24", "h", "24h/", "24h/1d", "1h/1h", "24h,", "-1h", "0s", "99999999999999999999d", "1y"]
        {
            assert!(text.parse::<Keep>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_last_ones_are_counted_without_the_present() {
        let keep = Keep { last: 2, ..Keep::default() };
        assert_eq!(keep.kept(&[1, 2, 3, 4]), [false, true, true, true]);
        assert_eq!(keep.kept(&[4]), [true]);
        assert!(keep.kept(&[]).is_empty());
    }

    proptest! {
        /// For any time within a span there is a state to go back to: the one that the replica was at, or, of a grid, the
        /// last one of the same period.
        #[test]
        fn a_span_is_covered(
            gaps in proptest::collection::vec(0u64..2000, 1..60),
            (seconds, every) in (1u64..20_000, prop_oneof![Just(0u64), 1u64..900]),
            ago in 0u64..20_000,
        ) {
            let times: Vec<u64> = gaps.iter().scan(1_000_000, |at, gap| { *at += gap; Some(*at) }).collect();
            let keep = Keep { spans: vec![Span { seconds, every }], ..Keep::default() };
            let kept = keep.kept(&times);
            let wanted = times.last().unwrap() - ago.min(seconds);
            let Some(was) = times.iter().rposition(|at| *at <= wanted) else { return Ok(()) };
            let period = |n: usize| times[n].checked_div(every).unwrap_or(n as u64);
            let last = (was..times.len()).rev().find(|n| period(*n) == period(was)).unwrap();
            prop_assert!(kept[last], "{times:?} {kept:?} {wanted}");
        }

        /// What is dropped once is never wanted again, and a grid keeps one of each period.
        #[test]
        fn a_grid_thins(gaps in proptest::collection::vec(1u64..400, 2..80), every in 1u64..900) {
            let times: Vec<u64> = gaps.iter().scan(5_000_000, |at, gap| { *at += gap; Some(*at) }).collect();
            let keep = Keep { spans: vec![Span { seconds: 1 << 30, every }], ..Keep::default() };
            let mut left: Vec<u64> = Vec::new();
            for at in &times {
                left.push(*at);
                let kept = keep.kept(&left);
                left = left.iter().zip(kept).filter_map(|(at, kept)| kept.then_some(*at)).collect();
            }
            // The same as if all had been judged at once.
            let all = keep.kept(&times);
            let once: Vec<u64> = times.iter().zip(all).filter_map(|(at, kept)| kept.then_some(*at)).collect();
            prop_assert_eq!(&left, &once);
            let mut periods: Vec<u64> = left.iter().map(|at| at / every).collect();
            let count = periods.len();
            periods.dedup();
            prop_assert_eq!(periods.len(), count);
        }
    }
}
