//! The superblock's fields, beyond what [`Superblock::parse`] asks for.

use super::chunk;
use crate::block::LEVEL_COUNT_MAX;
use crate::block_group::BlockGroupFlags;
use crate::chunk::{ChunkHeader, Stripe};
use crate::error::{Corruption, Reason, Result};
use crate::features::{CompatRo, Incompat};
use crate::key::DiskKey;
use crate::superblock::{SYS_CHUNK_ARRAY_BYTES, Superblock, flags};
use crate::types::Uuid;

/// Least size of a sector.
pub const SECTORSIZE_MIN_BYTES: u32 = 4096;
/// Greatest size of a sector or tree block.
pub const NODESIZE_MAX_BYTES: u32 = 65_536;
/// More devices than any filesystem has; Linux only warns.
const DEVICE_COUNT_PLAUSIBLE: u64 = 1 << 31;
/// Flags that Linux accepts.
const KNOWN_FLAGS: u64 = flags::WRITTEN
    | crate::block::FLAG_RELOC
    | flags::ERROR
    | flags::SEEDING
    | flags::METADUMP
    | flags::METADUMP_V2;

/// Feature bits that no Linux has assigned so far as this crate knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnknownFeatures {
    /// Any of these forbids opening.
    pub incompat: Incompat,
    /// Any of these forbids writing.
    pub compat_ro: CompatRo,
}

/// The feature bits that are not known here. What the engine cannot do although it is known is the
/// engine's to judge.
pub fn unknown_features(superblock: &Superblock) -> UnknownFeatures {
    let incompat = Incompat::NAMES.iter().fold(Incompat(0), |all, (bit, _)| all | *bit);
    let compat_ro = CompatRo::NAMES.iter().fold(CompatRo(0), |all, (bit, _)| all | *bit);
    UnknownFeatures {
        incompat: Incompat(superblock.incompat_flags.get()).without(incompat),
        compat_ro: CompatRo(superblock.compat_ro_flags.get()).without(compat_ro),
    }
}

/// Checks the fields of a superblock, its system chunks included: what Linux checks before it
/// opens a filesystem. Magic, checksum and address are [`Superblock::parse`]'s; feature bits that
/// are not known are not an error here, see [`unknown_features`].
///
/// # Errors
/// The first finding.
pub fn superblock(superblock: &Superblock) -> Result<()> {
    superblock.csum_type()?;
    geometry(superblock)?;
    let unknown = superblock.flags.get() & !KNOWN_FLAGS;
    if unknown != 0 {
        return Err(bad_value("flags", format!("{unknown:#x}"), "none of those"));
    }
    roots(superblock)?;
    identity(superblock)?;
    features(superblock)?;
    let used_min = 6 * u64::from(superblock.nodesize.get());
    if superblock.bytes_used.get() < used_min {
        return Err(bad_value("bytes used", superblock.bytes_used, format!("at least {used_min}")));
    }
    if superblock.num_devices.get() == 0 {
        return Err(bad_value("devices", 0, "at least 1"));
    }
    system_chunks(superblock)
}

/// What Linux warns of and opens nevertheless.
pub fn suspicions(superblock: &Superblock) -> Vec<Box<Corruption>> {
    let mut found = Vec::new();
    let generation = superblock.generation.get();
    let chunk_root_generation = superblock.chunk_root_generation.get();
    if generation < chunk_root_generation {
        found.push(
            Corruption::new(Reason::WrongGeneration)
                .have(format!("chunk root of generation {chunk_root_generation}"))
                .expect(format!("at most {generation}")),
        );
    }
    let cache_generation = superblock.cache_generation.get();
    if generation < cache_generation && cache_generation != u64::MAX {
        found.push(
            Corruption::new(Reason::WrongGeneration)
                .have(format!("space cache of generation {cache_generation}"))
                .expect(format!("at most {generation}")),
        );
    }
    if superblock.num_devices.get() > DEVICE_COUNT_PLAUSIBLE {
        found.push(bad_value("devices", superblock.num_devices, "a plausible number"));
    }
    found
}

#[cold]
fn bad_value(
    what: &str,
    have: impl std::fmt::Display,
    expect: impl std::fmt::Display,
) -> Box<Corruption> {
    Corruption::new(Reason::BadValue).have(format!("{what} {have}")).expect(expect)
}

