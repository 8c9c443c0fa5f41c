//! Trees: extent buffers and their cache, search, cursors, copy-on-write edits.
//!
//! Invariants:
//!
//! 1. A block that a superblock can reach is never changed: an edit first copies it to a new
//!    address ([`edit`]). Blocks of the running transaction lie in their tree's dirty map and
//!    nowhere else; clean blocks lie in the [`store`].
//! 2. A block enters either place verified; nothing checks its structure again.
//! 3. Blocks are shared by `Arc`. A reader that holds a dirty block keeps that moment's bytes: the
//!    writer then edits a copy of its own.
//!
//! Lock order: a subvolume's tree, then the extent tree (to look up sharing), then the allocator.
//! No lock is held between two calls on a [`Cursor`], nor while a block is read from the volume.
//! Who reads a block has its place in the [`store`], for which others wait, and waits for nobody himself.

pub(crate) mod cursor;
pub(crate) mod edit;
mod read_beside;
pub(crate) mod readahead;
pub(crate) mod roots;
mod split;
pub(crate) mod store;
pub(crate) mod tree;

pub(crate) use cursor::Cursor;
pub(crate) use edit::Editor;
pub(crate) use readahead::Readahead;
pub(crate) use roots::Roots;
pub(crate) use store::{BlockPtr, Store};
pub(crate) use tree::{Path, Tree, TreeState};
