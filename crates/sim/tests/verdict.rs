//! How the command ends.

use std::process::{Command, Output};

/// A short run, with what it must cover. The seed makes a filesystem of one device: of several with
/// one uuid, which two such runs at the same time would have, the system takes one for another's.
fn run(at_least: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs-sim"));
    command.args(["--seed", "5", "--runs", "1", "--operations", "100", "--crash-states", "0"]);
    command.args(["--check-one-in", "0", "--fault-one-in", "0"]).args(at_least);
    command.output().unwrap()
}

#[test]
fn command_that_covers_as_much_as_is_wanted_succeeds() {
    let output = run(&["--at-least-operations", "100"]);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn command_that_covers_less_fails_and_says_what() {
    let wanted = ["--at-least-operations", "9000", "--at-least-crash-states", "7"];
    let output = run(&wanted);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("operations, and at least 9000 are wanted"), "{said}");
    assert!(said.contains("0 crash states, and at least 7 are wanted"), "{said}");
    let done = String::from_utf8(output.stdout).unwrap();
    assert!(done.contains("0 runs failed"), "{done}");
}
