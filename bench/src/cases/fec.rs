//! From which loss on an erasure code beneath TCP would pay: computed, not measured.
//!
//! What one connection carries with loss follows from the published response functions: that of Reno (Mathis, Semke, Mahdavi and Ott, "The
//! Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", 1997) and that of CUBIC (RFC 9438, section 5), with losses that are
//! independent of each other. A code adds `r` packets to each `k`, any `k` of which restore the block: it takes its share of the line, and
//! leaves TCP the loss of blocks that more than `r` packets are missing of.

use crate::measure::report::{Report, Table};

/// Payload of a packet, in bytes.
const SEGMENT: f64 = 1448.0;
/// Packets of content in a block of the code.
const BLOCK: u64 = 64;

/// A line, in bytes a second and seconds.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    pub rate: f64,
    pub round_trip: f64,
}

/// How TCP answers loss.
#[derive(Clone, Copy)]
enum Response {
    Reno,
    Cubic,
}

impl Response {
    /// Bytes a second of one connection, were the line endless.
    fn rate(self, loss: f64, round_trip: f64) -> f64 {
        let reno = (1.5 / loss).sqrt();
        let window = match self {
            Response::Reno => reno,
            // C is 0.4 and beta 0.7. Where Reno would be faster, CUBIC does as it does.
            Response::Cubic => {
                reno.max((0.4f64 * 3.7 / (4.0 * 0.3)).powf(0.25) * (round_trip / loss).powf(0.75))
            }
        };
        window * SEGMENT / round_trip
    }
}

/// The share of packets that are missing after a code of `r` more packets to each block.
fn left(loss: f64, r: u64) -> f64 {
    let n = BLOCK + r;
    // The chance that exactly none is lost, then one after the other.
    let mut exactly = (1.0 - loss).powf(n as f64);
    let mut missing = 0.0;
    for lost in 1..=n {
        exactly *= (n - lost + 1) as f64 / lost as f64 * loss / (1.0 - loss);
        if lost > r {
            missing += exactly * lost as f64 / n as f64;
        }
    }
    missing
}

/// What so many connections carry, in bytes a second.
fn carried(line: Line, response: Response, connections: f64, loss: f64, r: u64) -> f64 {
    let share = BLOCK as f64 / (BLOCK + r) as f64;
    let missing = left(loss, r).max(1e-15);
    (line.rate * share).min(connections * response.rate(missing, line.round_trip))
}

/// The number of packets with which most is carried, and that; 0 if a code does not pay.
fn best(line: Line, response: Response, connections: f64, loss: f64) -> (u64, f64) {
    let all = (0..=BLOCK).map(|r| (r, carried(line, response, connections, loss, r)));
    all.fold((0, 0.0), |best, now| if now.1 > best.1 * 1.000_001 { now } else { best })
}

/// The least loss with which a code pays.
fn threshold(line: Line, response: Response, connections: f64) -> f64 {
    let (mut low, mut high) = (1e-12f64, 0.5f64);
    for _ in 0..60 {
        let middle = (low * high).sqrt();
        if best(line, response, connections, middle).0 > 0 { high = middle } else { low = middle }
    }
    high
}

/// The table.
pub(crate) fn told(report: &mut Report, line: Line) {
    let ways = [
        ("Reno, 1", Response::Reno, 1.0),
        ("CUBIC, 1", Response::Cubic, 1.0),
        ("Reno, 8", Response::Reno, 8.0),
        ("CUBIC, 8", Response::Cubic, 8.0),
    ];
    let mut columns = vec!["loss"];
    columns.extend(ways.iter().map(|(name, ..)| *name));
    let mut table = Table::new(
        &format!(
            "Computed, not measured: MB/s at {:.0} Mbit/s and {:.0} ms by connections, without a code -> with the best one (packets to {BLOCK})",
            line.rate * 8e-6,
            line.round_trip * 1e3
        ),
        &columns,
    );
    let losses = [
        (1e-6, "0.0001 %"),
        (1e-5, "0.001 %"),
        (1e-4, "0.01 %"),
        (1e-3, "0.1 %"),
        (1e-2, "1 %"),
        (5e-2, "5 %"),
    ];
    for (loss, name) in losses {
        let mut row = vec![name.to_string()];
        for (_, response, connections) in ways {
            let plain = carried(line, response, connections, loss, 0);
            let (r, with) = best(line, response, connections, loss);
            row.push(match r {
                0 => format!("{:.1}", plain / 1e6),
                _ => format!("{:.1} -> {:.1} ({r})", plain / 1e6, with / 1e6),
            });
        }
        table.row(row);
    }
    let mut row = vec!["a code pays from".to_string()];
    row.extend(
        ways.iter()
            .map(|(_, response, count)| format!("{:.1e} %", 100.0 * threshold(line, *response, *count))),
    );
    table.row(row);
    report.table(&table);
}

/// A code for a congestion control without a published response to loss, such as BBR: `kept` is what was measured with the loss, as a part of what
/// was carried without. A code is to leave next to no loss, and takes its share of what is carried without any.
pub(crate) fn told_of_measured(report: &mut Report, name: &str, loss: f64, kept: f64) {
    let r = (0..=BLOCK).find(|&r| left(loss, r) <= 1e-5).unwrap_or(BLOCK);
    let share = BLOCK as f64 / (BLOCK + r) as f64;
    report.line(&format!(
        "computed from what was measured, {name} lost: the link with 8 connections keeps {:.0} % of what it carries without loss; with {r} packets of a \
         code to {BLOCK} it would keep {:.0} % at most: a code {}",
        kept * 100.0,
        share * 100.0,
        // Two runs differ by as much.
        if share > kept * 1.05 { "would pay" } else { "would not pay" }
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: Line = Line { rate: 125e6, round_trip: 0.15 };

    #[test]
    fn responses_as_the_papers_have_them() {
        // RFC 9438, table 1: 10 ms of round trip, windows in packets.
        let window = |response: Response, loss: f64, round_trip: f64| {
            response.rate(loss, round_trip) * round_trip / SEGMENT
        };
        assert!((window(Response::Reno, 1e-4, 0.1) - 122.5).abs() < 0.1);
        let cubic = window(Response::Cubic, 1e-4, 0.1);
        assert!((185.0..190.0).contains(&cubic), "{cubic}");
    }

    #[test]
    fn a_code_leaves_what_it_cannot_restore() {
        assert!((left(0.01, 0) - 0.01).abs() < 1e-12);
        assert!(left(0.01, 4) < 2e-4 && left(0.01, 8) < left(0.01, 4));
    }

    #[test]
    fn a_code_pays_where_loss_holds_tcp_below_the_line() {
        assert_eq!(best(FAR, Response::Cubic, 1.0, 1e-9).0, 0);
        let (r, rate) = best(FAR, Response::Cubic, 1.0, 1e-3);
        assert!(r > 0 && rate > 10.0 * carried(FAR, Response::Cubic, 1.0, 1e-3, 0), "{r} {rate}");
        assert!(threshold(FAR, Response::Cubic, 8.0) > threshold(FAR, Response::Cubic, 1.0));
    }
}
