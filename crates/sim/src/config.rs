//! What a run does, and on what.

use ubtrfs_engine::MkfsOptions;
use ubtrfs_ondisk::CsumType;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_testkit::Prng;

/// What a run does. All else follows from the seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Determines everything.
    pub seed: u64,
    /// Operations, commits among them.
    pub operations: u64,
    /// One operation in so many is a commit.
    pub commit_one_in: u64,
    /// Of the states that power cuts may leave of each commit, about so many are opened for no
    /// other reason than chance, besides those that differ in what is read. 0 for none at all.
    pub crash_states: u64,
    /// One opened crash state in so many is passed to `btrfs check`. 0 for none.
    pub check_one_in: u64,
    /// One opened crash state in so many is passed to `btrfs check` and mounted by the kernel. 0 for none.
    pub mount_one_in: u64,
    /// One commit in so many is repeated on devices that fail. 0 for none.
    pub fault_one_in: u64,
    /// Of the crash states on which the engine goes on, in one of so many that is cut as well: the
    /// opening, a few operations, the commit. 0 for none.
    pub nested_one_in: u64,
}

impl Config {
    /// The command that repeats a run.
    pub fn command(&self) -> String {
        format!(
            "cargo run --release -p ubtrfs-sim -- --seed {} --operations {} --commit-one-in {} \
             --crash-states {} --check-one-in {} --mount-one-in {} --fault-one-in {} \
             --nested-one-in {}",
            self.seed,
            self.operations,
            self.commit_one_in,
            self.crash_states,
            self.check_one_in,
            self.mount_one_in,
            self.fault_one_in,
            self.nested_one_in
        )
    }

    /// The filesystem that the seed wants.
    pub(crate) fn shape(&self) -> Shape {
        Shape::of_seed(self.seed)
    }
}

impl Shape {
    /// The filesystem that a seed wants.
    pub(crate) fn of_seed(seed: u64) -> Self {
        let mut prng = Prng::new(seed ^ 0x6d6b_6673);
        let free_space_tree = !prng.chance(1, 6);
        let no_holes = !prng.chance(1, 4);
        let block_group_tree = free_space_tree && no_holes && prng.chance(2, 3);
        let csums = [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2];
        let is_tight = prng.chance(1, 4);
        let nodesizes = [4096, 4096, 16_384, if is_tight { 16_384 } else { 65_536 }];
        let device_count = [1, 1, 1, 1, 2, 2, 3, 4][prng.index(8)];
        let profiles = profiles(device_count);
        let options = MkfsOptions {
            nodesize_bytes: nodesizes[prng.index(4)],
            // The slow ones take most of a run's time.
            csum: csums[if prng.chance(5, 6) { prng.index(2) } else { prng.index(4) }],
            no_holes,
            free_space_tree,
            block_group_tree,
            metadata_profile: prng.chance(2, 3).then(|| profiles[prng.index(profiles.len())]),
            data_profile: prng.chance(1, 2).then(|| profiles[prng.index(profiles.len())]),
            ..MkfsOptions::default()
        };
        // The second superblock lies at 64 MiB; some have none, some get it as they grow.
        let spare_bytes = match is_tight {
            true => prng.below(5) << 20,
            // Large tree blocks want large reserves.
            false if options.nodesize_bytes == 65_536 => 256 << 20,
            false => [20 << 20, 60 << 20, 120 << 20][prng.index(3)] / device_count,
        };
        let len_bytes = (options.device_bytes_min() + spare_bytes).next_multiple_of(1 << 20);
        let unequal = |prng: &mut Prng| prng.below(3) << 20;
        Self {
            lens_bytes: (0..device_count).map(|_| len_bytes + unequal(&mut prng)).collect(),
            options,
            is_tight,
            discard: prng.chance(1, 3),
            grows_when_full: device_count == 1 && prng.chance(1, 10),
            cache_bytes: [8 << 20, 8 << 20, 1 << 20][prng.index(3)],
        }
    }
}

/// Profiles that so many devices allow; none of the bits is SINGLE.
fn profiles(device_count: u64) -> Vec<BlockGroupFlags> {
    let mut profiles = vec![BlockGroupFlags::default(), BlockGroupFlags::DUP];
    if device_count >= 2 {
        profiles.extend([BlockGroupFlags::RAID0, BlockGroupFlags::RAID1, BlockGroupFlags::RAID10]);
    }
    if device_count >= 3 {
        profiles.push(BlockGroupFlags::RAID1C3);
    }
    if device_count >= 4 {
        profiles.push(BlockGroupFlags::RAID1C4);
    }
    profiles
}

/// A filesystem to be made, and how it is opened.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) options: MkfsOptions,
    /// Of each device.
    pub(crate) lens_bytes: Vec<u64>,
    /// It is so small that it is full again and again.
    pub(crate) is_tight: bool,
    /// Freed space goes back to the devices, which then hold anything there.
    pub(crate) discard: bool,
    /// Its only device grows when it is full.
    pub(crate) grows_when_full: bool,
    /// Clean tree blocks that are kept: few enough that some are read again. A transaction of half
    /// of that commits by itself.
    pub(crate) cache_bytes: usize,
}

impl Shape {
    /// How reports call its profiles: of metadata, and of data.
    pub(crate) fn profile_names(&self) -> (&'static str, &'static str) {
        let name = |profile: BlockGroupFlags| profile.profile_name().unwrap_or("several");
        let (metadata, data) = self.profiles();
        (name(metadata), name(data))
    }

    /// The profiles of metadata and data.
    pub(crate) fn profiles(&self) -> (BlockGroupFlags, BlockGroupFlags) {
        let several = self.lens_bytes.len() > 1;
        let default = if several { BlockGroupFlags::RAID1 } else { BlockGroupFlags::DUP };
        let metadata = self.options.metadata_profile.unwrap_or(default);
        (metadata, self.options.data_profile.unwrap_or_default())
    }
}

/// Whether a profile keeps more than one copy.
pub(crate) fn has_copies(profile: BlockGroupFlags) -> bool {
    !matches!(profile, BlockGroupFlags::RAID0) && profile != BlockGroupFlags::default()
}
