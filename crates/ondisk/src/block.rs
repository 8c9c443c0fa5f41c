//! Tree blocks: a leaf or node *is* its bytes; items are read and edited in place.
//!
//! Invariants of a [`Leaf`] or [`Node`], established by [`crate::verify`] or by construction and
//! kept by every edit here:
//!
//! 1. The item headers (or key pointers) lie packed behind the block header, in key order as long
//!    as callers insert in order.
//! 2. Item data is contiguous from the end of the block towards its front, the first item's last;
//!    nothing overlaps.
//! 3. A leaf has level 0, a node a level of 1 to 7.
//!
//! Edits assert that their room exists: asking is the caller's part ([`Leaf::free_bytes`]).

use std::hint::select_unpredictable;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::csum::CSUM_FIELD_BYTES;
use crate::key::{DiskKey, Key};
use crate::misc::on_disk;
use crate::types::{Generation, LogicalAddr, RootId, Uuid};

/// Bytes of a block header.
pub const HEADER_BYTES: usize = 101;
/// Bytes of an item header.
pub const ITEM_BYTES: usize = 25;
/// Bytes of a key pointer.
pub const KEY_PTR_BYTES: usize = 33;
/// Levels that a tree may have.
pub const LEVEL_COUNT_MAX: usize = 8;
/// Header flag: the block has been written; it must be CoWed before it changes.
pub const FLAG_WRITTEN: u64 = 1 << 0;
/// Header flag: the block belongs to a relocation tree.
pub const FLAG_RELOC: u64 = 1 << 1;
/// Back reference revision, in the top byte of the flags; 1 in every filesystem since 2009.
pub const MIXED_BACKREF_REV: u64 = 1 << 56;

on_disk!(
    /// `struct btrfs_header`.
    Header [101] {
        /// Checksum of all that follows it.
        csum: [u8; CSUM_FIELD_BYTES],
        /// The filesystem.
        fsid: [u8; 16],
        /// The block's own logical address.
        bytenr: U64,
        /// [`FLAG_WRITTEN`], [`FLAG_RELOC`] and the back reference revision.
        flags: U64,
        /// The chunk tree's uuid.
        chunk_tree_uuid: [u8; 16],
        /// Transaction in which the block was made.
        generation: U64,
        /// The tree that made it.
        owner: U64,
        /// Items or key pointers.
        nritems: U32,
        /// 0 for a leaf.
        level: u8,
    }
);

on_disk!(
    /// `struct btrfs_item`.
    Item [25] {
        /// The item's key.
        key: DiskKey,
        /// Offset of its data, from the end of the block header.
        offset: U32,
        /// Bytes of its data.
        len: U32,
    }
);

on_disk!(
    /// `struct btrfs_key_ptr`.
    KeyPtr [33] {
        /// First key of the child.
        key: DiskKey,
        /// The child's address.
        blockptr: U64,
        /// The child's generation.
        generation: U64,
    }
);

/// What a new block's header is made of.
#[derive(Clone, Copy, Debug)]
pub struct NewBlock {
    /// The filesystem's uuid in headers.
    pub fsid: Uuid,
    /// The chunk tree's uuid.
    pub chunk_tree_uuid: Uuid,
    /// The block's address.
    pub bytenr: LogicalAddr,
    /// The running transaction.
    pub generation: Generation,
    /// The tree.
    pub owner: RootId,
    /// Bytes of the block.
    pub nodesize_bytes: usize,
}

impl NewBlock {
    fn bytes(&self, level: u8) -> Box<[u8]> {
        let mut bytes = vec![0; self.nodesize_bytes].into_boxed_slice();
        let header = Header {
            csum: [0; CSUM_FIELD_BYTES],
            fsid: self.fsid.0,
            bytenr: self.bytenr.0.into(),
            flags: MIXED_BACKREF_REV.into(),
            chunk_tree_uuid: self.chunk_tree_uuid.0,
            generation: self.generation.0.into(),
            owner: self.owner.0.into(),
            nritems: 0.into(),
            level,
        };
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        bytes
    }
}

#[inline]
fn header_of(bytes: &[u8]) -> &Header {
    Header::ref_from_prefix(bytes).expect("a block is longer than its header").0
}

