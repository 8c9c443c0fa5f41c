//! Which images there are.

use std::path::Path;

use super::fill;
use crate::Prng;

/// How an image is made.
pub(super) struct Recipe {
    pub(super) name: &'static str,
    /// Options of mkfs.btrfs.
    pub(super) mkfs: &'static str,
    pub(super) by_new_progs: bool,
    pub(super) devices: usize,
    pub(super) size_bytes: u64,
    /// Options of the mount under which it is filled.
    pub(super) mount: &'static str,
    pub(super) fill: fn(&Path, &mut Prng),
    /// What to do last, so that a cut then leaves a log.
    pub(super) leave_log: Option<fn(&Path, &mut Prng)>,
}

const PLAIN: Recipe = Recipe {
    name: "plain",
    mkfs: "",
    by_new_progs: false,
    devices: 1,
    size_bytes: 512 << 20,
    mount: "",
    fill: fill::everything,
    leave_log: None,
};

const fn made_with(name: &'static str, mkfs: &'static str) -> Recipe {
    Recipe { name, mkfs, ..PLAIN }
}

const fn mounted_with(name: &'static str, mount: &'static str) -> Recipe {
    Recipe { name, mount, ..PLAIN }
}

const fn filled_with(name: &'static str, fill: fn(&Path, &mut Prng)) -> Recipe {
    Recipe { name, fill, ..PLAIN }
}

const fn over(name: &'static str, devices: usize, mkfs: &'static str) -> Recipe {
    Recipe { name, devices, mkfs, ..PLAIN }
}

pub(super) static RECIPES: &[Recipe] = &[
    PLAIN,
    mounted_with("compress-zlib", "compress-force=zlib:9"),
    mounted_with("compress-lzo", "compress-force=lzo"),
    mounted_with("compress-zstd", "compress-force=zstd:3"),
    mounted_with("compress-some", "compress=zstd:1,max_inline=4095"),
    mounted_with("no-inline", "max_inline=0"),
    mounted_with("nodatasum", "nodatasum"),
    mounted_with("nodatacow", "nodatacow"),
    filled_with("prealloc", fill::preallocated),
    filled_with("reflinks", fill::reflinks),
    filled_with("fragmented", fill::fragmented),
    filled_with("subvolumes", fill::subvolumes),
    filled_with("balanced", fill::balanced),
    filled_with("properties", fill::properties),
    filled_with("swiss-cheese", fill::swiss_cheese),
    made_with("empty-label", "-L label\u{e4}"),
    made_with("explicit-holes", "-O ^no-holes"),
    Recipe { size_bytes: 256 << 20, ..made_with("mixed", "-M") },
    made_with("nodesize-4k", "-n 4096"),
    made_with("nodesize-8k", "-n 8192"),
    made_with("nodesize-32k", "-n 32768"),
    made_with("nodesize-64k", "-n 65536"),
    made_with("csum-xxhash", "--csum xxhash"),
    made_with("csum-sha256", "--csum sha256"),
    made_with("csum-blake2", "--csum blake2"),
    made_with("metadata-single", "-m single"),
    made_with("data-dup", "-d dup"),
    made_with("quota", "-R quota"),
    Recipe { mount: "space_cache=v1", ..made_with("cache-v1", "-R ^free-space-tree") },
    Recipe { mount: "nospace_cache", ..made_with("cache-none", "-R ^free-space-tree") },
    Recipe {
        mount: "nospace_cache",
        ..made_with("old-format", "-O ^no-holes,^extref,^skinny-metadata -R ^free-space-tree")
    },
    Recipe { by_new_progs: true, ..made_with("block-group-tree", "-O block-group-tree") },
    Recipe { by_new_progs: true, ..made_with("simple-quota", "-O squota") },
    over("raid0", 2, "-d raid0 -m raid0"),
    over("raid1", 2, "-d raid1 -m raid1"),
    over("raid10", 4, "-d raid10 -m raid10"),
    over("raid1c3", 3, "-d raid1c3 -m raid1c3"),
    over("raid1c4", 4, "-d raid1c4 -m raid1c4"),
    over("single-on-two", 2, "-d single -m raid1"),
    Recipe {
        mount: "commit=300",
        leave_log: Some(fill::leave_log),
        ..filled_with("log", fill::few)
    },
];
