//! What a file does over a filesystem in memory. One program, as each is linked for itself.

#[path = "../common/mod.rs"]
mod common;

mod allocate;
mod arguments;
mod before_failed_tails;
mod budget;
mod cache;
mod concurrency;
mod extent_states;
mod failures;
mod lost_data;
mod lost_runs;
mod seek;
mod straight_writes;
mod suite;
mod zeroing;
