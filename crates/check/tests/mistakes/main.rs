//! The mistakes that `btrfs check` and the kernel catch, numbered as in `docs/CHECK.md`: each test
//! makes exactly one, in an image that the kernel wrote, and expects exactly its finding, in its
//! place. Where one mistake cannot but make a second one, the test names both.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod borders;
mod devices;
mod extents;
mod files;
mod names;
mod roots;
mod space;
mod superblock;
