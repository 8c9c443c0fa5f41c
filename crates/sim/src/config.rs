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
    /// States after power cuts that are looked at for each commit, about. 0 for none.
    pub crash_states: usize,
    /// One crash state in so many is passed to `btrfs check`. 0 for none.
    pub check_one_in: u64,
    /// One crash state in so many is passed to `btrfs check` and mounted by the kernel. 0 for none.
    pub mount_one_in: u64,
    /// One commit in so many is repeated on devices that fail. 0 for none.
    pub fault_one_in: u64,
}

impl Config {
    /// The command that repeats a run.
    pub fn command(&self) -> String {
        format!(
            "cargo run --release -p ubtrfs-sim -- --seed {} --operations {} --commit-one-in {} \
             --crash-states {} --check-one-in {} --mount-one-in {} --fault-one-in {}",
            self.seed,
            self.operations,
            self.commit_one_in,
            self.crash_states,
            self.check_one_in,
            self.mount_one_in,
            self.fault_one_in
        )
    }

    /// The filesystem that the seed wants: its options and the length of its device.
    pub(crate) fn filesystem(&self) -> (MkfsOptions, u64) {
        let mut prng = Prng::new(self.seed ^ 0x6d6b_6673);
        let free_space_tree = !prng.chance(1, 6);
        let no_holes = !prng.chance(1, 4);
        let block_group_tree = free_space_tree && no_holes && prng.chance(2, 3);
        let csums = [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2];
        let options = MkfsOptions {
            nodesize_bytes: [4096, 4096, 16_384, 65_536][prng.index(4)],
            csum: csums[if prng.chance(1, 2) { 0 } else { prng.index(4) }],
            no_holes,
            free_space_tree,
            block_group_tree,
            metadata_profile: prng.chance(1, 3).then(BlockGroupFlags::default),
            data_profile: prng.chance(1, 6).then_some(BlockGroupFlags::DUP),
            ..MkfsOptions::default()
        };
        // The second superblock lies at 64 MiB; some have none.
        let spare_bytes = [20 << 20, 60 << 20, 120 << 20][prng.index(3)];
        let len_bytes = (options.device_bytes_min() + spare_bytes).next_multiple_of(1 << 20);
        (options, len_bytes)
    }
}
