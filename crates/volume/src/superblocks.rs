//! Superblocks: which copy is believed at opening, and the order in which they are written.
//!
//! Invariants:
//! 1. Only the copy that was asked for is believed, the primary unless told otherwise. What other
//!    copies hold goes into the message, never silently into the filesystem.
//! 2. The caller has flushed all that the new superblock reaches. All copies that are not primary
//!    are written first, then the primaries, then all devices are flushed: a cut at any write
//!    leaves primaries that are the old or the new one. Of several devices, the copies are flushed
//!    before the first primary: by its copy, a device whose primary was not written any more is told
//!    from one that was missing.
//!    What was found at opening is written to all primaries and flushed before anything else is written: a cut may have kept it from some,
//!    and it may have been read from a cache only.
//! 3. Each primary must be the one last read or written here: [`crate::volume`] compares them, before a commit and now and again while
//!    anything is written.

use ubtrfs_ondisk::csum::CSUM_FIELD_BYTES;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock, flags};
use ubtrfs_ondisk::{Corruption, Generation, PhysicalAddr, Reason};
use zerocopy::{FromZeros, IntoBytes};

use crate::device::Device;
use crate::error::{Error, Op, Result};
use crate::probe::{self, Contents};

/// What tells one state of a superblock from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) generation: Generation,
    csum: [u8; CSUM_FIELD_BYTES],
}

impl Seen {
    pub(crate) fn of(superblock: &Superblock) -> Self {
        Self { generation: Generation(superblock.generation.get()), csum: superblock.csum }
    }
}

/// Whether two superblocks are of one commit: what is of the device, of the place, and of the log, which is written between commits, may
/// differ, and the old roots that are kept for rescue. Two devices that were each written to without the other may have come to the same generation.
pub(crate) fn is_same_commit(one: &Superblock, other: &Superblock) -> bool {
    let common = |superblock: &Superblock| Superblock {
        csum: [0; CSUM_FIELD_BYTES],
        bytenr: 0.into(),
        dev_item: DevItem::new_zeroed(),
        log_root: 0.into(),
        log_root_transid: 0.into(),
        log_root_level: 0,
        super_roots: Default::default(),
        ..*superblock
    };
    common(one).as_bytes() == common(other).as_bytes()
}

/// Reads the copy that is to be believed.
///
/// # Errors
/// `NotBtrfs` where no copy is one; `BadSuperblock` where this copy is damaged, with a hint which
/// other is whole; `Io`.
pub(crate) fn read(device: &dyn Device, copy: usize) -> Result<Box<Superblock>> {
    let Some(at) = SUPERBLOCK_OFFSETS.get(copy).copied() else {
        return Err(Error::Unsupported { what: format!("superblock copy {copy} (there are 3)") });
    };
    let corruption = match read_copy(device, at) {
        Ok(superblock) => return Ok(superblock),
        Err(Error::Corrupt(corruption)) => corruption,
        Err(error) => return Err(error),
    };
    let whole = (0..SUPERBLOCK_OFFSETS.len())
        .filter(|other| *other != copy)
        .find_map(|other| Some((other, read_copy(device, SUPERBLOCK_OFFSETS[other]).ok()?)));
    let no_trace = matches!(corruption.reason, Reason::BadMagic | Reason::Truncated);
    match whole {
        None if no_trace => {
            let found = match probe::contents(device) {
                Ok(Contents::Known(found)) => Some(found),
                Ok(Contents::Empty) => Some("empty"),
                _ => None,
            };
            Err(Error::NotBtrfs { device: device.name(), at, found })
        }
        None => Err(Error::BadSuperblock {
            device: device.name(),
            copy,
            corruption,
            hint: "no other copy is whole".to_owned(),
        }),
        Some((other, superblock)) => Err(Error::BadSuperblock {
            device: device.name(),
            copy,
            corruption,
            hint: format!(
                "copy {other} is whole, of generation {}: open with --super-copy {other}",
                superblock.generation
            ),
        }),
    }
}

