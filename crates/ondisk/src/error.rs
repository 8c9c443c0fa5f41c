//! What is wrong with bytes that were read, and where.

use std::fmt;

use crate::types::{LogicalAddr, RootId};

/// The result of reading the format.
pub type Result<T, E = Box<Corruption>> = std::result::Result<T, E>;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $text:literal,)*) => {
        /// What about the bytes is wrong.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[$doc])* $name,)*
        }

        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$name => $text,)*
                })
            }
        }
    };
}

reasons! {
    /// The magic number is not btrfs's.
    BadMagic => "no btrfs magic",
    /// A stored checksum is not that of the bytes.
    CsumMismatch => "checksum mismatch",
    /// A checksum algorithm that is not assigned.
    UnknownCsumType => "unknown checksum algorithm",
    /// A copy of the superblock, or a block, says that it lies elsewhere.
    WrongBytenr => "wrong own address",
    /// Sector, node or stripe size out of range or no power of two.
    BadGeometry => "impossible geometry",
    /// A field has a value that the format does not allow.
    BadValue => "value not allowed",
    /// Fewer bytes than the structure takes.
    Truncated => "too short",
    /// The block belongs to another filesystem.
    WrongFsid => "block of another filesystem",
    /// The block's generation is not the one its parent names.
    WrongGeneration => "wrong generation",
    /// The block's level is not the one its parent names.
    WrongLevel => "wrong level",
    /// The block's owner is not the tree it was reached in.
    WrongOwner => "wrong owner",
    /// The block's first key is not the one its parent names.
    WrongFirstKey => "wrong first key",
    /// More items than fit, or none where some must be.
    BadItemCount => "impossible number of items",
    /// A key is not above the one before it.
    KeyOrder => "keys out of order",
    /// Item data does not end where the one before it begins.
    ItemDataLayout => "item data not contiguous",
    /// A child pointer that is zero or not aligned.
    BadBlockPointer => "impossible child pointer",
    /// The item's length does not fit its type.
    BadItemLen => "impossible item length",
    /// The key does not fit the item's type.
    BadKey => "impossible key",
    /// A reference to what does not exist.
    Missing => "missing",
    /// A range that is already taken.
    Overlap => "overlapping ranges",
    /// The WRITTEN flag is not set in a block that was read.
    NotWritten => "not marked as written",
    /// An address, offset or length that is no multiple of the sector size.
    Unaligned => "not aligned",
    /// A key's offset is not the hash of the item's name.
    WrongNameHash => "name hash mismatch",
    /// Inline references are not in their order.
    RefOrder => "back references out of order",
    /// A count of references that is zero, or less than what is listed.
    WrongRefCount => "wrong reference count",
    /// A file's item that no item of the same inode precedes.
    NoInode => "item without its inode",
    /// Feature bits that contradict each other.
    BadFeatures => "impossible features",
    /// Compressed bytes that do not decode to what was promised.
    BadCompression => "compressed data does not decode",
}

/// A finding: the place, the reason, what is there and what should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Corruption {
    /// The tree in which it was met, where known.
    pub root: Option<RootId>,
    /// The block.
    pub block: Option<LogicalAddr>,
    /// The slot in the block.
    pub slot: Option<u32>,
    /// What is wrong.
    pub reason: Reason,
    /// What was found.
    pub have: String,
    /// What would be right.
    pub expect: String,
}

impl Corruption {
    /// A finding with no place yet.
    #[cold]
    pub fn new(reason: Reason) -> Box<Self> {
        Box::new(Self {
            root: None,
            block: None,
            slot: None,
            reason,
            have: String::new(),
            expect: String::new(),
        })
    }

    /// Says what was found.
    pub fn have(mut self: Box<Self>, have: impl fmt::Display) -> Box<Self> {
        self.have = have.to_string();
        self
    }

    /// Says what would be right.
    pub fn expect(mut self: Box<Self>, expect: impl fmt::Display) -> Box<Self> {
        self.expect = expect.to_string();
        self
    }

    /// Names the tree, unless it is named already.
    pub fn in_root(mut self: Box<Self>, root: RootId) -> Box<Self> {
        self.root.get_or_insert(root);
        self
    }

    /// Names the block, unless it is named already.
    pub fn in_block(mut self: Box<Self>, block: LogicalAddr) -> Box<Self> {
        self.block.get_or_insert(block);
        self
    }

    /// Names the slot, unless it is named already.
    pub fn at_slot(mut self: Box<Self>, slot: usize) -> Box<Self> {
        self.slot.get_or_insert(u32::try_from(slot).unwrap_or(u32::MAX));
        self
    }
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        if let Some(slot) = self.slot {
            write!(f, ", slot {slot}")?;
        }
        if !self.have.is_empty() {
            write!(f, ", have {}", self.have)?;
        }
        if !self.expect.is_empty() {
            write!(f, ", expect {}", self.expect)?;
        }
        Ok(())
    }
}

impl std::error::Error for Corruption {}
