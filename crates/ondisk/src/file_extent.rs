//! File extents: what an inode's bytes are.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use crate::error::{Corruption, Reason, Result};
use crate::misc::{OnDisk, on_disk, truncated};
use crate::types::{Generation, LogicalAddr};

on_disk!(
    /// The part of `struct btrfs_file_extent_item` that inline extents have too. Key: (inode,
    /// EXTENT_DATA, file offset).
    FileExtentHeader [21] {
        /// Generation in which the extent was made.
        generation: U64,
        /// Bytes of the whole extent when decompressed.
        ram_bytes: U64,
        /// [`Compression`].
        compression: u8,
        /// Always 0.
        encryption: u8,
        /// Always 0; Linux reads others as if it were.
        other_encoding: U16,
        /// 0 inline, 1 regular, 2 preallocated.
        ty: u8,
    }
);

on_disk!(
    /// `struct btrfs_file_extent_item`, of a regular or preallocated extent.
    FileExtentItem [53] {
        /// The part in common.
        header: FileExtentHeader,
        /// Where the data lies; 0 is a hole.
        disk_bytenr: U64,
        /// Bytes on disk.
        disk_num_bytes: U64,
        /// First byte used, in the decompressed extent.
        offset: U64,
        /// Bytes of the file that it covers.
        num_bytes: U64,
    }
);

/// How data is compressed: `BTRFS_COMPRESS_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// zlib.
    Zlib,
    /// LZO1X in segments.
    Lzo,
    /// zstd.
    Zstd,
}

impl Compression {
    /// From the number on disk.
    ///
    /// # Errors
    /// `BadValue` for a number that is not assigned.
    pub fn from_disk(number: u8) -> Result<Self> {
        match number {
            0 => Ok(Self::None),
            1 => Ok(Self::Zlib),
            2 => Ok(Self::Lzo),
            3 => Ok(Self::Zstd),
            other => Err(Corruption::new(Reason::BadValue)
                .have(format!("compression {other}"))
                .expect("0 to 3")),
        }
    }

    /// The number on disk.
    pub fn to_disk(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Zlib => 1,
            Self::Lzo => 2,
            Self::Zstd => 3,
        }
    }
}

/// A file extent, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileExtent<'a> {
    /// The data itself, in the item.
    Inline {
        /// Generation in which it was made.
        generation: Generation,
        /// Bytes when decompressed.
        ram_bytes: u64,
        /// How `data` is compressed.
        compression: Compression,
        /// The bytes in the item.
        data: &'a [u8],
    },
    /// Data in an extent of its own, or a hole where `disk_bytenr` is 0.
    Regular(RegularExtent),
    /// Space in an extent that reads as zeros.
    Prealloc(RegularExtent),
}

/// The fields of a regular or preallocated file extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegularExtent {
    /// Generation in which it was made.
    pub generation: Generation,
    /// Bytes of the whole extent when decompressed.
    pub ram_bytes: u64,
    /// How it is compressed.
    pub compression: Compression,
    /// Where the extent begins; 0 is a hole.
    pub disk_bytenr: LogicalAddr,
    /// Bytes on disk.
    pub disk_num_bytes: u64,
    /// First byte used, in the decompressed extent.
    pub offset: u64,
    /// Bytes of the file that it covers.
    pub num_bytes: u64,
}

impl RegularExtent {
    /// Whether it is an explicit hole.
    pub fn is_hole(&self) -> bool {
        self.disk_bytenr.0 == 0
    }
}

impl<'a> FileExtent<'a> {
    /// Reads an EXTENT_DATA item.
    ///
    /// # Errors
    /// `Truncated`, or `BadValue` for a type, compression or encryption that is not assigned.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let (header, data) = FileExtentHeader::split(bytes)?;
        let compression = Compression::from_disk(header.compression)?;
        if header.encryption != 0 {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("encryption {}", header.encryption))
                .expect("0"));
        }
        let generation = Generation(header.generation.get());
        let ram_bytes = header.ram_bytes.get();
        if header.ty == 0 {
            return Ok(Self::Inline { generation, ram_bytes, compression, data });
        }
        if header.ty > 2 {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("file extent type {}", header.ty))
                .expect("0 to 2"));
        }
        if bytes.len() < size_of::<FileExtentItem>() {
            return Err(truncated(bytes.len(), size_of::<FileExtentItem>()));
        }
        let item = FileExtentItem::peek(bytes)?;
        let extent = RegularExtent {
            generation,
            ram_bytes,
            compression,
            disk_bytenr: LogicalAddr(item.disk_bytenr.get()),
            disk_num_bytes: item.disk_num_bytes.get(),
            offset: item.offset.get(),
            num_bytes: item.num_bytes.get(),
        };
        Ok(if header.ty == 1 { Self::Regular(extent) } else { Self::Prealloc(extent) })
    }

    /// Appends the item's bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        let header = |generation: Generation, ram_bytes: u64, compression: Compression, ty| {
            FileExtentHeader {
                generation: generation.0.into(),
                ram_bytes: ram_bytes.into(),
                compression: compression.to_disk(),
                encryption: 0,
                other_encoding: 0.into(),
                ty,
            }
        };
        let regular = |extent: &RegularExtent, ty| FileExtentItem {
            header: header(extent.generation, extent.ram_bytes, extent.compression, ty),
            disk_bytenr: extent.disk_bytenr.0.into(),
            disk_num_bytes: extent.disk_num_bytes.into(),
            offset: extent.offset.into(),
            num_bytes: extent.num_bytes.into(),
        };
        match self {
            Self::Inline { generation, ram_bytes, compression, data } => {
                let header = header(*generation, *ram_bytes, *compression, 0);
                out.extend_from_slice(header.as_bytes());
                out.extend_from_slice(data);
            }
            Self::Regular(extent) => out.extend_from_slice(regular(extent, 1).as_bytes()),
            Self::Prealloc(extent) => out.extend_from_slice(regular(extent, 2).as_bytes()),
        }
    }
}
