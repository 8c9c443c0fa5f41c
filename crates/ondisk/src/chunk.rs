//! Chunks: ranges of logical space and the stripes that hold them.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::block_group::BlockGroupFlags;
use crate::error::{Corruption, Reason, Result};
use crate::misc::{OnDisk, on_disk};
use crate::types::{DeviceId, LogicalAddr, PhysicalAddr, Uuid};

/// Length of a stripe element, the only one that Linux writes.
pub const STRIPE_LEN_BYTES: u64 = 64 * 1024;

on_disk!(
    /// `struct btrfs_chunk` without its first stripe. Key: (256, CHUNK_ITEM, logical address).
    ChunkHeader [48] {
        /// Length in logical space, in bytes.
        length: U64,
        /// Owner: the extent tree's object id, 2.
        owner: U64,
        /// Bytes of one stripe element.
        stripe_len: U64,
        /// Type and profile.
        ty: U64,
        /// Optimal alignment of I/O.
        io_align: U32,
        /// Optimal width of I/O.
        io_width: U32,
        /// Least I/O.
        sector_size: U32,
        /// Stripes that follow.
        num_stripes: U16,
        /// Copies a stripe for RAID10, else 1 (or 0, in old filesystems).
        sub_stripes: U16,
    }
);

on_disk!(
    /// `struct btrfs_stripe`.
    Stripe [32] {
        /// The device.
        devid: U64,
        /// Offset on it.
        offset: U64,
        /// Its uuid.
        dev_uuid: [u8; 16],
    }
);

/// Where one stripe of a chunk lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkStripe {
    /// The device.
    pub device: DeviceId,
    /// Offset of the stripe on it.
    pub offset: PhysicalAddr,
    /// The device's uuid.
    pub device_uuid: Uuid,
}

/// A chunk item, decoded. There are few of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// First logical byte (the key's offset).
    pub start: LogicalAddr,
    /// Length in logical space, in bytes.
    pub len_bytes: u64,
    /// Bytes of one stripe element.
    pub stripe_len_bytes: u64,
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Optimal alignment of I/O.
    pub io_align: u32,
    /// Optimal width of I/O.
    pub io_width: u32,
    /// Least I/O.
    pub sector_size: u32,
    /// Copies a stripe for RAID10.
    pub sub_stripes: u16,
    /// The stripes.
    pub stripes: Vec<ChunkStripe>,
}

impl Chunk {
    /// Reads a chunk item, `start` being its key's offset. Bytes behind the stripes are an error.
    ///
    /// # Errors
    /// `Truncated` or `BadItemLen` when the stripes do not fill the item exactly; `BadValue` for
    /// no stripes or a length of zero.
    pub fn parse(start: LogicalAddr, bytes: &[u8]) -> Result<Self> {
        let (chunk, used) = Self::parse_prefix(start, bytes)?;
        if used != bytes.len() {
            return Err(Corruption::new(Reason::BadItemLen).have(bytes.len()).expect(used));
        }
        Ok(chunk)
    }

    /// As [`Chunk::parse`], but other bytes may follow; returns how many were used.
    ///
    /// # Errors
    /// As [`Chunk::parse`].
    pub fn parse_prefix(start: LogicalAddr, bytes: &[u8]) -> Result<(Self, usize)> {
        let (header, mut rest) = ChunkHeader::split(bytes)?;
        let stripe_count = usize::from(header.num_stripes.get());
        if stripe_count == 0 {
            return Err(Corruption::new(Reason::BadValue).have("0 stripes").expect("at least 1"));
        }
        let mut stripes = Vec::with_capacity(stripe_count.min(bytes.len() / size_of::<Stripe>()));
        for _ in 0..stripe_count {
            let (stripe, tail) = Stripe::split(rest)?;
            rest = tail;
            stripes.push(ChunkStripe {
                device: DeviceId(stripe.devid.get()),
                offset: PhysicalAddr(stripe.offset.get()),
                device_uuid: Uuid(stripe.dev_uuid),
            });
        }
        let len_bytes = header.length.get();
        if len_bytes == 0 || start.checked_add(len_bytes).is_none() {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("chunk of {len_bytes} bytes at {start}"))
                .expect("a range of the logical space"));
        }
        let chunk = Self {
            start,
            len_bytes,
            stripe_len_bytes: header.stripe_len.get(),
            flags: BlockGroupFlags(header.ty.get()),
            io_align: header.io_align.get(),
            io_width: header.io_width.get(),
            sector_size: header.sector_size.get(),
            sub_stripes: header.sub_stripes.get(),
            stripes,
        };
        Ok((chunk, bytes.len() - rest.len()))
    }

    /// The item's bytes.
    ///
    /// # Panics
    /// With more than 65,535 stripes, which [`Chunk::parse`] cannot return and no profile makes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = ChunkHeader {
            length: self.len_bytes.into(),
            owner: 2.into(),
            stripe_len: self.stripe_len_bytes.into(),
            ty: self.flags.0.into(),
            io_align: self.io_align.into(),
            io_width: self.io_width.into(),
            sector_size: self.sector_size.into(),
            num_stripes: u16::try_from(self.stripes.len()).expect("stripes fit 16 bits").into(),
            sub_stripes: self.sub_stripes.into(),
        };
        let mut bytes = header.as_bytes().to_vec();
        for stripe in &self.stripes {
            let stripe = Stripe {
                devid: stripe.device.0.into(),
                offset: stripe.offset.0.into(),
                dev_uuid: stripe.device_uuid.0,
            };
            bytes.extend_from_slice(stripe.as_bytes());
        }
        bytes
    }

    /// End of the chunk in logical space.
    pub fn end(&self) -> LogicalAddr {
        LogicalAddr(self.start.0 + self.len_bytes)
    }
}
