//! Human-readable times.

/// Times in seconds since 1970, as [`moment`] says each; with the second where two are of one minute.
pub fn moments(times: &[u64]) -> Vec<String> {
    let shared = |time: &u64| times.iter().any(|other| other / 60 == time / 60 && other != time);
    let exact = |time: &u64| {
        let minute = moment(*time);
        format!("{}:{:02} UTC", minute.trim_end_matches(" UTC"), *time % 60)
    };
    times.iter().map(|time| if shared(time) { exact(time) } else { moment(*time) }).collect()
}

/// A time in seconds since 1970: `2027-03-01 14:02 UTC`.
pub fn moment(time: u64) -> String {
    const DAY: u64 = 86_400;
    let (minute, mut days) = (time % DAY / 60, time / DAY);
    let leap = |year: u64| (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    // The calendar repeats after 400 years.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        (days, month) = (days - length, month + 1);
    }
    format!("{year:04}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, minute / 60, minute % 60)
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_of_one_minute_are_told_apart() {
        let said = super::moments(&[60, 61, 61, 180]);
        let one = "1970-01-01 00:01:01 UTC";
        assert_eq!(said, ["1970-01-01 00:01:00 UTC", one, one, "1970-01-01 00:03 UTC"]);
    }

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (time, said) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_767_225_599, "2025-12-31 23:59 UTC"),
            (1_803_909_720, "2027-03-01 14:02 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(super::moment(time), said);
        }
        assert!(!super::moment(u64::MAX).is_empty());
    }
}
