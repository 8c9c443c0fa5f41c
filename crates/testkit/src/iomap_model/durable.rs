//! What a crash leaves of the filesystem in memory: each file as it was when it was last made durable, by itself or with all others.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_iomap::MappingKind;

use super::{Disk, Extents, IN_MEMORY, MemoryFs, MemoryInode, Place, UNPOISONED};

/// A file as a crash leaves it.
#[derive(Debug, Default)]
pub(super) struct Durable {
    size: u64,
    blocks: BTreeMap<u64, DurableBlock>,
}

/// One that has space; without bytes it was not written yet.
#[derive(Debug)]
struct DurableBlock {
    kind: MappingKind,
    bytes: Option<Arc<Vec<u8>>>,
}

impl MemoryInode {
    /// Makes durable what is stored, for who has the extent lock.
    pub(super) fn make_durable(&self, extents: &Extents, disk: &Disk) {
        let durable_block = |place: &Place| DurableBlock {
            kind: place.kind,
            bytes: disk.blocks.get(&place.address).cloned(),
        };
        let blocks = extents.places.iter();
        let blocks = blocks.map(|(number, place)| (*number, durable_block(place))).collect();
        *self.durable.lock().expect(UNPOISONED) = Durable { size: extents.size, blocks };
    }
}

impl MemoryFs {
    /// A commit, as far as it concerns this file: what is stored of it is durable.
    pub fn commit(&self, inode: &MemoryInode) {
        let extents = inode.extents.lock().expect(UNPOISONED);
        inode.make_durable(&extents, &self.disk.lock().expect(UNPOISONED));
    }

    /// The file is what is durable of it. Nothing of it is in memory.
    pub fn crash(&self, inode: &MemoryInode) {
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        for place in std::mem::take(&mut extents.places).into_values() {
            disk.drop_address(place.address);
        }
        let durable = inode.durable.lock().expect(UNPOISONED);
        for (number, block) in &durable.blocks {
            let address = disk.take_address();
            if let Some(bytes) = &block.bytes {
                disk.blocks.insert(address, Arc::clone(bytes));
            }
            extents.places.insert(*number, Place { address, kind: block.kind });
        }
        extents.size = durable.size;
        inode.sequence.changed();
    }

    /// What a crash leaves of the file, up to its end.
    pub fn durable(&self, inode: &MemoryInode) -> Vec<u8> {
        let durable = inode.durable.lock().expect(UNPOISONED);
        let mut bytes = vec![0; usize::try_from(durable.size).expect(IN_MEMORY)];
        for (number, block) in &durable.blocks {
            let at = usize::try_from(number * super::BLOCK).expect(IN_MEMORY);
            if let Some(data) = block.bytes.as_ref().filter(|_| !block.kind.is_zeros())
                && at < bytes.len()
            {
                let end = bytes.len().min(at + data.len());
                bytes[at..end].copy_from_slice(&data[..end - at]);
            }
        }
        bytes
    }
}
