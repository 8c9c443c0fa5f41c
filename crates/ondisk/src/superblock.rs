//! The superblock.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::chunk::Chunk;
use crate::csum::{CSUM_FIELD_BYTES, CsumType};
use crate::error::{Corruption, Reason, Result};
use crate::key::{DiskKey, Key, KeyType};
use crate::misc::{DevItem, OnDisk, on_disk};
use crate::types::{LogicalAddr, ObjectId, PhysicalAddr, Uuid};

/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// `_BHRfS_M`, little-endian.
pub const MAGIC: u64 = 0x4D5F_5366_5248_425F;
/// Where the copies lie on a device, the primary first; a copy exists where it fits.
pub const SUPERBLOCK_OFFSETS: [PhysicalAddr; 3] =
    [PhysicalAddr(64 << 10), PhysicalAddr(64 << 20), PhysicalAddr(256 << 30)];
/// Bytes of the label field, its closing NUL included.
pub const LABEL_BYTES: usize = 256;
/// Bytes of the array of system chunks.
pub const SYS_CHUNK_ARRAY_BYTES: usize = 2048;

on_disk!(
    /// `struct btrfs_root_backup`: the roots of an earlier commit.
    RootBackup [168] {
        /// Root tree.
        tree_root: U64,
        /// Its generation.
        tree_root_gen: U64,
        /// Chunk tree.
        chunk_root: U64,
        /// Its generation.
        chunk_root_gen: U64,
        /// Extent tree (or block group tree, with the second extent tree).
        extent_root: U64,
        /// Its generation.
        extent_root_gen: U64,
        /// Top-level subvolume.
        fs_root: U64,
        /// Its generation.
        fs_root_gen: U64,
        /// Device tree.
        dev_root: U64,
        /// Its generation.
        dev_root_gen: U64,
        /// Checksum tree.
        csum_root: U64,
        /// Its generation.
        csum_root_gen: U64,
        /// As in the superblock.
        total_bytes: U64,
        /// As in the superblock.
        bytes_used: U64,
        /// As in the superblock.
        num_devices: U64,
        /// Reserved.
        unused_64: [U64; 4],
        /// Level of the root tree.
        tree_root_level: u8,
        /// Level of the chunk tree.
        chunk_root_level: u8,
        /// Level of the extent tree.
        extent_root_level: u8,
        /// Level of the top-level subvolume.
        fs_root_level: u8,
        /// Level of the device tree.
        dev_root_level: u8,
        /// Level of the checksum tree.
        csum_root_level: u8,
        /// Reserved.
        unused_8: [u8; 10],
    }
);

on_disk!(
    /// `struct btrfs_super_block`.
    Superblock [4096] {
        /// Checksum of all that follows it.
        csum: [u8; CSUM_FIELD_BYTES],
        /// The filesystem, as users know it.
        fsid: [u8; 16],
        /// This copy's own offset.
        bytenr: U64,
        /// Header flags, [`flags`].
        flags: U64,
        /// [`MAGIC`].
        magic: U64,
        /// The last transaction.
        generation: U64,
        /// Root block of the root tree.
        root: U64,
        /// Root block of the chunk tree.
        chunk_root: U64,
        /// Root block of the log root tree; 0 without a log.
        log_root: U64,
        /// Unused.
        log_root_transid: U64,
        /// Bytes of all devices.
        total_bytes: U64,
        /// Bytes of all extents.
        bytes_used: U64,
        /// The root tree's directory, 6.
        root_dir_objectid: U64,
        /// Number of devices.
        num_devices: U64,
        /// Bytes of a sector: the unit of data.
        sectorsize: U32,
        /// Bytes of a tree block.
        nodesize: U32,
        /// Unused; equal to nodesize.
        leafsize: U32,
        /// Equal to sectorsize.
        stripesize: U32,
        /// Bytes used of the array of system chunks.
        sys_chunk_array_size: U32,
        /// Generation of the chunk tree.
        chunk_root_generation: U64,
        /// Compatible features (none exist).
        compat_flags: U64,
        /// Features that a writer must know.
        compat_ro_flags: U64,
        /// Features that a reader must know.
        incompat_flags: U64,
        /// [`CsumType`].
        csum_type: U16,
        /// Level of the root tree.
        root_level: u8,
        /// Level of the chunk tree.
        chunk_root_level: u8,
        /// Level of the log root tree.
        log_root_level: u8,
        /// The device that this copy is on.
        dev_item: DevItem,
        /// The label, NUL behind it.
        label: [u8; LABEL_BYTES],
        /// Generation of the v1 free space cache; !0 for none, 0 with a valid free space tree.
        cache_generation: U64,
        /// Generation of the uuid tree.
        uuid_tree_generation: U64,
        /// The uuid in block headers, with METADATA_UUID.
        metadata_uuid: [u8; 16],
        /// Number of global roots (second extent tree).
        nr_global_roots: U64,
        /// Reserved.
        reserved: [U64; 27],
        /// Keys and chunk items of the system chunks.
        sys_chunk_array: [u8; SYS_CHUNK_ARRAY_BYTES],
        /// The roots of the last four commits.
        super_roots: [RootBackup; 4],
        /// Zeros.
        padding: [u8; 565],
    }
);

/// Bits of [`Superblock::flags`].
pub mod flags {
    /// Set in every superblock.
    pub const WRITTEN: u64 = 1 << 0;
    /// Errors were met.
    pub const ERROR: u64 = 1 << 2;
    /// A seed device.
    pub const SEEDING: u64 = 1 << 32;
    /// A metadata image.
    pub const METADUMP: u64 = 1 << 33;
    /// A metadata image with several devices.
    pub const METADUMP_V2: u64 = 1 << 34;
    /// The fsid is being changed.
    pub const CHANGING_FSID: u64 = 1 << 35;
    /// The fsid is being changed (metadata uuid).
    pub const CHANGING_FSID_V2: u64 = 1 << 36;
}

