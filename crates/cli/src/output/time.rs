//! Times as coreutils prints them, in the user's time zone, and as JSON carries them.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ubtrfs_rt::Time;

/// Half a mean Gregorian year: past it, `ls -l` shows the year and not the time.
const RECENT_SECONDS: i64 = 31_556_952 / 2;

/// A time zone and the moment from which "recent" counts.
pub struct Calendar {
    zone: TimeZone,
    now: Time,
}

impl Calendar {
    /// The user's, now.
    pub fn system() -> Self {
        Self { zone: TimeZone::system(), now: ubtrfs_rt::Clock::System.now() }
    }

    /// Twelve columns as in `ls -l`: `Nov 20 12:19`, or `Nov 20  2024` when it is not recent.
    pub fn short(&self, time: Time) -> String {
        let recent = time <= self.now && time.sec > self.now.sec - RECENT_SECONDS;
        self.format(time, if recent { "%b %e %H:%M" } else { "%b %e  %Y" })
    }

    /// As `stat` prints it: `2024-11-20 12:19:05.123456789 +0000`.
    pub fn full(&self, time: Time) -> String {
        self.format(time, "%Y-%m-%d %H:%M:%S.%9f %z")
    }

    fn format(&self, time: Time, format: &str) -> String {
        match timestamp(time) {
            Some(timestamp) => timestamp.to_zoned(self.zone.clone()).strftime(format).to_string(),
            None => raw(time),
        }
    }
}

/// RFC 3339 in UTC with nanoseconds; seconds since 1970 where the year has more than four digits.
pub fn rfc3339(time: Time) -> String {
    match timestamp(time) {
        Some(timestamp) => timestamp.strftime("%Y-%m-%dT%H:%M:%S.%9fZ").to_string(),
        None => raw(time),
    }
}

fn timestamp(time: Time) -> Option<Timestamp> {
    // Times before 1970 count their nanoseconds upward from the second below, here as on disk.
    Timestamp::new(time.sec, 0)
        .ok()?
        .checked_add(jiff::SignedDuration::from_nanos(i64::from(time.nsec)))
        .ok()
}

fn raw(time: Time) -> String {
    format!("{}.{:09}", time.sec, time.nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utc(now_sec: i64) -> Calendar {
        Calendar { zone: TimeZone::UTC, now: Time { sec: now_sec, nsec: 0 } }
    }

    #[test]
    fn short_recent_shows_time_and_older_shows_year() {
        let calendar = utc(1_700_000_000);
        let at = |sec| calendar.short(Time { sec, nsec: 0 });
        assert_eq!(at(1_699_999_000), "Nov 14 21:56");
        assert_eq!(at(1_600_000_000), "Sep 13  2020");
        assert_eq!(at(1_800_000_000), "Jan 15  2027");
    }

    #[test]
    fn full_and_rfc3339_carry_nanoseconds_and_negative_times() {
        let time = Time { sec: -1, nsec: 5 };
        assert_eq!(utc(0).full(time), "1969-12-31 23:59:59.000000005 +0000");
        assert_eq!(rfc3339(time), "1969-12-31T23:59:59.000000005Z");
    }

    #[test]
    fn rfc3339_out_of_calendar_gives_seconds() {
        assert_eq!(rfc3339(Time { sec: i64::MAX, nsec: 7 }), "9223372036854775807.000000007");
    }
}
