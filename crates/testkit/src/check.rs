//! `btrfs check` as a judge.

use std::path::{Path, PathBuf};

use crate::oracle;
use crate::run::{command, transcript};

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

fn btrfs_check_by(program: &Path, image: &Path, mode: CheckMode) -> CheckOutcome {
    let mut command = command(program.to_str().expect("the program's path is text"));
    command.args(["check", "--readonly"]);
    match mode {
        CheckMode::Original => {}
        CheckMode::Lowmem => _ = command.arg("--mode=lowmem"),
        CheckMode::DataCsum => _ = command.arg("--check-data-csum"),
    }
    let output = command.arg(image).output().expect("btrfs can be started");
    let transcript = transcript(&output);
    let complaints: Vec<&str> = transcript.lines().filter(|line| is_complaint(line)).collect();
    // Some complaints leave the exit code at 0.
    let is_clean = (output.status.success() && complaints.is_empty())
        || (mode == CheckMode::Lowmem && complaints == [LOWMEM_SUMMARY]);
    CheckOutcome { is_clean, transcript }
}

/// The sum of what the lowmem mode found in trees of files. Alone, without anything found, it is a
/// false alarm, which many hard links of one file (extended references over a leaf's border) raise
/// in images of the kernel's too.
const LOWMEM_SUMMARY: &str = "ERROR: errors found in fs roots";

fn is_complaint(line: &str) -> bool {
    let line = line.trim_start();
    ["ERROR", "error:", "WARNING", "warning:", "mismatch", "bad ", "checksum verify failed"]
        .iter()
        .any(|word| line.starts_with(word))
        // What it always says of the checksum mode and of the free space tree is not one.
        && !line.contains("is experimental")
        || line.contains("has wrong")
        || line.contains("errors found in")
        || line.contains("cache and super generation don't match")
}

/// Runs `btrfs check` in all its modes, and a newer one too where it was fetched.
///
/// # Panics
/// With what it said, if any finds anything.
pub fn assert_checks_clean(image: &Path) {
    for mode in CheckMode::ALL {
        let outcome = btrfs_check(image, mode);
        assert!(
            outcome.is_clean,
            "btrfs check {mode:?} {}: {}",
            image.display(),
            outcome.transcript
        );
    }
    if let Some(directory) = oracle::new_btrfs_progs() {
        let program: PathBuf = directory.join("bin/btrfs");
        for mode in [CheckMode::Original, CheckMode::Lowmem] {
            let outcome = btrfs_check_by(&program, image, mode);
            assert!(
                outcome.is_clean,
                "newer btrfs check {mode:?} {}: {}",
                image.display(),
                outcome.transcript
            );
        }
    }
}
