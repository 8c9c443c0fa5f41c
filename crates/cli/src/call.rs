//! What a command at a mount tells the process that does it of its caller, in front of the words of its command line.
//!
//! It is one string: whether the standard output is a terminal, and then, each behind a zero, `NAME=VALUE`. Names that a process of
//! another version does not know are left out by it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use ubtrfs_rt::Time;

use crate::epoch;

const TERMINAL: &[u8] = b"terminal";
const PIPE: &[u8] = b"pipe";
const DEVICE: &[u8] = b"device";
const SHOWN: &[u8] = b"shown";
const READ_ONLY: &[u8] = b"read-only";
const UNMOUNTS: &[u8] = b"unmounts";
const TIME_ZONE: &[u8] = b"time-zone";
const EPOCH: &[u8] = b"epoch";

/// That nothing more of what is in memory becomes durable, however often it is asked for.
pub const STOPPED: &str = "stopped";

/// Who calls.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Call {
    /// The standard output is a terminal.
    pub is_terminal: bool,
    /// The device number of the mount that he means.
    pub device: String,
    /// What of the mount the directory shows that was named, from the top of what is mounted on, as the system's table has it. `None` for the top.
    pub shown: Option<PathBuf>,
    /// The directory that he named, if nothing can be changed there.
    pub read_only: Option<PathBuf>,
    /// He is about to unmount it, and is told by [`STOPPED`] on the standard output where the filesystem has stopped.
    pub unmounts: bool,
    /// His `TZ`.
    pub time_zone: Option<OsString>,
    /// His `SOURCE_DATE_EPOCH`.
    pub epoch: Option<Time>,
}

impl Call {
    /// The string.
    pub fn into_word(self) -> OsString {
        let mut word = if self.is_terminal { TERMINAL } else { PIPE }.to_vec();
        let said = [
            (DEVICE, Some(self.device.into())),
            (SHOWN, self.shown.map(PathBuf::into_os_string)),
            (READ_ONLY, self.read_only.map(PathBuf::into_os_string)),
            (UNMOUNTS, self.unmounts.then(OsString::new)),
            (TIME_ZONE, self.time_zone),
            (EPOCH, self.epoch.map(|time| time.sec.to_string().into())),
        ];
        for (name, value) in said {
            let Some(value) = value else { continue };
            word.push(0);
            word.extend_from_slice(&[name, b"=", value.as_bytes()].concat());
        }
        OsString::from_vec(word)
    }

    /// Reads it.
    pub fn of_word(word: &OsStr) -> Self {
        let mut parts = word.as_bytes().split(|byte| *byte == 0);
        let mut call = Self { is_terminal: parts.next() == Some(TERMINAL), ..Self::default() };
        for part in parts {
            let mut halves = part.splitn(2, |byte| *byte == b'=');
            let (Some(name), Some(value)) = (halves.next(), halves.next()) else { continue };
            let value = OsStr::from_bytes(value).to_owned();
            match name {
                DEVICE => call.device = value.into_string().unwrap_or_default(),
                SHOWN => call.shown = Some(value.into()),
                READ_ONLY => call.read_only = Some(value.into()),
                UNMOUNTS => call.unmounts = true,
                TIME_ZONE => call.time_zone = Some(value),
                EPOCH => call.epoch = value.to_str().and_then(epoch::parse),
                _ => {}
            }
        }
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_read_as_they_were_said_and_other_names_left_out() {
        let shown = PathBuf::from(OsStr::from_bytes(b"/a=b \xff\n"));
        for call in [
            Call::default(),
            Call { is_terminal: true, ..Call::default() },
            Call { shown: Some(shown.clone()), unmounts: true, ..Call::default() },
            Call { device: "0:42".to_owned(), read_only: Some(shown), ..Call::default() },
            Call {
                time_zone: Some(OsString::new()),
                epoch: Some(Time { sec: 7, nsec: 0 }),
                ..Call::default()
            },
        ] {
            assert_eq!(Call::of_word(&call.clone().into_word()), call);
        }
        for (word, expected) in [
            ("terminal", Call { is_terminal: true, ..Call::default() }),
            ("pipe\0new=1\0other\0", Call::default()),
            ("", Call::default()),
        ] {
            assert_eq!(Call::of_word(OsStr::new(word)), expected, "{word}");
        }
    }
}