impl Superblock {
    /// Reads the copy that lies at `at`: magic, checksum and own address must be right; the fields
    /// are judged in [`crate::verify`].
    ///
    /// # Errors
    /// `Truncated`, `BadMagic`, `UnknownCsumType`, `CsumMismatch` or `WrongBytenr`.
    pub fn parse(bytes: &[u8], at: PhysicalAddr) -> Result<Box<Self>> {
        let superblock = Self::peek(bytes)?;
        if superblock.magic.get() != MAGIC {
            return Err(Corruption::new(Reason::BadMagic)
                .have(format!("{:#x}", superblock.magic.get()))
                .expect(format!("{MAGIC:#x}")));
        }
        let csum = superblock.csum_type()?;
        let body = &bytes[CSUM_FIELD_BYTES..SUPERBLOCK_BYTES];
        if !csum.matches(&superblock.csum, body) {
            return Err(Corruption::new(Reason::CsumMismatch)
                .have(hex(&superblock.csum[..csum.len_bytes()]))
                .expect(hex(&csum.compute(body)[..csum.len_bytes()])));
        }
        if superblock.bytenr.get() != at.0 {
            return Err(Corruption::new(Reason::WrongBytenr).have(superblock.bytenr).expect(at));
        }
        Ok(Box::new(*superblock))
    }

    /// Sets the copy's own address and checksum; the bytes are then ready to be written at `at`.
    ///
    /// # Errors
    /// `UnknownCsumType` when the field is not assigned.
    pub fn seal(&mut self, at: PhysicalAddr) -> Result<()> {
        self.bytenr = at.0.into();
        let csum = self.csum_type()?;
        self.csum = csum.compute(&self.as_bytes()[CSUM_FIELD_BYTES..]);
        Ok(())
    }

    /// The checksum algorithm.
    ///
    /// # Errors
    /// `UnknownCsumType` when the number is not assigned.
    pub fn csum_type(&self) -> Result<CsumType> {
        CsumType::from_disk(self.csum_type.get())
    }

    /// The uuid that block headers carry.
    pub fn header_fsid(&self) -> Uuid {
        let incompat = crate::features::Incompat(self.incompat_flags.get());
        if incompat.contains(crate::features::Incompat::METADATA_UUID) {
            Uuid(self.metadata_uuid)
        } else {
            Uuid(self.fsid)
        }
    }

    /// The label, without its NUL.
    pub fn label(&self) -> &[u8] {
        let end = self.label.iter().position(|byte| *byte == 0).unwrap_or(LABEL_BYTES);
        &self.label[..end]
    }

    /// Sets the label.
    ///
    /// # Errors
    /// `BadValue` when it has more than 255 bytes, or holds a NUL or a newline.
    pub fn set_label(&mut self, label: &[u8]) -> Result<()> {
        if label.len() >= LABEL_BYTES || label.iter().any(|byte| matches!(byte, 0 | b'\n')) {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("label {:?}", String::from_utf8_lossy(label)))
                .expect("at most 255 bytes without NUL or newline"));
        }
        self.label = [0; LABEL_BYTES];
        self.label[..label.len()].copy_from_slice(label);
        Ok(())
    }

    /// Fills the array of system chunks, zeros behind them.
    ///
    /// # Errors
    /// `BadItemLen` when the chunks do not fit; the array is then unchanged.
    pub fn set_sys_chunks(&mut self, chunks: &[Chunk]) -> Result<()> {
        let mut array = Vec::new();
        for chunk in chunks {
            let key = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, chunk.start.0);
            array.extend_from_slice(DiskKey::new(key).as_bytes());
            array.extend_from_slice(&chunk.to_bytes());
        }
        if array.len() > SYS_CHUNK_ARRAY_BYTES {
            return Err(Corruption::new(Reason::BadItemLen)
                .have(format!("system chunk array of {} bytes", array.len()))
                .expect(format!("at most {SYS_CHUNK_ARRAY_BYTES}")));
        }
        self.sys_chunk_array = [0; SYS_CHUNK_ARRAY_BYTES];
        self.sys_chunk_array[..array.len()].copy_from_slice(&array);
        self.sys_chunk_array_size =
            u32::try_from(array.len()).expect("no more than the array").into();
        Ok(())
    }

    /// The chunks of the array of system chunks.
    ///
    /// # Errors
    /// `BadItemLen` when the array's length is over its field, `BadKey` when an entry is no chunk,
    /// and whatever [`Chunk::parse_prefix`] finds.
    pub fn sys_chunks(&self) -> Result<Vec<Chunk>> {
        let len = usize::try_from(self.sys_chunk_array_size.get()).unwrap_or(usize::MAX);
        let mut rest = self.sys_chunk_array.get(..len).ok_or_else(|| {
            Corruption::new(Reason::BadItemLen)
                .have(format!("system chunk array of {len} bytes"))
                .expect(format!("at most {SYS_CHUNK_ARRAY_BYTES}"))
        })?;
        let mut chunks = Vec::new();
        while !rest.is_empty() {
            let (disk_key, tail) = DiskKey::split(rest)?;
            let key = disk_key.key();
            if key.ty != KeyType::CHUNK_ITEM {
                return Err(Corruption::new(Reason::BadKey).have(key).expect("a chunk item"));
            }
            let (chunk, used) = Chunk::parse_prefix(LogicalAddr(key.offset), tail)?;
            chunks.push(chunk);
            rest = &tail[used..];
        }
        Ok(chunks)
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