#[inline]
fn header_of_mut(bytes: &mut [u8]) -> &mut Header {
    Header::mut_from_prefix(bytes).expect("a block is longer than its header").0
}

/// Searches `count` keys, of which `key_at` gives each, for `key`. Which way a step goes cannot be
/// predicted, so it is chosen without a branch: that more than halves the time.
#[inline]
fn search_by(count: usize, key: &Key, key_at: impl Fn(usize) -> Key) -> Result<usize, usize> {
    if count == 0 {
        return Err(0);
    }
    // The last key that is not above `key`, or the first, lies in `base..base + len`.
    let (mut base, mut len) = (0, count);
    while len > 1 {
        let half = len / 2;
        let middle = base + half;
        base = select_unpredictable(is_above(&key_at(middle), key), base, middle);
        len -= half;
    }
    match key_at(base).cmp(key) {
        std::cmp::Ordering::Less => Err(base + 1),
        std::cmp::Ordering::Equal => Ok(base),
        std::cmp::Ordering::Greater => Err(base),
    }
}

/// `a > b`, without branches.
#[inline]
fn is_above(a: &Key, b: &Key) -> bool {
    let low = |key: &Key| u128::from(key.ty.0) << 64 | u128::from(key.offset);
    (a.objectid > b.objectid) | ((a.objectid == b.objectid) & (low(a) > low(b)))
}

/// A verified leaf.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leaf {
    bytes: Box<[u8]>,
}

impl Leaf {
    /// An empty leaf.
    pub fn new(new: &NewBlock) -> Self {
        Self { bytes: new.bytes(0) }
    }

    /// For [`crate::verify`] alone.
    pub(crate) fn from_verified(bytes: Box<[u8]>) -> Self {
        Self { bytes }
    }

    /// The header.
    #[inline]
    pub fn header(&self) -> &Header {
        header_of(&self.bytes)
    }

    /// The whole block.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of items.
    #[inline]
    pub fn len(&self) -> usize {
        self.header().nritems.get() as usize
    }

    /// Whether there is no item.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The item headers.
    #[inline]
    pub fn items(&self) -> &[Item] {
        let end = HEADER_BYTES + self.len() * ITEM_BYTES;
        <[Item]>::ref_from_bytes(&self.bytes[HEADER_BYTES..end]).expect("verified: items fit")
    }

    #[inline]
    fn items_mut(&mut self) -> &mut [Item] {
        let end = HEADER_BYTES + self.len() * ITEM_BYTES;
        <[Item]>::mut_from_bytes(&mut self.bytes[HEADER_BYTES..end]).expect("verified: items fit")
    }

    /// The key in `slot`.
    ///
    /// # Panics
    /// When there is no such slot, as all that take a slot here.
    #[inline]
    pub fn key(&self, slot: usize) -> Key {
        self.items()[slot].key.key()
    }

    /// The data of the item in `slot`.
    #[inline]
    pub fn data(&self, slot: usize) -> &[u8] {
        let item = &self.items()[slot];
        let start = HEADER_BYTES + item.offset.get() as usize;
        &self.bytes[start..start + item.len.get() as usize]
    }

    /// The data of the item in `slot`, to change in place.
    #[inline]
    pub fn data_mut(&mut self, slot: usize) -> &mut [u8] {
        let item = &self.items()[slot];
        let start = HEADER_BYTES + item.offset.get() as usize;
        let len = item.len.get() as usize;
        &mut self.bytes[start..start + len]
    }

    /// Finds `key`: its slot, or the slot at which it would be inserted.
    #[inline]
    pub fn search(&self, key: &Key) -> Result<usize, usize> {
        let items = self.items();
        search_by(items.len(), key, |slot| items[slot].key.key())
    }

    /// Bytes for items and their data.
    #[inline]
    pub fn capacity_bytes(&self) -> usize {
        self.bytes.len() - HEADER_BYTES
    }

    #[inline]
    fn data_start(&self) -> usize {
        match self.items().last() {
            Some(item) => item.offset.get() as usize,
            None => self.capacity_bytes(),
        }
    }

    /// Bytes that are free: an item takes [`ITEM_BYTES`] and its data.
    #[inline]
    pub fn free_bytes(&self) -> usize {
        self.data_start() - self.len() * ITEM_BYTES
    }

