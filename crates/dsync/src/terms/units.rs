//! Human-readable sizes, rates and times. The parser of the command line names the option and the value that it cannot read: an error here says
//! how that is written.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) use device::human_size as size;

use crate::failure::Failure;

/// Reads a rate, in bytes a second. A number without a unit that is too low for any use is refused: other programs count in KiB.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        few @ 1..1024 => {
            Err(format!("that is {few} B a second: for {few} KiB or MiB a second, give {few}K or {few}M"))
        }
        rate => Ok(rate),
    }
}

/// Reads `4096`, `4K`, `4KiB`, `1.5M`, `10MB` (of 1000) …; bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let wrong = || "use a form like 4096, 4K, 1.5M or 2GiB".to_owned();
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().trim_end_matches("/s");
    let scale = |base: f64| -> Option<f64> {
        let power = match unit.chars().next().map(|c| c.to_ascii_uppercase()) {
            None | Some('B') => 0,
            Some('K') => 1,
            Some('M') => 2,
            Some('G') => 3,
            Some('T') => 4,
            Some('P') => 5,
            _ => return None,
        };
        Some(base.powi(power))
    };
    let base = match unit.get(1..).unwrap_or("") {
        "" | "iB" | "ib" => 1024.0,
        "B" | "b" => 1000.0,
        _ => return Err(wrong()),
    };
    let bytes = number * scale(base).ok_or_else(wrong)?;
    if !(0.0..=1e19).contains(&bytes) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// Refuses a rate of zero.
pub(crate) fn check_rates(rates: &[(&str, Option<u64>)]) -> Result<(), Failure> {
    match rates.iter().find(|(_, rate)| *rate == Some(0)) {
        Some((name, _)) => Err(Failure::usage(format!("{name} needs a rate above zero, such as 10M"))),
        None => Ok(()),
    }
}

/// Reads `OFFSET:LEN`, both as [`parse_size`] does; the range of bytes.
pub(crate) fn parse_range(text: &str) -> Result<std::ops::Range<u64>, String> {
    let wrong = || "use OFFSET:LEN, such as 1G:64M".to_owned();
    let (offset, len) = text.split_once(':').ok_or_else(wrong)?;
    let (offset, len) = (parse_size(offset)?, parse_size(len)?);
    let end = offset.checked_add(len).filter(|_| len > 0).ok_or_else(wrong)?;
    Ok(offset..end)
}

