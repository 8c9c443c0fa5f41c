//! What requests ask for, by subject.

mod attributes;
mod data;
mod directories;
mod flags;
mod names;
mod xattrs;
