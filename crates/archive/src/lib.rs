//! Trees in and out of a filesystem: directories of the system and tar archives.
//!
//! A [`Source`](batch::Source) reads a tree as a stream of steps, a [`Sink`](sink::Sink) makes it,
//! and [`pipeline::run`] moves the one into the other, reading, checksumming and compressing ahead
//! on other threads. The library never touches a terminal: [`progress::Progress`] hears how it
//! goes.
#![forbid(unsafe_code)]

pub mod acl;
pub mod batch;
pub mod codec;
mod dirs;
pub mod entry;
pub mod error;
pub mod export;
pub mod import;
pub mod pipeline;
pub mod progress;
pub mod sink;
pub mod source;
mod xattr;

#[cfg(test)]
mod model;

pub use dirs::FileId;
