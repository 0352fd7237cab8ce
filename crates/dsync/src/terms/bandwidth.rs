//! The value of `--bwlimit`: one rate, or one for each part of the day.

use crate::terms::units;

/// Minutes of a day.
const DAY: u16 = 24 * 60;

/// What may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendRate {
    /// As much as there is.
    All,
    /// Bytes a second.
    Rate(u64),
    /// Nothing.
    Nothing,
}

/// A part of the day, from a minute up to another one, which may be of the next day.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hours {
    from: u16,
    to: u16,
    allowed: SendRate,
}

/// A limit on what is sent, by the time of the day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bandwidth {
    hours: Vec<Hours>,
    otherwise: SendRate,
}

impl Bandwidth {
    /// Reads `10M`, or `08:00-18:00=10M,22:00-06:00=off,else=50M`.
    pub(crate) fn parse(text: &str) -> Result<Bandwidth, String> {
        if !text.contains('=') {
            return match allowed(text)? {
                SendRate::Nothing => Err("pause needs hours: use a form like 08:00-18:00=pause".into()),
                otherwise => Ok(Bandwidth { hours: Vec::new(), otherwise }),
            };
        }
        let mut parsed = Bandwidth { hours: Vec::new(), otherwise: SendRate::All };
        let mut parts = text.split(',').peekable();
        while let Some(part) = parts.next() {
            let wrong = || "use a form like 10M, or 08:00-18:00=10M,else=off".to_owned();
            let (when, rate) = part.split_once('=').ok_or_else(wrong)?;
            let allowed = allowed(rate)?;
            match when.trim() {
                "else" if parts.peek().is_none() => parsed.otherwise = allowed,
                "else" => return Err("\"else\" is for all other hours: write it last".into()),
                when => {
                    let (from, to) = when.split_once('-').ok_or_else(wrong)?;
                    let minute = |text: &str| minute(text).ok_or_else(wrong);
                    let (from, to) = (minute(from)?, minute(to)?);
                    if from == to || from == DAY {
                        return Err(wrong());
                    }
                    parsed.hours.push(Hours { from, to, allowed });
                }
            }
        }
        Ok(parsed)
    }

    /// What may be sent at a minute of the day: what the first hours that hold it say.
    pub(crate) fn at(&self, minute: u16) -> SendRate {
        let holds = |hours: &&Hours| match hours.from < hours.to {
            true => (hours.from..hours.to).contains(&minute),
            false => minute >= hours.from || minute < hours.to,
        };
        self.hours.iter().find(holds).map_or(self.otherwise, |hours| hours.allowed)
    }

    /// The next minute of the day at which something may be sent; `None` if there is none.
    pub(crate) fn paused_until(&self, minute: u16) -> Option<u16> {
        (1..=DAY).map(|later| (minute + later) % DAY).find(|at| self.at(*at) != SendRate::Nothing)
    }

    /// True if it is not the same all day.
    pub(crate) fn varies(&self) -> bool {
        !self.hours.is_empty()
    }

    /// True if nothing may be sent at some hour.
    pub(crate) fn pauses(&self) -> bool {
        self.otherwise == SendRate::Nothing
            || self.hours.iter().any(|hours| hours.allowed == SendRate::Nothing)
    }
}

/// A minute of the day in `HH:MM`; 24:00 is its end.
fn minute(text: &str) -> Option<u16> {
    let (hour, minute) = text.trim().split_once(':')?;
    let number = |text: &str| text.parse::<u16>().ok().filter(|_| text.len() == 2);
    let (hour, minute) = (number(hour)?, number(minute)?);
    let at = hour * 60 + minute;
    (minute < 60 && at <= DAY).then_some(at)
}

/// Reads `10M`, `off` or `pause`.
fn allowed(text: &str) -> Result<SendRate, String> {
    match text.trim() {
        "off" => Ok(SendRate::All),
        "pause" => Ok(SendRate::Nothing),
        rate => match units::parse_rate(rate)? {
            0 => Err("give a rate above zero, such as 10M".into()),
            rate => Ok(SendRate::Rate(rate)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str, time: &str) -> SendRate {
        Bandwidth::parse(text).unwrap().at(minute(time).unwrap())
    }

    #[test]
    fn each_hour_has_its_limit() {
        let day = "08:00-18:00=10M,22:30-06:00=pause,else=off";
        for (time, allowed) in [
            ("07:59", SendRate::All),
            ("08:00", SendRate::Rate(10 << 20)),
            ("17:59", SendRate::Rate(10 << 20)),
            ("18:00", SendRate::All),
            ("22:29", SendRate::All),
            ("22:30", SendRate::Nothing),
            ("00:00", SendRate::Nothing),
            ("05:59", SendRate::Nothing),
            ("06:00", SendRate::All),
        ] {
            assert_eq!(at(day, time), allowed, "{time}");
        }
        assert_eq!(at("10M", "12:00"), SendRate::Rate(10 << 20));
        assert_eq!(at("off", "12:00"), SendRate::All);
        assert_eq!(at("00:00-24:00=1K", "23:59"), SendRate::Rate(1024));
        assert_eq!(at("08:00-18:00=10M", "20:00"), SendRate::All, "without else");
        assert_eq!(at("08:00-18:00=1K,12:00-13:00=2K", "12:30"), SendRate::Rate(1024), "the first one");
    }

    #[test]
    fn a_pause_has_an_end() {
        let until = |text: &str, time| Bandwidth::parse(text).unwrap().paused_until(minute(time).unwrap());
        assert_eq!(until("22:30-06:00=pause", "23:00"), minute("06:00"));
        assert_eq!(until("22:30-06:00=pause,06:00-07:00=pause", "23:00"), minute("07:00"));
        assert_eq!(until("08:00-18:00=1M,else=pause", "18:00"), minute("08:00"));
        assert_eq!(until("00:00-24:00=pause", "18:00"), None);
    }

    #[test]
    fn what_is_wrong_is_refused() {
        for text in [
            "",
            "0",
            "10",
            "1023",
            "08:00-18:00=500,else=off",
            "pause",
            "fast",
            "08:00=1M",
            "8:00-18:00=1M",
            "08:00-18:60=1M",
            "08:00-25:00=1M",
            "24:00-08:00=1M",
            "08:00-08:00=1M",
            "08:00-18:00=",
            "08:00-18:00=0",
            "else=1M,08:00-18:00=2M",
            "08:00-18:00=1M,",
            "10M,else=off",
        ] {
            assert!(Bandwidth::parse(text).is_err(), "{text}");
        }
    }
}
