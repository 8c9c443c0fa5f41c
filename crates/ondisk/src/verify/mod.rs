//! The structural checker: bytes become a [`Block`] here or not at all.
//!
//! What Linux accepts is accepted here, and what Linux refuses when it reads a block is refused:
//! every check of its tree checker that needs the block alone. What needs the superblock's
//! generation or other blocks is the offline checker's.

mod devices;
mod extents;
mod files;
mod leaf;
mod superblock;

pub use devices::chunk;
pub use superblock::{
    NODESIZE_MAX_BYTES, SECTORSIZE_MIN_BYTES, UnknownFeatures, superblock, suspicions,
    unknown_features,
};

use leaf::Slot;

use crate::block::{
    Block, FLAG_WRITTEN, HEADER_BYTES, Header, KEY_PTR_BYTES, KeyPtr, LEVEL_COUNT_MAX, Leaf, Node,
};
use crate::csum::{CSUM_FIELD_BYTES, CsumType};
use crate::error::{Corruption, Reason, Result};
use crate::key::Key;
use crate::misc::OnDisk;
use crate::superblock::hex;
use crate::types::{Generation, LogicalAddr, RootId, Uuid};

use zerocopy::FromBytes;

/// What all blocks of a filesystem have in common.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bytes of a block.
    pub nodesize_bytes: usize,
    /// Bytes of a sector.
    pub sectorsize_bytes: usize,
    /// The checksum.
    pub csum: CsumType,
    /// The uuid in headers.
    pub fsid: Uuid,
}

/// What the parent (or the superblock, or a root item) says of a block.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// Its address.
    pub bytenr: LogicalAddr,
    /// Its generation, where known.
    pub generation: Option<Generation>,
    /// Its level, where known.
    pub level: Option<u8>,
    /// Its first key, where known.
    pub first_key: Option<Key>,
    /// The tree in which it was reached. The block's owner must be that tree; in a subvolume any
    /// subvolume, since snapshots share blocks. Log and relocation trees are not judged.
    pub owner: Option<RootId>,
}

/// Checks the block's checksum, identity and structure.
///
/// # Errors
/// A [`Corruption`] that names block, slot and reason.
pub fn block(bytes: Box<[u8]>, geometry: &Geometry, expect: &Expect) -> Result<Block> {
    header(&bytes, geometry, expect).map_err(|error| error.in_block(expect.bytenr))?;
    let level = bytes[HEADER_BYTES - 1];
    if level == 0 {
        leaf::check(&bytes, geometry).map_err(|error| error.in_block(expect.bytenr))?;
    } else {
        node_layout(&bytes, geometry).map_err(|error| error.in_block(expect.bytenr))?;
    }
    let block = if level == 0 {
        Block::Leaf(Leaf::from_verified(bytes))
    } else {
        Block::Node(Node::from_verified(bytes))
    };
    if let Some(first_key) = expect.first_key
        && block.first_key() != Some(first_key)
    {
        return Err(Corruption::new(Reason::WrongFirstKey)
            .in_block(expect.bytenr)
            .have(format!("{:?}", block.first_key()))
            .expect(first_key));
    }
    Ok(block)
}

fn header(bytes: &[u8], geometry: &Geometry, expect: &Expect) -> Result<()> {
    if bytes.len() != geometry.nodesize_bytes {
        return Err(Corruption::new(Reason::Truncated)
            .have(bytes.len())
            .expect(geometry.nodesize_bytes));
    }
    let header = Header::peek(bytes)?;
    let csum = geometry.csum;
    if !csum.matches(&header.csum, &bytes[CSUM_FIELD_BYTES..]) {
        return Err(Corruption::new(Reason::CsumMismatch)
            .have(hex(&header.csum[..csum.len_bytes()]))
            .expect(hex(&csum.compute(&bytes[CSUM_FIELD_BYTES..])[..csum.len_bytes()])));
    }
    if header.bytenr.get() != expect.bytenr.0 {
        return Err(Corruption::new(Reason::WrongBytenr).have(header.bytenr).expect(expect.bytenr));
    }
    if header.fsid != geometry.fsid.0 {
        return Err(Corruption::new(Reason::WrongFsid)
            .have(Uuid(header.fsid))
            .expect(geometry.fsid));
    }
    if let Some(generation) = expect.generation
        && header.generation.get() != generation.0
    {
        return Err(Corruption::new(Reason::WrongGeneration)
            .have(header.generation)
            .expect(generation));
    }
    if usize::from(header.level) >= LEVEL_COUNT_MAX
        || expect.level.is_some_and(|level| level != header.level)
    {
        let expected = expect.level.map_or("0 to 7".to_owned(), |level| level.to_string());
        return Err(Corruption::new(Reason::WrongLevel).have(header.level).expect(expected));
    }
    if let Some(owner) = expect.owner
        && !may_own(RootId(header.owner.get()), owner)
    {
        return Err(Corruption::new(Reason::WrongOwner).have(header.owner).expect(owner));
    }
    if header.flags.get() & FLAG_WRITTEN == 0 {
        return Err(Corruption::new(Reason::NotWritten)
            .have(format!("flags {:#x}", header.flags))
            .expect("the flag WRITTEN"));
    }
    Ok(())
}

/// Whether a block that `owner` made can be reached in the tree `root`.
fn may_own(owner: RootId, root: RootId) -> bool {
    match root {
        // The owner of their blocks is the tree that they are a log or a copy of.
        RootId::TREE_LOG | RootId::TREE_RELOC => true,
        _ if root.is_subvolume() => owner.is_subvolume(),
        _ => owner == root,
    }
}

fn node_layout(bytes: &[u8], geometry: &Geometry) -> Result<()> {
    let count = Header::peek(bytes)?.nritems.get() as usize;
    let capacity = (bytes.len() - HEADER_BYTES) / KEY_PTR_BYTES;
    if count == 0 || count > capacity {
        return Err(Corruption::new(Reason::BadItemCount)
            .have(count)
            .expect(format!("1 to {capacity}")));
    }
    let ptrs = &bytes[HEADER_BYTES..HEADER_BYTES + count * KEY_PTR_BYTES];
    let ptrs = <[KeyPtr]>::ref_from_bytes(ptrs).expect("the length was computed");
    let mut previous: Option<Key> = None;
    for (slot, ptr) in ptrs.iter().enumerate() {
        let key = ptr.key.key();
        if previous.is_some_and(|previous| previous >= key) {
            return Err(Corruption::new(Reason::KeyOrder)
                .at_slot(slot)
                .have(key)
                .expect(format!("above {:?}", previous.unwrap_or_default())));
        }
        previous = Some(key);
        let child = ptr.blockptr.get();
        let sectorsize = geometry.sectorsize_bytes as u64;
        if child == 0 || !child.is_multiple_of(sectorsize) {
            return Err(Corruption::new(Reason::BadBlockPointer)
                .at_slot(slot)
                .have(child)
                .expect(format!("a multiple of {sectorsize} above 0")));
        }
    }
    Ok(())
}
