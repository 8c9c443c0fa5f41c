//! What requests ask for, by subject.

mod attributes;
mod data;
pub(crate) mod directories;
mod flags;
mod names;
mod seek;
pub(crate) mod subvolumes;
pub(crate) mod xattrs;
