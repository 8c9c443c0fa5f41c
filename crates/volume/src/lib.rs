//! Devices and the chunk map: from logical addresses to bytes on a medium.
//!
//! A [`Volume`] is the devices of one filesystem and its chunks. It answers reads from any whole
//! copy, writes every copy, and writes the superblocks in the order that a power cut survives. It
//! knows no tree: the engine reads the chunk tree and hands over the chunks.
#![forbid(unsafe_code)]

mod chunk_map;
mod device;
mod error;
mod kernel;
mod lock;
mod missing;
pub mod partition;
pub mod probe;
mod stats;
mod superblocks;
mod volume;

pub use chunk_map::{ChunkMap, Place, Run};
pub use device::{Device, FileDevice, MemDevice, OpenMode, Window};
pub use error::{Error, Op, Result};
pub use lock::lock_holder;
pub use stats::DeviceStats;
pub use volume::{LeftOut, Volume, VolumeOptions};