/// Reads one copy, whatever the others hold.
pub(crate) fn read_copy(device: &dyn Device, at: PhysicalAddr) -> Result<Box<Superblock>> {
    if at.0 + SUPERBLOCK_BYTES as u64 > device.len_bytes() {
        return Err(Corruption::new(Reason::Truncated)
            .have(format!("device of {} bytes", device.len_bytes()))
            .expect(format!("a superblock at {at}"))
            .into());
    }
    let mut bytes = [0; SUPERBLOCK_BYTES];
    device.read_at(at, &mut bytes).map_err(|source| Error::Io {
        device: device.name(),
        op: Op::Read,
        offset: at,
        source,
    })?;
    Ok(Superblock::parse(&bytes, at)?)
}

/// Refuses what a volume cannot map, or would damage by writing.
pub(crate) fn check_features(superblock: &Superblock, read_only: bool) -> Result<()> {
    let incompat = Incompat(superblock.incompat_flags.get());
    let known = Incompat::NAMES.iter().fold(Incompat(0), |all, (bit, _)| all | *bit);
    let unmapped = Incompat::ZONED | Incompat::EXTENT_TREE_V2 | Incompat::RAID_STRIPE_TREE;
    let refused = Incompat(incompat.0 & unmapped.0) | incompat.without(known);
    if !refused.is_empty() {
        return unsupported(format!("incompatible feature {refused}"));
    }
    let changing = flags::CHANGING_FSID | flags::CHANGING_FSID_V2;
    if superblock.flags.get() & changing != 0 {
        return unsupported(
            "a filesystem whose change of uuid was interrupted (finish it with btrfstune)"
                .to_owned(),
        );
    }
    if read_only {
        return Ok(());
    }
    let compat_ro = CompatRo(superblock.compat_ro_flags.get());
    let known = CompatRo::NAMES.iter().fold(CompatRo(0), |all, (bit, _)| all | *bit);
    if !compat_ro.without(known).is_empty() {
        return unsupported(format!(
            "writing with the feature {} (open it read-only)",
            compat_ro.without(known)
        ));
    }
    if superblock.flags.get() & flags::SEEDING != 0 {
        return unsupported("writing to a seed filesystem (open it read-only)".to_owned());
    }
    if superblock.flags.get() & (flags::METADUMP | flags::METADUMP_V2) != 0 {
        return unsupported(
            "writing to a metadata image, which has no file contents (open it read-only)"
                .to_owned(),
        );
    }
    Ok(())
}

fn unsupported(what: String) -> Result<()> {
    Err(Error::Unsupported { what })
}

/// A primary superblock that somebody else wrote.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    pub(crate) device: String,
    /// `None` where it is no superblock any more.
    pub(crate) have: Option<Generation>,
    pub(crate) expect: Generation,
}

/// What the primary is, if not the one last seen.
///
/// # Errors
/// `Io`.
pub(crate) fn change(device: &dyn Device, seen: Option<Seen>) -> Result<Option<Change>> {
    let Some(seen) = seen else { return Ok(None) };
    let have = match read_copy(device, SUPERBLOCK_OFFSETS[0]) {
        Ok(superblock) => Some(Seen::of(&superblock)),
        Err(Error::Corrupt(_)) => None,
        Err(error) => return Err(error),
    };
    if have == Some(seen) {
        return Ok(None);
    }
    Ok(Some(Change {
        device: device.name(),
        have: have.map(|have| have.generation),
        expect: seen.generation,
    }))
}

/// Which copies of the superblock a device of that length has: the primary, and those that end
/// before the device does.
pub(crate) fn copies(total_bytes: u64) -> impl DoubleEndedIterator<Item = PhysicalAddr> {
    SUPERBLOCK_OFFSETS.into_iter().filter(move |at| at.0 + (SUPERBLOCK_BYTES as u64) < total_bytes)
}

/// Writes one copy; returns what a later reader will see.
pub(crate) fn write_copy(
    device: &dyn Device,
    superblock: &Superblock,
    at: PhysicalAddr,
) -> Result<Seen> {
    let mut copy = *superblock;
    copy.seal(at)?;
    device.write_at(at, copy.as_bytes()).map_err(|source| Error::Io {
        device: device.name(),
        op: Op::Write,
        offset: at,
        source,
    })?;
    Ok(Seen::of(&copy))
}
