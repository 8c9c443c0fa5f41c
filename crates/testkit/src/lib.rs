//! What ubtrfs's tests judge by: the kernel's own btrfs, `btrfs check`, comparable snapshots of
//! whole trees, directories full of odd files, images that the kernel wrote, seeded randomness; and tests of file I/O for any filesystem
//! that plugs into `iomap`, with one in memory that does.
//!
//! A test that needs a judge begins with
//!
//! ```text
//! if !oracle::require(Oracle::KernelBtrfs) { return; }
//! ```
//!
//! which says SKIPPED where it is missing, and panics where `UBTRFS_REQUIRE_ORACLES=1` is set.
//!
//! The crate is for tests: its functions panic with what went wrong.
#![forbid(unsafe_code)]

mod check;
pub mod collections;
pub mod corpus;
pub mod crash;
pub mod io_suite;
pub mod iomap_model;
mod isolate;
mod mkfs;
pub mod model;
mod mount;
pub mod odd;
pub mod oracle;
mod passing;
mod prng;
mod refused_log;
mod run;
pub mod snapshot;
mod zeros;

pub use check::{
    CheckMode, CheckOutcome, assert_checks_clean, assert_checks_clean_but_for_extended_refs,
    assert_checks_clean_but_for_half_dropped, assert_checks_clean_whatever_it_holds, btrfs_check,
    clear_free_space_tree, half_dropped_roots, has_extended_refs,
};
pub use isolate::{Ending, Limits, run_limited};
pub use mkfs::MkfsBtrfs;
pub use mount::{KernelMount, LoopDevice};
pub use oracle::Oracle;
pub use prng::Prng;
pub use refused_log::{RefusedLog, refused_log};
pub use run::{command, run};
pub use snapshot::{Compare, TreeSnapshot};
#[doc(hidden)]
pub use ubtrfs_ondisk::PhysicalAddr;

#[cfg(test)]
mod tests;