    /// Bytes that the items in `slots` take, headers included.
    pub fn used_bytes(&self, slots: std::ops::Range<usize>) -> usize {
        self.items()[slots].iter().map(|item| ITEM_BYTES + item.len.get() as usize).sum()
    }

    /// Makes room for an item at `slot` and returns its data, zeroed or stale, to be filled.
    ///
    /// # Panics
    /// When the item does not fit.
    pub fn insert(&mut self, slot: usize, key: Key, len_bytes: usize) -> &mut [u8] {
        let count = self.len();
        assert!(slot <= count, "slot within the leaf or at its end");
        assert!(self.free_bytes() >= ITEM_BYTES + len_bytes, "the item fits");
        let data_start = self.data_start();
        let data_end = self.data_end_before(slot);
        let shift = u32::try_from(len_bytes).expect("item shorter than a block");
        if slot < count {
            self.bytes.copy_within(
                HEADER_BYTES + data_start..HEADER_BYTES + data_end,
                HEADER_BYTES + data_start - len_bytes,
            );
            for item in &mut self.items_mut()[slot..] {
                item.offset -= shift;
            }
            let from = HEADER_BYTES + slot * ITEM_BYTES;
            let to = HEADER_BYTES + count * ITEM_BYTES;
            self.bytes.copy_within(from..to, from + ITEM_BYTES);
        }
        self.header_mut().nritems += 1;
        let offset = data_end - len_bytes;
        self.items_mut()[slot] = Item {
            key: DiskKey::new(key),
            offset: u32::try_from(offset).expect("offset within a block").into(),
            len: shift.into(),
        };
        &mut self.bytes[HEADER_BYTES + offset..HEADER_BYTES + data_end]
    }

    /// End of the data that an item in `slot` would have.
    #[inline]
    fn data_end_before(&self, slot: usize) -> usize {
        match slot.checked_sub(1) {
            Some(previous) => self.items()[previous].offset.get() as usize,
            None => self.capacity_bytes(),
        }
    }

    /// Removes the items in `slots`.
    pub fn remove(&mut self, slots: std::ops::Range<usize>) {
        let count = self.len();
        assert!(slots.start <= slots.end && slots.end <= count, "slots within the leaf");
        if slots.is_empty() {
            return;
        }
        let data_start = self.data_start();
        let removed_start = self.items()[slots.end - 1].offset.get() as usize;
        let removed_end = self.data_end_before(slots.start);
        let removed_bytes = removed_end - removed_start;
        if slots.end < count {
            self.bytes.copy_within(
                HEADER_BYTES + data_start..HEADER_BYTES + removed_start,
                HEADER_BYTES + data_start + removed_bytes,
            );
            let shift = u32::try_from(removed_bytes).expect("within a block");
            for item in &mut self.items_mut()[slots.end..] {
                item.offset += shift;
            }
            let from = HEADER_BYTES + slots.end * ITEM_BYTES;
            let to = HEADER_BYTES + count * ITEM_BYTES;
            self.bytes.copy_within(from..to, HEADER_BYTES + slots.start * ITEM_BYTES);
        }
        let left = count - slots.len();
        self.header_mut().nritems = u32::try_from(left).expect("fewer than before").into();
    }

    /// Changes the length of the item in `slot`; its first bytes stay, new ones at its end are
    /// stale and to be filled.
    ///
    /// # Panics
    /// When the growth does not fit.
    pub fn resize(&mut self, slot: usize, len_bytes: usize) -> &mut [u8] {
        let data_start = self.data_start();
        let item = self.items()[slot];
        let old_len = item.len.get() as usize;
        let old_offset = item.offset.get() as usize;
        assert!(len_bytes <= old_len + self.free_bytes(), "the growth fits");
        // The item's data keeps its front and moves so that its end stays where it is: everything
        // from the lowest data to the item's kept bytes moves by the difference.
        let kept = old_len.min(len_bytes);
        let from = HEADER_BYTES + data_start..HEADER_BYTES + old_offset + kept;
        let to = HEADER_BYTES + data_start + old_len - len_bytes;
        self.bytes.copy_within(from, to);
        for item in &mut self.items_mut()[slot..] {
            let offset = item.offset.get() as usize + old_len - len_bytes;
            item.offset = u32::try_from(offset).expect("offset within a block").into();
        }
        self.items_mut()[slot].len = u32::try_from(len_bytes).expect("within a block").into();
        self.data_mut(slot)
    }

