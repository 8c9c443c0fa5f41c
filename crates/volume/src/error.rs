//! What can go wrong below the trees, and what to do about it.

use std::fmt;
use std::io;

use ubtrfs_ondisk::{Corruption, DeviceId, Generation, LogicalAddr, PhysicalAddr, Uuid};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was being done to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Opening it.
    Open,
    /// Taking the lock that keeps a second program out.
    Lock,
    /// Reading from it.
    Read,
    /// Writing to it.
    Write,
    /// Making what was written durable.
    Flush,
    /// Giving back a range.
    Discard,
    /// Changing its length.
    Resize,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Lock => "lock",
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::Resize => "resize",
        })
    }
}

/// An error of a device or of the volume that devices make up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device failed.
    #[error("{device}: {op} at offset {offset}: {source}")]
    Io {
        /// Its name.
        device: String,
        /// What was being done.
        op: Op,
        /// Where on it.
        offset: PhysicalAddr,
        /// Why.
        source: io::Error,
    },
    /// Bytes that were read are not what the format allows.
    #[error("{0}")]
    Corrupt(#[from] Box<Corruption>),
    /// No copy of a range is whole; the finding is that of the last copy tried.
    #[error("{corruption} (none of {copies} copies at logical address {at} is whole)")]
    NoWholeCopy {
        /// The logical address.
        at: LogicalAddr,
        /// Copies that the profile keeps.
        copies: usize,
        /// What is wrong with the last that was tried.
        corruption: Box<Corruption>,
    },
    /// A whole format feature that is not built.
    #[error("{what}: not supported")]
    Unsupported {
        /// The feature's name.
        what: String,
    },
    /// There is no btrfs filesystem.
    #[error(
        "{device}: no btrfs filesystem: {}; \
         if it is in a partition, name it with --partition or --offset",
        name_found(*found, *at)
    )]
    NotBtrfs {
        /// The device's name.
        device: String,
        /// Where it was looked for.
        at: PhysicalAddr,
        /// What is there instead, where that is known.
        found: Option<&'static str>,
    },
    /// The superblock that was asked for is damaged.
    #[error("{device}: superblock copy {copy}: {corruption}; {hint}")]
    BadSuperblock {
        /// The device's name.
        device: String,
        /// Which copy, 0 being the primary.
        copy: usize,
        /// What is wrong with it.
        corruption: Box<Corruption>,
        /// What else can be tried.
        hint: String,
    },
    /// A device of the filesystem was not named, or is out of date.
    #[error(
        "device {} of filesystem {fsid} is missing: name it too (--device FILE), \
         or open with --degraded, which works where the profile keeps another copy",
        name_device(*devid, *device_uuid)
    )]
    MissingDevice {
        /// The filesystem.
        fsid: Uuid,
        /// The device's number, where known.
        devid: Option<DeviceId>,
        /// Its own uuid, where known.
        device_uuid: Option<Uuid>,
    },
    /// A device missed commits that another one has.
    #[error(
        "{device}: out of date: it holds generation {have}, another device of the filesystem \
         holds {newest}; leave it out and open with --degraded, then replace it"
    )]
    StaleDevice {
        /// The device's name.
        device: String,
        /// Its superblock's generation.
        have: Generation,
        /// The newest generation.
        newest: Generation,
    },
    /// A device is of the newest generation, and of another commit: it and another were each written to without the other.
    #[error(
        "{device}: of generation {generation} as another device of the filesystem, but of another \
         history: each was written to without the other; give only those whose history is to go on, with --degraded, and replace the others"
    )]
    OtherHistory {
        /// The device's name.
        device: String,
        /// The generation of both.
        generation: Generation,
    },
    /// A device belongs to another filesystem than the first.
    #[error("{device}: belongs to filesystem {have}, not to {expect}")]
    OtherFilesystem {
        /// The device's name.
        device: String,
        /// Its filesystem.
        have: Uuid,
        /// The first device's.
        expect: Uuid,
    },
    /// Two files hold the same device of the filesystem.
    #[error("{first} and {second} are both device {devid} of the filesystem; name one of them")]
    DuplicateDevice {
        /// One file.
        first: String,
        /// The other.
        second: String,
        /// The device's number.
        devid: DeviceId,
    },
    /// The device is shorter than its filesystem says.
    #[error(
        "{device}: cut short: it has {have_bytes} bytes, its filesystem {expect_bytes}; \
         open it read-only to rescue what is there"
    )]
    TooShort {
        /// The device's name.
        device: String,
        /// Its length.
        have_bytes: u64,
        /// The length in the filesystem.
        expect_bytes: u64,
    },
    /// Somebody else wrote the superblock while it was open here.
    #[error(
        "{device}: the superblock changed while it was open here ({}): something else has written to \
         it; {}",
        name_change(*.have, *.expect),
        name_overlap(*.has_written)
    )]
    SuperblockChanged {
        /// The device's name.
        device: String,
        /// The generation found; `None` where there is no superblock any more.
        have: Option<Generation>,
        /// The generation last read or written here.
        expect: Generation,
        /// Something was written here since it was last compared, and may lie over what the other wrote.
        has_written: bool,
    },
    /// Another program has the image or device open.
    #[error("{device}: in use: {holder}; close it there first")]
    Busy {
        /// The device's name.
        device: String,
        /// Who has it, as far as known.
        holder: String,
    },
    /// The kernel has it mounted.
    #[error("{device}: mounted by the kernel {place}; unmount it first")]
    MountedByKernel {
        /// The device's name.
        device: String,
        /// Where, and through which block device.
        place: String,
    },
    /// No chunk holds the logical address, or the range leaves its chunk.
    #[error("no chunk maps logical range {at}+{len_bytes}")]
    NoChunk {
        /// First byte.
        at: LogicalAddr,
        /// Bytes.
        len_bytes: u64,
    },
    /// A mirror that the profile does not have.
    #[error("no copy {mirror} at logical address {at}: there are {copies}")]
    NoMirror {
        /// The address.
        at: LogicalAddr,
        /// What was asked for, counted from 0.
        mirror: usize,
        /// How many there are.
        copies: usize,
    },
    /// No device has that number.
    #[error("no device {devid} in the filesystem")]
    NoDevice {
        /// The number.
        devid: DeviceId,
    },
    /// A write to what was opened for reading.
    #[error("{device}: opened read-only")]
    ReadOnly {
        /// The device's name.
        device: String,
    },
    /// The partition does not exist or cannot be found.
    #[error("{device}: {what}")]
    Partition {
        /// The device's name.
        device: String,
        /// What is wrong, and which partitions there are.
        what: String,
    },
}

fn name_found(found: Option<&str>, at: PhysicalAddr) -> String {
    match found {
        Some(found) => format!("it is {found}"),
        None => format!("no btrfs magic number at offset {at}"),
    }
}

fn name_change(have: Option<Generation>, expect: Generation) -> String {
    match have {
        Some(have) => format!("generation {have}, expected {expect}"),
        None => format!("there is none, expected generation {expect}"),
    }
}

fn name_overlap(has_written: bool) -> &'static str {
    match has_written {
        false => {
            "nothing was written over that, what was not committed here is lost; open it again when \
             the other has finished"
        }
        true => {
            "what was written here in the moment since it was last compared may lie over that, what \
             was not committed here is lost; check it when the other has finished, before it is used"
        }
    }
}

fn name_device(devid: Option<DeviceId>, uuid: Option<Uuid>) -> String {
    let mut name = devid.map_or("(number unknown)".to_owned(), |devid| devid.to_string());
    if let Some(uuid) = uuid {
        name.push_str(&format!(" (uuid {uuid})"));
    }
    name
}
