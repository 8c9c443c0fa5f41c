//! `btrfs check` as a judge.

mod devices;
mod extended_refs;
mod half_dropped;
mod inline_gaps;

use std::path::{Path, PathBuf};

use crate::oracle;
use crate::run::{command, transcript};

pub use devices::{assert_checks_clean_whatever_it_holds, clear_free_space_tree};
pub use extended_refs::{assert_checks_clean_but_for_extended_refs, has_extended_refs};
pub use half_dropped::{assert_checks_clean_but_for_half_dropped, half_dropped_roots};

/// How `btrfs check` looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckMode {
    /// Its first mode.
    Original,
    /// Its second implementation, which finds other things.
    Lowmem,
    /// The first, and every data checksum besides.
    DataCsum,
}

impl CheckMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Original, Self::Lowmem, Self::DataCsum];
}

/// What `btrfs check` said.
#[derive(Clone, Debug)]
pub struct CheckOutcome {
    /// Whether it found nothing, in its exit code and in its words.
    pub is_clean: bool,
    /// Everything it said.
    pub transcript: String,
}

/// Runs the installed `btrfs check` on an image or device, read-only.
///
/// # Panics
/// If it cannot be started.
pub fn btrfs_check(image: &Path, mode: CheckMode) -> CheckOutcome {
    btrfs_check_by(Path::new("btrfs"), image, mode)
}

/// Times that a check is tried again whose start was disturbed.
const RETRIES_MAX: usize = 20;

fn btrfs_check_by(program: &Path, image: &Path, mode: CheckMode) -> CheckOutcome {
    let mut command = command(program.to_str().expect("the program's path is text"));
    command.args(["check", "--readonly"]);
    match mode {
        CheckMode::Original => {}
        CheckMode::Lowmem => _ = command.arg("--mode=lowmem"),
        CheckMode::DataCsum => _ = command.arg("--check-data-csum"),
    }
    command.arg(image);
    let mut output = command.output().expect("btrfs can be started");
    for _ in 0..RETRIES_MAX {
        // It looks through all loop devices, of which another test may just detach one.
        let said = transcript(&output);
        let is_by_others =
            said.contains("could not check mount status") || said.lines().any(is_of_others);
        if !is_by_others {
            break;
        }
        output = command.output().expect("btrfs can be started");
    }
    let transcript = transcript(&output);
    // Some complaints leave the exit code at 0.
    let is_clean = output.status.success() && complaints(&transcript).is_empty();
    CheckOutcome { is_clean, transcript }
}

fn complaints(transcript: &str) -> Vec<&str> {
    transcript.lines().filter(|line| is_complaint(line)).collect()
}

/// Of a device of another test that just goes. Where it needs that one, it says more.
fn is_of_others(line: &str) -> bool {
    line.contains("cannot scan /dev/loop") || line.contains("cannot open /dev/loop")
}

fn is_complaint(line: &str) -> bool {
    let line = line.trim_start();
    ["ERROR", "error:", "WARNING", "warning:", "mismatch", "bad ", "checksum verify failed"]
        .iter()
        .any(|word| line.starts_with(word))
        // What it always says of the checksum mode and of the free space tree is not one.
        && !line.contains("is experimental")
        && !is_of_others(line)
        || line.contains("has wrong")
        || line.contains("errors found in")
        || line.contains("cache and super generation don't match")
}

/// Runs `btrfs check` in all its modes, and a newer one too where it was fetched.
///
/// # Panics
/// With what it said, if any finds anything.
pub fn assert_checks_clean(image: &Path) {
    for (mode, outcome) in btrfs_checks(image, &CheckMode::ALL) {
        assert!(
            outcome.is_clean,
            "btrfs check {mode:?} {}: {}",
            image.display(),
            outcome.transcript
        );
    }
}

/// What each `btrfs check` that there is says in each of some modes, one after the other.
fn btrfs_checks<'a>(
    image: &'a Path,
    modes: &'a [CheckMode],
) -> impl Iterator<Item = (CheckMode, CheckOutcome)> + 'a {
    let newer = oracle::new_btrfs_progs().map(|directory| directory.join("bin/btrfs"));
    let installed = modes.iter().map(|mode| (PathBuf::from("btrfs"), *mode));
    let newer = newer.into_iter().flat_map(|program| {
        // It reads data no otherwise than the installed one.
        let others = modes.iter().filter(|mode| **mode != CheckMode::DataCsum);
        others.map(move |mode| (program.clone(), *mode))
    });
    installed.chain(newer).map(move |(program, mode)| (mode, btrfs_check_by(&program, image, mode)))
}

#[cfg(test)]
mod tests;