    /// Removes the first `len_bytes` of the data of the item in `slot`.
    pub fn remove_front(&mut self, slot: usize, len_bytes: usize) {
        let old_len = self.data(slot).len();
        assert!(len_bytes <= old_len, "no more than there is");
        self.data_mut(slot).copy_within(len_bytes.., 0);
        self.resize(slot, old_len - len_bytes);
    }

    /// Changes the key in `slot`, which must keep the order.
    pub fn set_key(&mut self, slot: usize, key: Key) {
        self.items_mut()[slot].key = DiskKey::new(key);
    }

    /// Moves the items from `slot` on to the front of `right`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn move_tail_to(&mut self, slot: usize, right: &mut Self) {
        let count = self.len();
        let moved = count - slot;
        if moved == 0 {
            return;
        }
        let data_start = self.data_start();
        let data_end = self.data_end_before(slot);
        let moved_bytes = data_end - data_start;
        assert!(right.free_bytes() >= moved_bytes + moved * ITEM_BYTES, "the items fit");
        let right_count = right.len();
        let right_start = right.data_start();
        let capacity = right.capacity_bytes();
        right.bytes.copy_within(
            HEADER_BYTES + right_start..HEADER_BYTES + capacity,
            HEADER_BYTES + right_start - moved_bytes,
        );
        right.bytes[HEADER_BYTES + capacity - moved_bytes..]
            .copy_from_slice(&self.bytes[HEADER_BYTES + data_start..HEADER_BYTES + data_end]);
        let shift = u32::try_from(moved_bytes).expect("within a block");
        for item in right.items_mut() {
            item.offset -= shift;
        }
        right.bytes.copy_within(
            HEADER_BYTES..HEADER_BYTES + right_count * ITEM_BYTES,
            HEADER_BYTES + moved * ITEM_BYTES,
        );
        right.header_mut().nritems =
            u32::try_from(right_count + moved).expect("items fit a block").into();
        let rise = u32::try_from(capacity - data_end).expect("within a block");
        for (to, from) in right.items_mut()[..moved].iter_mut().zip(&self.items()[slot..]) {
            *to = *from;
            to.offset += rise;
        }
        self.header_mut().nritems = u32::try_from(slot).expect("fewer than before").into();
    }

    /// Moves the first `count` items to the end of `left`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn move_head_to(&mut self, count: usize, left: &mut Self) {
        if count == 0 {
            return;
        }
        let capacity = self.capacity_bytes();
        let head_start = self.items()[count - 1].offset.get() as usize;
        let head_bytes = capacity - head_start;
        assert!(left.free_bytes() >= head_bytes + count * ITEM_BYTES, "the items fit");
        let left_count = left.len();
        let left_start = left.data_start();
        left.bytes[HEADER_BYTES + left_start - head_bytes..HEADER_BYTES + left_start]
            .copy_from_slice(&self.bytes[HEADER_BYTES + head_start..HEADER_BYTES + capacity]);
        left.header_mut().nritems =
            u32::try_from(left_count + count).expect("items fit a block").into();
        let sink = u32::try_from(capacity - left_start).expect("within a block");
        for (to, from) in left.items_mut()[left_count..].iter_mut().zip(&self.items()[..count]) {
            *to = *from;
            to.offset -= sink;
        }
        self.remove(0..count);
    }

    /// The header, to change what does not describe the items' layout.
    #[inline]
    fn header_mut(&mut self) -> &mut Header {
        header_of_mut(&mut self.bytes)
    }
}

/// A verified node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    bytes: Box<[u8]>,
}

impl Node {
    /// An empty node of `level`.
    pub fn new(new: &NewBlock, level: u8) -> Self {
        assert!((1..LEVEL_COUNT_MAX).contains(&usize::from(level)), "a node's level is 1 to 7");
        Self { bytes: new.bytes(level) }
    }

    /// For [`crate::verify`] alone.
    pub(crate) fn from_verified(bytes: Box<[u8]>) -> Self {
        Self { bytes }
    }

