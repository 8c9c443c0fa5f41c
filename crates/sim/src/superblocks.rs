//! Superblocks, read and changed as they lie on the devices.

use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_testkit::crash::Image;
use zerocopy::IntoBytes;

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

/// Takes bits of features that a writer must know away, and adds others.
pub fn change_compat_ro(images: &mut [Image], without: CompatRo, with: CompatRo) {
    change(images, |superblock| {
        let bits = superblock.compat_ro_flags.get() & !without.0 | with.0;
        superblock.compat_ro_flags = bits.into();
    });
}
