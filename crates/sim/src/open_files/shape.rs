//! The filesystem, its files and its memory, as a seed wants them.

use std::sync::Arc;

use ubtrfs_engine::{Error, Filesystem, Method, OpenOptions};
use ubtrfs_iomap::CacheOptions;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Runtime;
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::SimArray;
use ubtrfs_volume::{Volume, VolumeOptions};

use crate::config::{Shape, has_copies};

/// Room that all devices have together, so that nobody wants for space.
const SPARE_BYTES: u64 = 160 << 20;
const FILES_MIN: usize = 4;
const BLOCK: u64 = 4096;

/// How a file is kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    /// As the filesystem is opened.
    Plain,
    /// So short that it is inline, or was.
    Short,
    /// With space before it has data.
    Preallocated,
    /// By its flag, or a property.
    Compressed(Option<&'static str>),
    /// Without checksums, to space of its own each time.
    WithoutCsums,
    /// Where it lies, without checksums.
    InPlace,
}

impl Kind {
    /// Flags of its inode.
    pub(super) fn flags(self) -> u64 {
        match self {
            Self::Compressed(None) => flags::COMPRESS,
            Self::WithoutCsums => flags::NODATASUM,
            Self::InPlace => flags::NODATACOW | flags::NODATASUM,
            _ => 0,
        }
    }

    pub(super) fn has_csums(self) -> bool {
        self.flags() & flags::NODATASUM == 0
    }
}

/// All that a seed says of the filesystem.
#[derive(Clone, Debug)]
pub(super) struct FilesShape {
    pub(super) shape: Shape,
    pub(super) kinds: Vec<Kind>,
    cache: CacheOptions,
    compression: Option<Method>,
    forces_compression: bool,
}

impl FilesShape {
    pub(super) fn of_seed(seed: u64) -> Self {
        let mut shape = Shape::of_seed(seed);
        let mut prng = Prng::new(seed ^ 0x6f70_656e);
        let count = u64::try_from(shape.lens_bytes.len()).expect("a count fits");
        let len_bytes = shape.options.device_bytes_min() + SPARE_BYTES / count;
        shape.lens_bytes.fill(len_bytes.next_multiple_of(1 << 20));
        (shape.is_tight, shape.grows_when_full) = (false, false);
        // A transaction of three quarters of that commits by itself.
        let blocks = [8, 16, 64, 4096][prng.index(4)];
        shape.cache_bytes =
            blocks * usize::try_from(shape.options.nodesize_bytes).expect("a size fits");
        let properties = [None, Some("zstd"), Some("lzo"), Some("zlib")];
        let all = [
            Kind::Plain,
            Kind::InPlace,
            Kind::Short,
            Kind::Preallocated,
            Kind::Compressed(properties[prng.index(4)]),
            Kind::WithoutCsums,
            Kind::InPlace,
        ];
        let mut kinds: Vec<Kind> = Vec::new();
        let file_count = FILES_MIN + prng.index(3);
        let first = prng.index(all.len());
        // Some filesystems hold nothing that may be read from either copy.
        let may_be_in_place = prng.chance(3, 4);
        for number in 0.. {
            let kind = all[(first + number) % all.len()];
            if kind != Kind::InPlace || may_be_in_place {
                kinds.push(kind);
            }
            if kinds.len() == file_count {
                break;
            }
        }
        let method = |compression| Method::with_default_level(compression);
        let compressions =
            [None, None, Some(Compression::Zstd), Some(Compression::Lzo), Some(Compression::Zlib)];
        let compression = compressions[prng.index(compressions.len())].map(method);
        Self {
            shape,
            kinds,
            cache: cache(&mut prng),
            compression,
            forces_compression: prng.chance(1, 5),
        }
    }

    /// Whether what is written in place has copies that a cut may leave different.
    pub(super) fn has_loose_copies(&self) -> bool {
        self.has_data_copies() && self.kinds.contains(&Kind::InPlace)
    }

    pub(super) fn has_data_copies(&self) -> bool {
        has_copies(self.shape.profiles().1)
    }

    /// Opens what lies on devices.
    ///
    /// # Errors
    /// The engine's.
    pub(super) fn open(&self, array: &SimArray, seed: u64) -> Result<Filesystem, Error> {
        let volume = Volume::open(array.devices(), &VolumeOptions::default())?;
        self.open_volume(volume, Arc::new(Runtime::simulated(seed)))
    }

    /// As [`FilesShape::open`].
    ///
    /// # Errors
    /// The engine's.
    pub(super) fn open_volume(
        &self,
        volume: Volume,
        runtime: Arc<Runtime>,
    ) -> Result<Filesystem, Error> {
        let options = OpenOptions {
            runtime,
            cache_bytes: self.shape.cache_bytes,
            discard: self.shape.discard,
            compression: self.compression,
            force_compression: self.forces_compression,
            page_cache: Some(self.cache.clone()),
            ..OpenOptions::default()
        };
        Filesystem::open(volume, options)
    }
}

/// Memory for file data: from a few blocks, so that writeback goes on all the time, to more than
/// there is data.
fn cache(prng: &mut Prng) -> CacheOptions {
    let dirty_blocks = [3, 8, 24, 10_000][prng.index(4)];
    let folio_blocks = [1, 4, 16][prng.index(3)];
    let straight_blocks = [2, 10_000][prng.index(2)];
    CacheOptions {
        cached_bytes_max: 2 * dirty_blocks * BLOCK,
        dirty_bytes_max: dirty_blocks * BLOCK,
        dirty_bytes_background: dirty_blocks / 2 * BLOCK,
        folio_bytes_max: folio_blocks * BLOCK,
        writeback_bytes_max: [1, 3, 16][prng.index(3)] * BLOCK,
        readahead_bytes_max: 4 * BLOCK,
        straight_bytes_min: straight_blocks * BLOCK,
        straight_encoded_bytes_min: straight_blocks * BLOCK,
        straight_write_bytes_min: straight_blocks * BLOCK,
        keeps_clean: prng.chance(3, 4),
        ..CacheOptions::default()
    }
}
