//! Directory entries and extended attributes.

use std::ops::Range;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use crate::error::{Corruption, Reason, Result};
use crate::key::{DiskKey, Key};
use crate::misc::{OnDisk, on_disk, truncated};
use crate::types::Generation;

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

impl DirItem {
    /// The fixed part of an entry; [`write_entry`] fills in the lengths.
    pub fn new(location: Key, transid: Generation, file_type: FileType) -> Self {
        Self {
            location: DiskKey::new(location),
            transid: transid.0.into(),
            data_len: 0.into(),
            name_len: 0.into(),
            ty: file_type.to_disk(),
        }
    }
}

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

/// Appends an entry: `item` with the lengths of `name` and `data`, then both.
///
/// # Panics
/// When name or data are longer than 65,535 bytes, which no item can hold.
pub fn write_entry(out: &mut Vec<u8>, item: &DirItem, name: &[u8], data: &[u8]) {
    let item = DirItem {
        name_len: u16::try_from(name.len()).expect("a name fits its item").into(),
        data_len: u16::try_from(data.len()).expect("a value fits its item").into(),
        ..*item
    };
    out.extend_from_slice(item.as_bytes());
    out.extend_from_slice(name);
    out.extend_from_slice(data);
}

/// Finds the entry of `name` in an item that may hold several: its bytes' range, and the entry.
///
/// # Errors
/// `Truncated` when an entry before it, or its own, reaches past the item.
pub fn find_entry<'a>(
    bytes: &'a [u8],
    name: &[u8],
) -> Result<Option<(Range<usize>, DirEntry<'a>)>> {
    let mut start = 0;
    for entry in DirEntries::new(bytes) {
        let entry = entry?;
        let end = start + entry.len_bytes();
        if entry.name == name {
            return Ok(Some((start..end, entry)));
        }
        start = end;
    }
    Ok(None)
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
