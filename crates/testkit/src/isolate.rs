//! Programs run with limits on time and memory: bad input must not make them hang or swell.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::run::{command, transcript};

/// What a program may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Time, after which it is killed.
    pub seconds: u32,
    /// Address space; an allocation beyond fails.
    pub memory_bytes: u64,
}

/// How a program ended under limits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ending {
    /// By itself, with this code.
    Exited(i32),
    /// Its time was up.
    TimedOut,
    /// By a signal, as a failed allocation or a stack overflow raises.
    Killed,
}

/// Runs a program under limits; returns how it ended and all that it said.
///
/// # Panics
/// If it cannot be started.
pub fn run_limited<S: AsRef<OsStr>>(
    program: &OsStr,
    arguments: impl IntoIterator<Item = S>,
    environment: &[(&str, &OsStr)],
    limits: Limits,
) -> (Ending, String) {
    let mut limited: Command = command("timeout");
    limited
        .args(["--signal=KILL", &limits.seconds.to_string(), "sh", "-c"])
        .arg(format!("ulimit -v {}; exec \"$@\"", limits.memory_bytes / 1024))
        .arg("sh")
        .arg(program)
        .args(arguments)
        .envs(environment.iter().copied());
    let output = limited.output().expect("timeout can be started");
    // `timeout` ends by the signal that ended what it ran.
    let ending = match (output.status.code(), output.status.signal()) {
        (Some(code), _) if code <= 128 => Ending::Exited(code),
        (Some(137), _) | (None, Some(9)) => Ending::TimedOut,
        _ => Ending::Killed,
    };
    (ending, transcript(&output))
}
