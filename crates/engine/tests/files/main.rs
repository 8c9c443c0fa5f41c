//! Open files on devices that are memory. One program, as each is linked for itself.

#[path = "../common/mod.rs"]
mod common;

mod beside_writers;
mod clones_beside;
mod compressed_writes;
mod direct_writes;
mod encoded_reads;
mod file_ends;
mod file_failures;
mod file_promises;
mod files_fail_together;
mod flags_beside_writers;
mod flags_of_open_files;
mod held_commits;
mod inline_beside_direct;
mod large_extents;
mod lost_tails;
mod read_failures;
mod read_only_beside_writers;
mod threads;
mod unreadable_extents;
