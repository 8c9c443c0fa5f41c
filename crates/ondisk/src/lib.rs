//! The btrfs on-disk format: bytes to types and back.
//!
//! No I/O, no locks and no `unsafe`. Every struct that lies on the medium is defined here, and
//! only here, as little-endian wrappers whose size is asserted at compile time. Names and numbers
//! are those of the uapi headers `linux/btrfs_tree.h` and `linux/btrfs.h`.
//!
//! A block of a tree is typed [`Leaf`](block::Leaf) or [`Node`](block::Node) only after
//! [`verify`] has accepted its structure; nothing downstream checks it again.
#![forbid(unsafe_code)]

pub mod block;
pub mod block_group;
pub mod chunk;
pub mod csum;
pub mod dir;
pub mod error;
pub mod extent;
pub mod features;
pub mod file_extent;
pub mod free_space;
pub mod hash;
pub mod inode;
pub mod key;
pub mod misc;
pub mod print;
pub mod root;
pub mod superblock;
pub mod types;
pub mod verify;

pub use csum::CsumType;
pub use error::{Corruption, Reason, Result};
pub use key::{DiskKey, Key, KeyType};
pub use types::*;