/// Reads `30ms`, `1.5s`, `2m`, `1h`, `7d` or `4w`; a number alone is one of seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let wrong = || "use a form like 30ms, 10, 5s, 2m, 1h or 7d".to_owned();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..split].parse().map_err(|_| wrong())?;
    let scale = match text[split..].trim() {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 604_800.0,
        _ => return Err(wrong()),
    };
    let seconds = number * scale;
    if !(1e-3..=1e8).contains(&seconds) {
        return Err("give a time from 1ms to 1000d".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Reads how long a peer may be silent.
pub(crate) fn parse_timeout(text: &str) -> Result<Duration, String> {
    match parse_period(text) {
        Err(_) if text.trim().trim_end_matches(char::is_alphabetic) == "0" => {
            Err("it cannot be turned off: give a time from 1s to 1h, such as 30s".to_owned())
        }
        other => other,
    }
}

/// Reads a time from a second to an hour.
pub(crate) fn parse_period(text: &str) -> Result<Duration, String> {
    within(text, 3600).ok_or_else(|| "give a time from 1s to 1h, such as 30s".to_owned())
}

/// Reads how long a file system may be frozen.
pub(crate) fn parse_freeze(text: &str) -> Result<Duration, String> {
    within(text, 300).ok_or_else(|| "give a time from 1s to 5m, such as 10s".to_owned())
}

/// A time of a second up to so many.
fn within(text: &str, most: u64) -> Option<Duration> {
    parse_time(text).ok().filter(|time| (Duration::from_secs(1)..=Duration::from_secs(most)).contains(time))
}

/// Reads a whole number of a range.
pub(crate) fn number<N>(range: RangeInclusive<N>) -> impl Fn(&str) -> Result<N, String> + Clone
where
    N: FromStr + Display + PartialOrd + Clone,
{
    move |text| {
        let found = text.trim().parse().ok().filter(|number| range.contains(number));
        found.ok_or_else(|| format!("give a whole number from {} to {}", range.start(), range.end()))
    }
}

/// Reads a number from 0 to 1.
pub(crate) fn parse_factor(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(factor) if (0.0..=1.0).contains(&factor) => Ok(factor),
        _ => Err("give a number from 0 to 1".to_owned()),
    }
}

/// Reads `90d` or `12h` from now, or a date; seconds since 1970.
pub(crate) fn parse_expiry(text: &str) -> Result<u64, String> {
    let wrong = || "use a form like 90d or 12h, or a date such as 2027-03-01".to_owned();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    for (unit, seconds) in [('d', DAY), ('h', 3600), ('m', 60), ('s', 1)] {
        if let Some(count) = text.strip_suffix(unit) {
            let count: u64 = count.parse().map_err(|_| wrong())?;
            return count.checked_mul(seconds).and_then(|time| now.checked_add(time)).ok_or_else(wrong);
        }
    }
    let mut parts = text.split('-').map(|part| part.parse::<u32>().ok());
    let (Some(Some(year @ 1970..=9999)), Some(Some(month @ 1..=12)), Some(Some(day @ 1..=31)), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(wrong());
    };
    let time = day_number(year, month, day) * DAY;
    // Such as the 30th of February.
    if date(time) == format!("{year:04}-{month:02}-{day:02}") { Ok(time) } else { Err(wrong()) }
}

/// Reads `2026-11-22 13:05` or `2026-11-22T13:05Z`, with or without seconds or a time, in UTC, `10 minutes ago`, or `now`; seconds
/// since 1970. A minute without seconds, as lists show it, is meant to its end.
pub(crate) fn parse_moment(text: &str, now: u64) -> Result<u64, String> {
    let wrong = || {
        format!(
            "invalid moment \"{text}\": use an epoch, a time in UTC such as \"2026-11-22 13:05\", or \"10 minutes ago\""
        )
    };
    if let Some(ago) = text.trim().strip_suffix("ago") {
        let ago = ago.trim();
        let split = ago.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let unit = ago[split..].trim();
        let units = ["second", "minute", "hour", "day", "week"];
        let found = units.iter().zip([1, 60, 3600, DAY, 7 * DAY]).find(|(name, _)| {
            unit == **name
                || unit.strip_suffix('s') == Some(name)
                || (unit.len() == 1 && name.starts_with(unit))
        });
        let (number, (_, seconds)) =
            (ago[..split].parse::<u64>().map_err(|_| wrong())?, found.ok_or_else(wrong)?);
        return number.checked_mul(seconds).and_then(|ago| now.checked_sub(ago)).ok_or_else(wrong);
    }
    let text = text.trim();
    if text == "now" {
        return Ok(now);
    }
    let text = text.strip_suffix("UTC").or(text.strip_suffix('Z')).unwrap_or(text).trim_end();
    let (date, time) = text.split_once([' ', 'T']).unwrap_or((text, "00:00:00"));
    let mut parts = time.split(':').map(|part| part.parse::<u64>().ok().filter(|_| part.len() == 2));
    let (Some(Some(hour @ 0..24)), Some(Some(minute @ 0..60)), second, None) =
        (parts.next(), parts.next(), parts.next().unwrap_or(Some(59)), parts.next())
    else {
        return Err(wrong());
    };
    let second = second.filter(|second| *second < 60).ok_or_else(wrong)?;
    let day = Some(date).filter(|date| date.contains('-')).and_then(|date| parse_expiry(date).ok());
    Ok(day.ok_or_else(wrong)? + hour * 3600 + minute * 60 + second)
}

const DAY: u64 = 86_400;

/// Days from 1970 to a date. Years are counted from March, so that the leap day is the last of a year.
fn day_number(year: u32, month: u32, day: u32) -> u64 {
    let year = u64::from(year) - u64::from(month < 3);
    let of_year = (153 * u64::from((month + 9) % 12) + 2) / 5 + u64::from(day) - 1;
    // 719 468 days lie between March of the year 0 and 1970.
    (365 * year + year / 4 - year / 100 + year / 400 + of_year).saturating_sub(719_468)
}

/// The date of a time in seconds since 1970: `2027-03-01`, in UTC.
pub(crate) fn date(time: u64) -> String {
    let day = time / DAY;
    // The first guess is at most one too large.
    let mut year = 1970 + u32::try_from(day / 365).unwrap_or(u32::MAX - 1970);
    while day_number(year, 1, 1) > day {
        year -= 1;
    }
    let month = (1..=12).rev().find(|month| day_number(year, *month, 1) <= day).unwrap_or(1);
    format!("{year:04}-{month:02}-{:02}", day - day_number(year, month, 1) + 1)
}

/// `0.42 s`, `3 min 5 s`, `2 h 10 min`.
pub(crate) fn seconds(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..60 => format!("{seconds:.2} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// `12 345 678`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// `1 extent`, `2 048 extents`.
pub(crate) fn many(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", count(number))
}

/// How long ago a time is, in seconds since 1970.
pub(crate) fn age(time: u64) -> String {
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
    match now.saturating_sub(time) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} minutes ago", seconds / 60),
        seconds @ 7200..172_800 => format!("{} hours ago", seconds / 3600),
        seconds => format!("{} days ago", seconds / 86_400),
    }
}

/// Seconds by which clocks that are set may go back.
const SET_BACK: u64 = 60;

/// How long ago this was, in seconds; `None` for a time that is still to come, as of a clock that was wrong.
pub(crate) fn elapsed(time: u64, now: u64) -> Option<u64> {
    (time <= now + SET_BACK).then(|| now.saturating_sub(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let said = [0, 1, 2048].map(|number| many(number, "block"));
        assert_eq!(said, ["0 blocks", "1 block", "2 048 blocks"]);
    }

    #[test]
    fn a_timeout_is_a_time_or_seconds() {
        for (text, seconds) in [("30", 30), ("30s", 30), ("2m", 120), ("1h", 3600), ("1", 1)] {
            assert_eq!(parse_timeout(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "0", "999ms", "3601", "2h", "-1", "thirty", "30x", "99999999999999999999"] {
            assert!(parse_timeout(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("1.5M", 1_572_864),
            ("10MB", 10_000_000),
            ("2GiB", 2 << 30),
            ("64T", 64 << 40),
            ("1M/s", 1 << 20),
            ("512B", 512),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "four", "4X", "4KK", "-1", "1e30", "99999999P"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (text, time) in [
            ("1970-01-01", 0),
            ("1999-12-31", 946_598_400),
            ("2000-02-29", 951_782_400),
            ("2000-03-01", 951_868_800),
            ("2026-11-21", 1_795_219_200),
            ("9999-12-31", 253_402_214_400),
        ] {
            assert_eq!(parse_expiry(text), Ok(time), "{text}");
            assert_eq!(date(time + DAY - 1), text);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!((now + 90 * DAY..=now + 90 * DAY + 5).contains(&parse_expiry("90d").unwrap()));
        for text in [
            "",
            "d",
            "90",
            "-1d",
            "2026-02-29",
            "2026-13-01",
            "2026-1",
            "1969-12-31",
            "99999999999999999999d",
        ] {
            assert!(parse_expiry(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_one_form_and_numbers_a_range() {
        for (text, seconds) in
            [("10", 10.0), ("10s", 10.0), ("1.5m", 90.0), ("1h", 3600.0), ("7d", 604_800.0), ("30ms", 0.03)]
        {
            assert_eq!(parse_time(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        assert_eq!(parse_period("0").unwrap_err(), "give a time from 1s to 1h, such as 30s");
        assert_eq!(parse_timeout("x"), parse_period("x"));
        for zero in ["0", "0s", "0m"] {
            assert!(parse_timeout(zero).unwrap_err().starts_with("it cannot be turned off: "), "{zero}");
        }
        assert_eq!(number(1..=16u8)("16"), Ok(16));
        for wrong in ["0", "17", "x", "", "1.5", "-1", "999999"] {
            assert_eq!(number(1..=16u8)(wrong).unwrap_err(), "give a whole number from 1 to 16", "{wrong}");
        }
    }

    #[test]
    fn moments_are_written_as_people_write_them() {
        let now = 1_795_352_700;
        for (text, time) in [
            ("2026-11-22 13:05", 1_795_352_759),
            ("2026-11-22 13:05:00", 1_795_352_700),
            ("2026-11-22 13:05:59 UTC", 1_795_352_759),
            ("2026-11-22T13:05", 1_795_352_759),
            ("2026-11-22T13:05:59Z", 1_795_352_759),
            ("now", now),
            ("2026-11-22", 1_795_305_600),
            ("10 minutes ago", now - 600),
            ("1 minute ago", now - 60),
            ("2h ago", now - 7200),
            (" 3 days ago ", now - 3 * DAY),
        ] {
            assert_eq!(parse_moment(text, now), Ok(time), "{text}");
        }
        for text in [
            "",
            "ago",
            "10 ago",
            "ten minutes ago",
            "5 years ago",
            "13:05",
            "2026-11-22 25:00",
            "2026-11-22 1:05",
            "2026-02-30 13:05",
            "2026-11-22 13:05:60",
            "2026-11-22 13:05:00:00",
            "99999999999999999 weeks ago",
            "90d",
            "90d 10:00",
        ] {
            assert!(parse_moment(text, now).is_err(), "{text}");
        }
    }

    #[test]
    fn ranges_are_an_offset_and_a_length() {
        assert_eq!(parse_range("1M:4K"), Ok(1 << 20..(1 << 20) + 4096));
        assert_eq!(parse_range("0:1"), Ok(0..1));
        for text in ["", "1M", "1M:", ":4K", "0:0", "1:2:3", "15E:9E", "1-2"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn figures_are_written_as_people_read_them() {
        assert_eq!(seconds(0.421), "0.42 s");
        assert_eq!(seconds(185.0), "3 min 5 s");
        assert_eq!(seconds(7800.0), "2 h 10 min");
        assert_eq!(count(12_345_678), "12 345 678");
    }
}