fn geometry(superblock: &Superblock) -> Result<()> {
    let sectorsize = superblock.sectorsize.get();
    let nodesize = superblock.nodesize.get();
    let bad = |what: &str, have: u32, expect: String| {
        Err(Corruption::new(Reason::BadGeometry).have(format!("{what} {have}")).expect(expect))
    };
    if !sectorsize.is_power_of_two()
        || !(SECTORSIZE_MIN_BYTES..=NODESIZE_MAX_BYTES).contains(&sectorsize)
    {
        return bad("sector size", sectorsize, "a power of two, 4096 to 65536".to_owned());
    }
    if !nodesize.is_power_of_two() || !(sectorsize..=NODESIZE_MAX_BYTES).contains(&nodesize) {
        return bad("node size", nodesize, format!("a power of two, {sectorsize} to 65536"));
    }
    if superblock.leafsize.get() != nodesize {
        return bad("leaf size", superblock.leafsize.get(), format!("the node size, {nodesize}"));
    }
    if !superblock.stripesize.get().is_power_of_two() {
        return bad("stripe size", superblock.stripesize.get(), "a power of two".to_owned());
    }
    Ok(())
}

fn roots(superblock: &Superblock) -> Result<()> {
    let sectorsize = u64::from(superblock.sectorsize.get());
    let roots = [
        ("root tree", superblock.root.get(), superblock.root_level),
        ("chunk tree", superblock.chunk_root.get(), superblock.chunk_root_level),
        ("log root tree", superblock.log_root.get(), superblock.log_root_level),
    ];
    for (tree, bytenr, level) in roots {
        if usize::from(level) >= LEVEL_COUNT_MAX {
            return Err(Corruption::new(Reason::WrongLevel)
                .have(format!("{tree} of level {level}"))
                .expect("0 to 7"));
        }
        if !bytenr.is_multiple_of(sectorsize) {
            return Err(Corruption::new(Reason::Unaligned)
                .have(format!("{tree} at {bytenr}"))
                .expect(format!("a multiple of {sectorsize}")));
        }
    }
    Ok(())
}

fn identity(superblock: &Superblock) -> Result<()> {
    let device = Uuid(superblock.dev_item.fsid);
    if device != superblock.header_fsid() {
        return Err(Corruption::new(Reason::WrongFsid)
            .have(format!("device of {device}"))
            .expect(superblock.header_fsid()));
    }
    Ok(())
}

fn features(superblock: &Superblock) -> Result<()> {
    let incompat = Incompat(superblock.incompat_flags.get());
    let compat_ro = CompatRo(superblock.compat_ro_flags.get());
    if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE)
        && !(compat_ro.contains(CompatRo::FREE_SPACE_TREE_VALID)
            && incompat.contains(Incompat::NO_HOLES))
    {
        return Err(Corruption::new(Reason::BadFeatures)
            .have("BLOCK_GROUP_TREE")
            .expect("FREE_SPACE_TREE_VALID and NO_HOLES with it"));
    }
    if incompat.contains(Incompat::MIXED_GROUPS) && superblock.nodesize != superblock.sectorsize {
        return Err(Corruption::new(Reason::BadFeatures)
            .have(format!("MIXED_GROUPS with a node size of {}", superblock.nodesize))
            .expect(format!("the sector size, {}", superblock.sectorsize)));
    }
    Ok(())
}

fn system_chunks(superblock: &Superblock) -> Result<()> {
    let len = superblock.sys_chunk_array_size.get() as usize;
    let len_min = size_of::<DiskKey>() + size_of::<ChunkHeader>() + size_of::<Stripe>();
    if !(len_min..=SYS_CHUNK_ARRAY_BYTES).contains(&len) {
        return Err(Corruption::new(Reason::BadItemLen)
            .have(format!("system chunk array of {len} bytes"))
            .expect(format!("{len_min} to {SYS_CHUNK_ARRAY_BYTES}")));
    }
    let incompat = Incompat(superblock.incompat_flags.get());
    for found in superblock.sys_chunks()? {
        chunk(&found, superblock.sectorsize.get(), Some(incompat))?;
        if !found.flags.contains(BlockGroupFlags::SYSTEM) {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("chunk of type {} in the system chunk array", found.flags))
                .expect("System"));
        }
    }
    Ok(())
}
