//! Running the tools that judge.

use std::ffi::OsStr;
use std::process::{Command, Output};

/// A command that also finds the administrator's tools, speaks English and reads nothing.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin")).env("LC_ALL", "C");
    command.stdin(std::process::Stdio::null());
    command
}

/// Runs a command that must succeed, and returns what it wrote to its output.
///
/// # Panics
/// With the command and all it said, if it fails.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = S>) -> String {
    let mut command = command(program);
    command.args(arguments);
    let output = command.output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", transcript(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How a command ended and what it said.
pub(crate) fn transcript(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
