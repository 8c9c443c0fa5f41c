//! Memory for the bytes of files.
//!
//! A page cache takes and drops memory by the hundred megabyte, in buffers of a power of two of pages. Taken from the
//! system a page at a time each costs a fault, and what an allocator zeroes is zeroed twice. Here buffers are cut from slabs
//! of 2 MiB of address space, aligned to that; beyond the first few the system is asked for the pages of 256 KiB at once, or for a huge
//! page. Memory of buffers that were dropped is kept for the next ones, up to a limit, and else returned to the system.
//!
//! Invariants:
//! 1. A unit of a slab belongs to one buffer, or is free. A buffer's memory is nobody else's until it is dropped.
//! 2. All memory handed out is initialized: a slab comes zeroed from the system.
//! 3. Slabs have memory for what buffers have, and for `idle_bytes_max` besides, or a buffer or 256 KiB more for each thread that takes
//!    or drops one at the moment; where the system refuses to take memory back, and where it was told to give huge pages, more.
//! 4. Slabs have `slab_bytes_max` of addresses at most; what does not fit comes from the allocator of the program, as do buffers of other
//!    lengths than a power of two of units, those longer than [`RUN_BYTES_MAX`], and all where the system's pages are longer than units.
#![deny(unsafe_code)]

mod arena;
mod slab;
mod units;

pub use arena::{Arena, ArenaOptions, Buffer};
pub use slab::SLAB_BYTES;
pub use units::{RUN_BYTES_MAX, UNIT_BYTES};
