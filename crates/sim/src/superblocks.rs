//! Superblocks, read, judged and changed as they lie on the devices.

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::superblock::{RootBackup, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::Expect;
use ubtrfs_ondisk::{Generation, LogicalAddr, RootId};
use ubtrfs_testkit::crash::{Image, SimArray};
use ubtrfs_volume::{Volume, VolumeOptions};
use zerocopy::IntoBytes;

use crate::compare::Differs;
use crate::trees;
use crate::world::World;

/// Right after a commit: all superblocks of all devices are of it and the same but for what tells
/// devices and places apart, and the backups of the roots are those of the last commits, in turn.
/// The trees of this one and of the one before, whose space nobody has been given yet, are there.
///
/// # Errors
/// What is wrong.
pub(crate) fn are_right(world: &World) -> Differs {
    let images = world.array.images();
    let generation = world.generation();
    let mut first: Option<Box<Superblock>> = None;
    for (device, image) in images.iter().enumerate() {
        let what = |place: usize| format!("superblock {place} of device {device}");
        let primary = read(image, 0).ok_or_else(|| format!("no {}", what(0)))?;
        let total_bytes = primary.dev_item.total_bytes.get();
        for (place, at) in SUPERBLOCK_OFFSETS.into_iter().enumerate() {
            let len = u64::try_from(SUPERBLOCK_BYTES).expect("a constant fits");
            if at.0 + len >= total_bytes {
                continue;
            }
            let copy = read(image, place).ok_or_else(|| format!("no {}", what(place)))?;
            if copy.generation.get() != generation {
                let have = copy.generation;
                return Err(format!("{} is of {have}, not {generation}", what(place)));
            }
            if everywhere(&copy) != everywhere(&primary) || copy.dev_item != primary.dev_item {
                return Err(format!("{} is another than that in place 0", what(place)));
            }
        }
        if first.as_ref().is_some_and(|first| everywhere(first) != everywhere(&primary)) {
            return Err(format!("{} is another than that of device 0", what(0)));
        }
        first.get_or_insert(primary);
    }
    let superblock = first.ok_or("no device")?;
    let volume = world.fs.volume();
    let mut backups: Vec<RootBackup> = superblock.super_roots.to_vec();
    backups.retain(|backup| backup.tree_root_gen.get() > 0);
    backups.sort_by_key(|backup| std::cmp::Reverse(backup.tree_root_gen.get()));
    for (age, backup) in (0..).zip(&backups) {
        let (have, expect) = (backup.tree_root_gen.get(), generation - age);
        if have != expect {
            return Err(format!("a backup of the roots of {have}, in the place of {expect}"));
        }
        // What the commit before it freed may be used again, or be discarded.
        if age == 0 || age == 1 && !world.shape().discard {
            trees_are_there(volume, backup).map_err(|why| format!("backup of {have}: {why}"))?;
        }
    }
    match backups.first() {
        Some(last) if last.tree_root == superblock.root => Ok(()),
        _ => Err("no backup of the roots is of this commit".to_owned()),
    }
}

/// All of it that is the same on all devices and in all places.
fn everywhere(superblock: &Superblock) -> Vec<u8> {
    let mut same = *superblock;
    same.csum = Default::default();
    same.bytenr = 0.into();
    same.dev_item = Default::default();
    same.as_bytes().to_vec()
}

fn trees_are_there(volume: &Volume, backup: &RootBackup) -> Differs {
    let RootBackup { tree_root, chunk_root, extent_root, fs_root, dev_root, csum_root, .. } =
        *backup;
    let roots = [
        (RootId::ROOT_TREE, tree_root, backup.tree_root_gen, backup.tree_root_level),
        (RootId::CHUNK_TREE, chunk_root, backup.chunk_root_gen, backup.chunk_root_level),
        (RootId::EXTENT_TREE, extent_root, backup.extent_root_gen, backup.extent_root_level),
        (RootId::FS_TREE, fs_root, backup.fs_root_gen, backup.fs_root_level),
        (RootId::DEV_TREE, dev_root, backup.dev_root_gen, backup.dev_root_level),
        (RootId::CSUM_TREE, csum_root, backup.csum_root_gen, backup.csum_root_level),
    ];
    for (owner, at, generation, level) in roots {
        let expect = Expect {
            bytenr: LogicalAddr(at.get()),
            generation: Some(Generation(generation.get())),
            level: Some(level),
            first_key: None,
            owner: Some(owner),
        };
        trees::block(volume, &expect).map_err(|why| format!("tree {owner}: {why}"))?;
    }
    Ok(())
}

/// The newest of the primary superblocks: that by which the devices are opened.
pub(crate) fn newest(images: &[Image]) -> Option<Box<Superblock>> {
    let all = images.iter().filter_map(|image| read(image, 0));
    all.max_by_key(|superblock| superblock.generation.get())
}

/// The superblock in one of the places, if there is a whole one.
pub(crate) fn read(image: &Image, place: usize) -> Option<Box<Superblock>> {
    let at = SUPERBLOCK_OFFSETS[place];
    let len = u64::try_from(SUPERBLOCK_BYTES).expect("a constant fits");
    if at.0 + len > image.len_bytes() {
        return None;
    }
    let mut bytes = [0; SUPERBLOCK_BYTES];
    image.read(at.0, &mut bytes);
    Superblock::parse(&bytes, at).ok()
}

/// Changes all superblocks of all devices.
pub(crate) fn change(images: &mut [Image], change: impl Fn(&mut Superblock)) {
    for image in images {
        for (place, at) in SUPERBLOCK_OFFSETS.into_iter().enumerate() {
            if let Some(mut superblock) = read(image, place) {
                change(&mut superblock);
                superblock.seal(at).expect("what was read can be written");
                image.write(at.0, superblock.as_bytes());
            }
        }
    }
}

/// Whether there is a free space tree of which it is said that it is not up to date.
pub(crate) fn has_stale_free_space_tree(images: &[Image]) -> bool {
    let bits = newest(images).map(|superblock| CompatRo(superblock.compat_ro_flags.get()));
    let has = |bits: CompatRo, bit| bits.contains(bit);
    bits.is_some_and(|bits| {
        has(bits, CompatRo::FREE_SPACE_TREE) && !has(bits, CompatRo::FREE_SPACE_TREE_VALID)
    })
}

/// Whether Linux might make a block group before it makes the free space tree anew, in the same
/// transaction. Linux 6.18 then enters that group twice and aborts with EEXIST: it takes the group
/// in when it goes through all groups, and when the new ones are added. It makes one as it starts
/// the transaction if metadata has little space, as on all small filesystems, and there is room;
/// found by `ubtrfs-sim --seed 30 --commit-one-in 40 --mount-one-in 90 --nested-one-in 3`, and with
/// the same image as its device is made longer or shorter: it mounts with less than 128 KiB.
/// The replay of a log comes first and makes the group there.
pub(crate) fn may_linux_fail_at_free_space_tree(images: &[Image]) -> bool {
    /// Devices' first bytes, which no block group gets.
    const RESERVED_BYTES: u64 = 1 << 20;
    const STRIPE_BYTES: u64 = 64 << 10;
    let has_log = newest(images).is_some_and(|superblock| superblock.log_root.get() != 0);
    let has_room = |image: &Image| {
        let item = read(image, 0).map(|superblock| superblock.dev_item);
        let used = |bytes: u64| bytes.saturating_add(RESERVED_BYTES + STRIPE_BYTES);
        item.is_some_and(|item| used(item.bytes_used.get()) <= item.total_bytes.get())
    };
    has_stale_free_space_tree(images) && !has_log && images.iter().any(has_room)
}

/// Whether Linux has no room to make the free space tree anew, be there ever so much free: it keeps more metadata back than there is,
/// or can be, and begins no transaction of which it knows how much it may need. Linux 6.18 kept 22 units back where this was found, a unit
/// being 16 blocks, and wanted 3 for that transaction (the tracepoints `btrfs_fail_all_tickets` and `btrfs_reserve_ticket` tell), of 4.4 MiB
/// with blocks of 16 KiB; found by `ubtrfs-sim --seed 96 --operations 2000 --crash-states 2 --mount-one-in 90`. It mounts the same image
/// with no such tree.
pub(crate) fn linux_keeps_all_metadata_back(images: &[Image]) -> Differs<bool> {
    const UNIT_BLOCKS: u64 = 16;
    const UNITS: u64 = 22 + 3;
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let array = SimArray::of_images(images.to_vec());
    let volume = Volume::open(array.devices(), &options).map_err(|error| error.to_string())?;
    let chunks = volume.chunks();
    let of_metadata = chunks.iter().filter(|chunk| chunk.flags.contains(BlockGroupFlags::METADATA));
    let metadata_bytes: u64 = of_metadata.map(|chunk| chunk.len_bytes).sum();
    let unallocated = volume
        .device_items()
        .into_iter()
        .map(|item| item.total_bytes.get().saturating_sub(item.bytes_used.get()));
    let bytes_max = metadata_bytes.saturating_add(unallocated.sum());
    let node_bytes = u64::try_from(volume.geometry().nodesize_bytes).expect("at most 64 KiB");
    Ok(bytes_max < UNITS * UNIT_BLOCKS * node_bytes)
}

/// Takes bits of features that a writer must know away, and adds others.
pub fn change_compat_ro(images: &mut [Image], without: CompatRo, with: CompatRo) {
    change(images, |superblock| {
        let bits = superblock.compat_ro_flags.get() & !without.0 | with.0;
        superblock.compat_ro_flags = bits.into();
    });
}