    /// The header.
    #[inline]
    pub fn header(&self) -> &Header {
        header_of(&self.bytes)
    }

    /// The whole block.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of children.
    #[inline]
    pub fn len(&self) -> usize {
        self.header().nritems.get() as usize
    }

    /// Whether there is no child.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Most children.
    #[inline]
    pub fn capacity(&self) -> usize {
        (self.bytes.len() - HEADER_BYTES) / KEY_PTR_BYTES
    }

    /// The key pointers.
    #[inline]
    pub fn ptrs(&self) -> &[KeyPtr] {
        let end = HEADER_BYTES + self.len() * KEY_PTR_BYTES;
        <[KeyPtr]>::ref_from_bytes(&self.bytes[HEADER_BYTES..end]).expect("verified: they fit")
    }

    #[inline]
    fn ptrs_mut(&mut self) -> &mut [KeyPtr] {
        let end = HEADER_BYTES + self.len() * KEY_PTR_BYTES;
        <[KeyPtr]>::mut_from_bytes(&mut self.bytes[HEADER_BYTES..end]).expect("verified: they fit")
    }

    /// First key of the child in `slot`.
    ///
    /// # Panics
    /// When there is no such slot, as all that take a slot here.
    #[inline]
    pub fn key(&self, slot: usize) -> Key {
        self.ptrs()[slot].key.key()
    }

    /// Address of the child in `slot`.
    #[inline]
    pub fn child(&self, slot: usize) -> LogicalAddr {
        LogicalAddr(self.ptrs()[slot].blockptr.get())
    }

    /// Generation of the child in `slot`.
    #[inline]
    pub fn child_generation(&self, slot: usize) -> Generation {
        Generation(self.ptrs()[slot].generation.get())
    }

    /// The child that holds `key`: the last whose first key is not above it, or the first.
    #[inline]
    pub fn slot_for(&self, key: &Key) -> usize {
        let ptrs = self.ptrs();
        match search_by(ptrs.len(), key, |slot| ptrs[slot].key.key()) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        }
    }

    /// Inserts a child at `slot`.
    ///
    /// # Panics
    /// When the node is full.
    pub fn insert(&mut self, slot: usize, key: Key, child: LogicalAddr, generation: Generation) {
        let count = self.len();
        assert!(slot <= count && count < self.capacity(), "room for a child");
        let from = HEADER_BYTES + slot * KEY_PTR_BYTES;
        let to = HEADER_BYTES + count * KEY_PTR_BYTES;
        self.bytes.copy_within(from..to, from + KEY_PTR_BYTES);
        header_of_mut(&mut self.bytes).nritems += 1;
        self.ptrs_mut()[slot] = KeyPtr {
            key: DiskKey::new(key),
            blockptr: child.0.into(),
            generation: generation.0.into(),
        };
    }

    /// Removes the child in `slot`.
    pub fn remove(&mut self, slot: usize) {
        let count = self.len();
        assert!(slot < count, "slot within the node");
        let from = HEADER_BYTES + (slot + 1) * KEY_PTR_BYTES;
        let to = HEADER_BYTES + count * KEY_PTR_BYTES;
        self.bytes.copy_within(from..to, from - KEY_PTR_BYTES);
        header_of_mut(&mut self.bytes).nritems -= 1;
    }

    /// Changes the first key of the child in `slot`, which must keep the order.
    #[inline]
    pub fn set_key(&mut self, slot: usize, key: Key) {
        self.ptrs_mut()[slot].key = DiskKey::new(key);
    }

    /// Points `slot` at another block.
    #[inline]
    pub fn set_child(&mut self, slot: usize, child: LogicalAddr, generation: Generation) {
        let ptr = &mut self.ptrs_mut()[slot];
        ptr.blockptr = child.0.into();
        ptr.generation = generation.0.into();
    }

    /// Moves the children from `slot` on to the front of `right`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn move_tail_to(&mut self, slot: usize, right: &mut Self) {
        let moved = self.len() - slot;
        let right_count = right.len();
        assert!(right_count + moved <= right.capacity(), "the children fit");
        let end = HEADER_BYTES + right_count * KEY_PTR_BYTES;
        right.bytes.copy_within(HEADER_BYTES..end, HEADER_BYTES + moved * KEY_PTR_BYTES);
        header_of_mut(&mut right.bytes).nritems =
            u32::try_from(right_count + moved).expect("children fit a block").into();
        right.ptrs_mut()[..moved].copy_from_slice(&self.ptrs()[slot..]);
        header_of_mut(&mut self.bytes).nritems =
            u32::try_from(slot).expect("fewer than before").into();
    }

    /// Moves the first `count` children to the end of `left`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn move_head_to(&mut self, count: usize, left: &mut Self) {
        let left_count = left.len();
        assert!(left_count + count <= left.capacity(), "the children fit");
        header_of_mut(&mut left.bytes).nritems =
            u32::try_from(left_count + count).expect("children fit a block").into();
        left.ptrs_mut()[left_count..].copy_from_slice(&self.ptrs()[..count]);
        let from = HEADER_BYTES + count * KEY_PTR_BYTES;
        let to = HEADER_BYTES + self.len() * KEY_PTR_BYTES;
        self.bytes.copy_within(from..to, HEADER_BYTES);
        header_of_mut(&mut self.bytes).nritems -= u32::try_from(count).expect("within a block");
    }
}

