//! Directory entries and extended attributes.

use zerocopy::little_endian::{U16, U64};

use crate::error::{Corruption, Reason, Result};
use crate::key::DiskKey;
use crate::misc::{OnDisk, on_disk, truncated};

/// Longest name, in bytes.
pub const NAME_LEN_MAX: usize = 255;

on_disk!(
    /// `struct btrfs_dir_item`, name and data behind it. Keys: (directory, DIR_ITEM or XATTR_ITEM,
    /// name hash), where an item holds all names of one hash, and (directory, DIR_INDEX, index).
    DirItem [30] {
        /// Key of what is named: an inode, or a root; zero for an xattr.
        location: DiskKey,
        /// Transaction of the entry.
        transid: U64,
        /// Bytes of the data behind the name (xattrs only).
        data_len: U16,
        /// Bytes of the name.
        name_len: U16,
        /// [`FileType`].
        ty: u8,
    }
);

/// What an entry names: `BTRFS_FT_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum FileType {
    /// Not known.
    Unknown,
    /// A regular file.
    Regular,
    /// A directory or subvolume.
    Directory,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A symbolic link.
    Symlink,
    /// An extended attribute, not a file.
    Xattr,
}

impl FileType {
    /// From the number on disk; numbers that are not assigned are `Unknown`, as in Linux.
    pub fn from_disk(number: u8) -> Self {
        match number & 0x7f {
            1 => Self::Regular,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            8 => Self::Xattr,
            _ => Self::Unknown,
        }
    }

    /// The number on disk.
    pub fn to_disk(self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::Regular => 1,
            Self::Directory => 2,
            Self::CharDevice => 3,
            Self::BlockDevice => 4,
            Self::Fifo => 5,
            Self::Socket => 6,
            Self::Symlink => 7,
            Self::Xattr => 8,
        }
    }

    /// From the type bits of a mode.
    pub fn from_mode(mode: u32) -> Self {
        match mode & 0o170_000 {
            0o100_000 => Self::Regular,
            0o040_000 => Self::Directory,
            0o020_000 => Self::CharDevice,
            0o060_000 => Self::BlockDevice,
            0o010_000 => Self::Fifo,
            0o140_000 => Self::Socket,
            0o120_000 => Self::Symlink,
            _ => Self::Unknown,
        }
    }
}

/// One entry of a directory or xattr item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirEntry<'a> {
    /// The fixed part.
    pub item: &'a DirItem,
    /// The name, without its namespace's meaning.
    pub name: &'a [u8],
    /// The value of an xattr; empty for a directory entry.
    pub data: &'a [u8],
}

impl<'a> DirEntry<'a> {
    /// Bytes that the entry takes in its item.
    pub fn len_bytes(&self) -> usize {
        size_of::<DirItem>() + self.name.len() + self.data.len()
    }

    /// Splits the first entry off an item's bytes.
    ///
    /// # Errors
    /// `Truncated` when name or data reach past the item.
    pub fn split(bytes: &'a [u8]) -> Result<(Self, &'a [u8])> {
        let (item, rest) = DirItem::split(bytes)?;
        let name_len = usize::from(item.name_len.get());
        let data_len = usize::from(item.data_len.get());
        if rest.len() < name_len + data_len {
            return Err(truncated(rest.len(), name_len + data_len));
        }
        let (name, rest) = rest.split_at(name_len);
        let (data, rest) = rest.split_at(data_len);
        Ok((Self { item, name, data }, rest))
    }

    /// What the entry names.
    pub fn file_type(&self) -> FileType {
        FileType::from_disk(self.item.ty)
    }
}

/// Walks the entries of one item.
#[derive(Clone, Copy, Debug)]
pub struct DirEntries<'a> {
    rest: &'a [u8],
}

impl<'a> DirEntries<'a> {
    /// The entries of an item's bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for DirEntries<'a> {
    type Item = Result<DirEntry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match DirEntry::split(self.rest) {
            Ok((entry, rest)) => {
                self.rest = rest;
                Some(Ok(entry))
            }
            Err(error) => {
                self.rest = &[];
                Some(Err(error))
            }
        }
    }
}

/// Checks a name for use in a directory.
///
/// # Errors
/// `BadValue` for an empty or overlong name, `.`, `..`, or one with `/` or a zero byte.
pub fn check_name(name: &[u8]) -> Result<()> {
    let bad = name.is_empty()
        || name.len() > NAME_LEN_MAX
        || name == b"."
        || name == b".."
        || name.iter().any(|byte| matches!(byte, 0 | b'/'));
    if bad {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("name {:?}", String::from_utf8_lossy(name)))
            .expect("1 to 255 bytes without '/' or NUL"));
    }
    Ok(())
}
