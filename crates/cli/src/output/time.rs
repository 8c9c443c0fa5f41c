//! Times as coreutils prints them, in the user's time zone, and as JSON carries them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::fs::OFlags;
use ubtrfs_rt::Time;

use crate::live;

/// Where the system has time zones by name, and the machine's own.
const ZONES: &str = "/usr/share/zoneinfo";
const MACHINES: &str = "/etc/localtime";
/// Bytes of a file of one at most.
const ZONE_BYTES_MAX: u64 = 1 << 20;

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
        Self { zone: zone(), now: ubtrfs_rt::Clock::System.now() }
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

/// Reads a time: a date, with or without a time of day in the user's time zone, RFC 3339, or
/// seconds since 1970 behind an `@`.
pub fn parse(text: &str) -> Result<Time, String> {
    let wrong = || format!("'{text}' is no time such as 2024-11-20 12:19:05 or @1700000000");
    let timestamp = match text.strip_prefix('@') {
        Some(seconds) => seconds_since_1970(seconds),
        None => text.parse::<Timestamp>().ok().or_else(|| {
            let civil: jiff::civil::DateTime = text.parse().ok()?;
            Some(civil.to_zoned(zone()).ok()?.timestamp())
        }),
    };
    let nanoseconds = timestamp.ok_or_else(wrong)?.as_nanosecond();
    let nsec = u32::try_from(nanoseconds.rem_euclid(1_000_000_000)).map_err(|_| wrong())?;
    let sec = i64::try_from(nanoseconds.div_euclid(1_000_000_000)).map_err(|_| wrong())?;
    Ok(Time { sec, nsec })
}

/// The user's time zone: of who calls this process, or at a mount of who has the command done.
fn zone() -> TimeZone {
    match live::served() {
        Some(live) => zone_of(live.call.time_zone.as_deref()),
        None => zone_of(std::env::var_os("TZ").as_deref()),
    }
}

/// What `TZ` says, as tzset(3) reads it: a name below the system's directory of time zones, a file's path, or rules as POSIX has them. UTC for
/// what is none of these, and the machine's time zone where it is not set.
fn zone_of(said: Option<&OsStr>) -> TimeZone {
    let file_of = |path: &Path| {
        // The name is the caller's: it may be a pipe's, which who opens it would wait at.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.ok().filter(|file| {
            file.metadata().is_ok_and(|about| about.is_file() && about.len() <= ZONE_BYTES_MAX)
        });
        let mut bytes = Vec::new();
        file?.take(ZONE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        TimeZone::tzif("", &bytes).ok()
    };
    let Some(said) = said else { return file_of(Path::new(MACHINES)).unwrap_or(TimeZone::UTC) };
    let name = said.as_bytes();
    let name = OsStr::from_bytes(name.strip_prefix(b":").unwrap_or(name));
    if name.is_empty() {
        return TimeZone::UTC;
    }
    file_of(&Path::new(ZONES).join(name))
        .or_else(|| TimeZone::posix(said.to_str()?).ok())
        .unwrap_or(TimeZone::UTC)
}

fn seconds_since_1970(text: &str) -> Option<Timestamp> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if fraction.len() > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanoseconds: i64 = format!("{fraction:0<9}").parse().ok()?;
    // `-1.5` lies before -1.
    let nanoseconds = if whole.starts_with('-') { -nanoseconds } else { nanoseconds };
    let fraction = jiff::SignedDuration::from_nanos(nanoseconds);
    Timestamp::new(seconds, 0).ok()?.checked_add(fraction).ok()
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
    fn time_zones_are_read_as_the_variable_says() {
        let now = Time { sec: 0, nsec: 0 };
        let at = |said: &str| {
            Calendar { zone: zone_of(Some(OsStr::new(said))), now }
                .full(Time { sec: 1_720_000_000, nsec: 0 })
        };
        for (said, expected) in [
            ("", "09:46:40.000000000 +0000"),
            ("UTC0", "09:46:40.000000000 +0000"),
            ("<+05>-5", "14:46:40.000000000 +0500"),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "11:46:40.000000000 +0200"),
            ("no such zone", "09:46:40.000000000 +0000"),
            ("/etc/hostname", "09:46:40.000000000 +0000"),
        ] {
            assert_eq!(at(said), format!("2024-07-03 {expected}"), "{said}");
        }
        // Who looked for what is in it waited for somebody to write it: at a mount, the thread that takes commands.
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(at(pipe.to_str().unwrap()), "2024-07-03 09:46:40.000000000 +0000");
        let file = Path::new(ZONES).join("Asia/Kolkata");
        if file.exists() {
            for said in ["Asia/Kolkata", ":Asia/Kolkata", file.to_str().unwrap()] {
                assert_eq!(at(said), "2024-07-03 15:16:40.000000000 +0530", "{said}");
            }
        }
    }

    #[test]
    fn full_and_rfc3339_carry_nanoseconds_and_negative_times() {
        let time = Time { sec: -1, nsec: 5 };
        assert_eq!(utc(0).full(time), "1969-12-31 23:59:59.000000005 +0000");
        assert_eq!(rfc3339(time), "1969-12-31T23:59:59.000000005Z");
    }

    #[test]
    fn parse_reads_what_the_help_names() {
        let time = |sec, nsec| Ok(Time { sec, nsec });
        assert_eq!(parse("@1700000000"), time(1_700_000_000, 0));
        assert_eq!(parse("@-1.5"), time(-2, 500_000_000));
        assert_eq!(parse("1969-12-31T23:59:59.5Z"), time(-1, 500_000_000));
        assert_eq!(parse("2024-11-20T12:19:05+01:00"), time(1_732_101_545, 0));
        for text in ["2024-11-20", "2024-11-20 12:19", "2024-11-20T12:19:05.123456789"] {
            assert!(parse(text).is_ok(), "{text}");
        }
        for text in ["", "tomorrow", "@", "@x", "@1.0000000001", "2024-13-01", "12:19"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rfc3339_out_of_calendar_gives_seconds() {
        assert_eq!(rfc3339(Time { sec: i64::MAX, nsec: 7 }), "9223372036854775807.000000007");
    }
}
