//! A tree block as the checker reads it: verified, or damaged and read as far as it makes sense.
//!
//! A block whose checksum and address are right is used although the structural verifier refuses
//! it, so that one bad item hides nothing else. Every access here is therefore checked.

use ubtrfs_ondisk::block::{Block, HEADER_BYTES, Header, ITEM_BYTES, Item, KEY_PTR_BYTES, KeyPtr};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Key, LogicalAddr, RootId};

enum Source {
    Verified(Block),
    /// At least as long as a header.
    Raw(Box<[u8]>),
}

/// A block that was read.
pub(crate) struct View {
    source: Source,
}

impl View {
    pub(crate) fn verified(block: Block) -> Self {
        Self { source: Source::Verified(block) }
    }

    /// `None` when the bytes are too few for a header.
    pub(crate) fn raw(bytes: Box<[u8]>) -> Option<Self> {
        (bytes.len() >= HEADER_BYTES).then_some(Self { source: Source::Raw(bytes) })
    }

    pub(crate) fn is_verified(&self) -> bool {
        matches!(self.source, Source::Verified(_))
    }

    fn bytes(&self) -> &[u8] {
        match &self.source {
            Source::Verified(block) => block.as_bytes(),
            Source::Raw(bytes) => bytes,
        }
    }

    pub(crate) fn header(&self) -> &Header {
        Header::peek(self.bytes()).expect("a view is at least as long as a header")
    }

    pub(crate) fn owner(&self) -> RootId {
        RootId(self.header().owner.get())
    }

    pub(crate) fn at(&self) -> LogicalAddr {
        LogicalAddr(self.header().bytenr.get())
    }

    pub(crate) fn level(&self) -> u8 {
        self.header().level
    }

    /// Items or children, as many as the block has room for.
    pub(crate) fn len(&self) -> usize {
        let each = if self.level() == 0 { ITEM_BYTES } else { KEY_PTR_BYTES };
        let room = (self.bytes().len() - HEADER_BYTES) / each;
        usize::try_from(self.header().nritems.get()).unwrap_or(usize::MAX).min(room)
    }

    /// The item in `slot` of a leaf; `None` when its data lie outside the block.
    #[inline]
    pub(crate) fn item(&self, slot: usize) -> Option<(Key, &[u8])> {
        let bytes = self.bytes();
        let item = Item::peek(bytes.get(HEADER_BYTES + slot * ITEM_BYTES..)?).ok()?;
        let start = HEADER_BYTES.checked_add(usize::try_from(item.offset.get()).ok()?)?;
        let end = start.checked_add(usize::try_from(item.len.get()).ok()?)?;
        Some((item.key.key(), bytes.get(start..end)?))
    }

    /// The items of a leaf whose data lie inside it, with their slots.
    pub(crate) fn items(&self) -> impl Iterator<Item = (usize, Key, &[u8])> {
        let count = if self.level() == 0 { self.len() } else { 0 };
        (0..count).filter_map(|slot| self.item(slot).map(|(key, data)| (slot, key, data)))
    }

    /// The pointer in `slot` of a node.
    pub(crate) fn ptr(&self, slot: usize) -> Option<&KeyPtr> {
        KeyPtr::peek(self.bytes().get(HEADER_BYTES + slot * KEY_PTR_BYTES..)?).ok()
    }

    /// The key in `slot`, of a leaf or a node.
    pub(crate) fn key(&self, slot: usize) -> Option<Key> {
        if slot >= self.len() {
            return None;
        }
        if self.level() == 0 {
            let at = HEADER_BYTES + slot * ITEM_BYTES;
            return Some(Item::peek(self.bytes().get(at..)?).ok()?.key.key());
        }
        Some(self.ptr(slot)?.key.key())
    }

    pub(crate) fn first_key(&self) -> Option<Key> {
        self.key(0)
    }

    pub(crate) fn last_key(&self) -> Option<Key> {
        self.key(self.len().checked_sub(1)?)
    }
}

/// A number of items, slots or bytes in memory as a finding prints it.
pub(crate) fn number(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
