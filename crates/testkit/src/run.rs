//! Running the tools that judge.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::fs::Access;

/// Where a program is, in PATH or among the administrator's tools; each is looked for once.
pub(crate) fn path_of(program: &str) -> Option<PathBuf> {
    static FOUND: LazyLock<Mutex<BTreeMap<String, Option<PathBuf>>>> =
        LazyLock::new(Mutex::default);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    found.entry(program.to_owned()).or_insert_with(|| look_for(program)).clone()
}

fn look_for(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places.find_map(|directory| {
        let place = directory.join(program);
        let is_there = place.is_file() && rustix::fs::access(&place, Access::EXEC_OK).is_ok();
        is_there.then_some(place)
    })
}

/// A command that also finds the administrator's tools, speaks English and reads nothing.
///
/// By its whole path: with a PATH of its own, the standard library forks to start a program that has no
/// slash in its name, and copies the page tables of a large test; otherwise it does without.
pub fn command(program: &str) -> Command {
    let place = if program.contains('/') { None } else { path_of(program) };
    let mut command = Command::new(place.unwrap_or_else(|| program.into()));
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
