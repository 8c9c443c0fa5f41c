//! The signals that end a command.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Those that are not ignored: what nohup(1) or a shell has this process ignore stays so, and goes on to the programs that it starts.
///
/// # Errors
/// The system's.
pub fn that_end() -> std::io::Result<Signals> {
    let ignored = ignored_in(&status());
    Signals::new(
        [SIGINT, SIGTERM, SIGHUP].iter().filter(|signal| ignored >> (**signal - 1) & 1 == 0),
    )
}

fn status() -> String {
    ubtrfs_fuse::open_own_proc("status").and_then(std::io::read_to_string).unwrap_or_default()
}

/// A bit for each signal, from 1 on; none where it is not told.
///
/// Source: `SigIgn`, proc_pid_status(5).
fn ignored_in(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_are_ignored_are_read() {
        let status = "Name:\tubtrfs\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored_in(status), 1 | 1 << 12);
        assert_eq!([ignored_in(""), ignored_in("SigIgn:\tx")], [0, 0]);
    }
}
