//! Human-readable sizes and times.

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A size in bytes with three digits: `1.40 GiB`.
pub fn human_size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else if value < 10.0 {
        format!("{value:.2} {}", UNITS[unit])
    } else if value < 100.0 {
        format!("{value:.1} {}", UNITS[unit])
    } else {
        format!("{value:.0} {}", UNITS[unit])
    }
}

/// A size with three digits, and with the number of bytes if those are not exact: different sizes never look equal.
pub fn exact_size(bytes: u64) -> String {
    let unit = (bytes.max(1).ilog2() / 10 * 10).min(60);
    // Three digits are exact for hundreds of units, and for halves and quarters.
    let whole = bytes >> unit;
    let exact = match whole {
        0..10 => bytes.trailing_zeros() + 2 >= unit,
        10..100 => bytes.trailing_zeros() + 1 >= unit,
        _ => bytes.trailing_zeros() >= unit,
    };
    if exact || unit == 0 { human_size(bytes) } else { format!("{} ({bytes} bytes)", human_size(bytes)) }
}

/// A time in seconds with at least two of its unit: `119 s`, `2 min`, `47 h`, `2 days`.
pub fn human_time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_unit() {
        for (bytes, said) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.50 KiB"),
            (43 << 20, "43.0 MiB"),
            (999 << 30, "999 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human_size(bytes), said);
        }
    }

    #[test]
    fn exact_sizes_that_differ_read_differently() {
        for (bytes, said) in [
            (0, "0 B"),
            (64 << 20, "64.0 MiB"),
            ((64 << 20) + 1, "64.0 MiB (67108865 bytes)"),
            (3 << 19, "1.50 MiB"),
            ((1 << 30) + (1 << 28), "1.25 GiB"),
            ((1 << 30) + 4096, "1.00 GiB (1073745920 bytes)"),
            ((100 << 20) + (1 << 19), "100 MiB (105381888 bytes)"),
        ] {
            assert_eq!(exact_size(bytes), said);
        }
        let mut seen = std::collections::HashSet::new();
        for bytes in (0..4096).chain((1 << 20)..(1 << 20) + 4096) {
            assert!(seen.insert(exact_size(bytes)), "{bytes}");
        }
    }
}
