//! What the targets share: the filesystem that their blocks belong to.

use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, HEADER_BYTES, Header};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::verify::{self, Expect, Geometry};
use ubtrfs_ondisk::{CsumType, LogicalAddr, Result, Uuid};

/// Bytes of a block here: the least, so that inputs stay small.
pub const NODESIZE_BYTES: usize = 4096;
/// Where every block here lies.
pub const ADDRESS: LogicalAddr = LogicalAddr(0x40_0000);

/// The filesystem.
pub fn geometry() -> Geometry {
    Geometry {
        nodesize_bytes: NODESIZE_BYTES,
        sectorsize_bytes: 4096,
        csum: CsumType::Crc32c,
        fsid: Uuid([7; 16]),
    }
}

/// Makes a block of `data`: identity and checksum made right, all else as it is, and checked.
///
/// # Errors
/// What the checker finds.
pub fn block(data: &[u8]) -> Result<Block> {
    let mut bytes = vec![0; NODESIZE_BYTES];
    let len = data.len().min(NODESIZE_BYTES);
    bytes[..len].copy_from_slice(&data[..len]);
    let geometry = geometry();
    let header = Header::peek_mut(&mut bytes[..HEADER_BYTES])?;
    header.fsid = geometry.fsid.0;
    header.bytenr = ADDRESS.0.into();
    header.flags = (header.flags.get() | FLAG_WRITTEN).into();
    let csum = geometry.csum.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&csum);
    let expect =
        Expect { bytenr: ADDRESS, generation: None, level: None, first_key: None, owner: None };
    verify::block(bytes.into(), &geometry, &expect)
}