/// A verified tree block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Block {
    /// Level 0.
    Leaf(Leaf),
    /// Level 1 to 7.
    Node(Node),
}

impl Block {
    /// The header.
    #[inline]
    pub fn header(&self) -> &Header {
        header_of(self.as_bytes())
    }

    /// The whole block.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Leaf(leaf) => &leaf.bytes,
            Self::Node(node) => &node.bytes,
        }
    }

    /// The block's level.
    #[inline]
    pub fn level(&self) -> u8 {
        self.header().level
    }

    /// The block's own address.
    #[inline]
    pub fn bytenr(&self) -> LogicalAddr {
        LogicalAddr(self.header().bytenr.get())
    }

    /// The block's generation.
    #[inline]
    pub fn generation(&self) -> Generation {
        Generation(self.header().generation.get())
    }

    /// The tree that made it.
    #[inline]
    pub fn owner(&self) -> RootId {
        RootId(self.header().owner.get())
    }

    /// Items or children.
    #[inline]
    pub fn len(&self) -> usize {
        self.header().nritems.get() as usize
    }

    /// Whether there is no item or child.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First key, or `None` of an empty block.
    #[inline]
    pub fn first_key(&self) -> Option<Key> {
        match self {
            Self::Leaf(leaf) => leaf.items().first().map(|item| item.key.key()),
            Self::Node(node) => node.ptrs().first().map(|ptr| ptr.key.key()),
        }
    }

    /// Makes the block a copy at another address, in another transaction and tree.
    pub fn readdress(&mut self, bytenr: LogicalAddr, generation: Generation, owner: RootId) {
        let header = header_of_mut(self.bytes_mut());
        header.bytenr = bytenr.0.into();
        header.generation = generation.0.into();
        header.owner = owner.0.into();
        header.flags = MIXED_BACKREF_REV.into();
    }

    /// Sets the WRITTEN flag and the checksum: the bytes are then ready to be written, and the
    /// block must not change any more.
    pub fn seal(&mut self, csum: crate::CsumType) {
        header_of_mut(self.bytes_mut()).flags |= U64::new(FLAG_WRITTEN);
        let bytes = self.bytes_mut();
        let value = csum.compute(&bytes[CSUM_FIELD_BYTES..]);
        bytes[..CSUM_FIELD_BYTES].copy_from_slice(&value);
    }

    /// Whether the block was written since it was made.
    #[inline]
    pub fn is_written(&self) -> bool {
        self.header().flags.get() & FLAG_WRITTEN != 0
    }

    /// Whether Linux moved the block: what lies below it may be referenced by its address.
    #[inline]
    pub fn is_relocated(&self) -> bool {
        self.header().flags.get() & FLAG_RELOC != 0
    }

    #[inline]
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Leaf(leaf) => &mut leaf.bytes,
            Self::Node(node) => &mut node.bytes,
        }
    }
}

/// Zeroed bytes of one block, to be read into.
pub fn zeroed_block(nodesize_bytes: usize) -> Box<[u8]> {
    vec![0; nodesize_bytes].into_boxed_slice()
}

#[cfg(test)]
mod tests;
