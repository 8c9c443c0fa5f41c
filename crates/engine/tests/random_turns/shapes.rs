//! The filesystems on which turns are taken.

use ubtrfs_ondisk::file_extent::Compression;

/// How a filesystem is made and mounted.
#[derive(Debug)]
pub struct Shape {
    /// Options of `mkfs.btrfs`.
    pub mkfs: &'static str,
    /// The engine makes it, with its defaults but for the nodes' size: `mkfs.btrfs` only makes block group
    /// trees where it is newer than Debian's.
    pub by_engine: bool,
    pub device_count: usize,
    /// Of each device.
    pub size_bytes: u64,
    /// Options of the kernel's mount.
    pub mount: &'static str,
    /// What the engine compresses by.
    pub compression: Option<Compression>,
    /// It is small, and what fails for want of space is no fault.
    pub runs_full: bool,
}

pub const PLAIN: Shape = Shape {
    mkfs: "",
    by_engine: false,
    device_count: 1,
    size_bytes: 1 << 30,
    mount: "",
    compression: None,
    runs_full: false,
};

impl Shape {
    pub fn nodesize_bytes(&self) -> usize {
        // That of mixed groups is the sector's.
        match self.mkfs.contains("-n 4096") || self.mkfs.contains("--mixed") {
            true => 4096,
            false => 16 << 10,
        }
    }

    /// How many long names an inode gets at once: more than fit its reference item, so that some are in
    /// items of their own. Of these the lowmem mode of `btrfs check` gives a false alarm, which testkit
    /// tells apart, but not where metadata is striped and the items of an inode are on several devices.
    pub fn many_names(&self, name_bytes: usize) -> usize {
        let is_striped = self.mkfs.contains("-m raid0") || self.mkfs.contains("-m raid10");
        if is_striped { 8 } else { self.nodesize_bytes() / name_bytes + 4 }
    }

    /// Whether the power may go while the kernel has it mounted. The replay of a log may need more
    /// space than there is.
    pub fn has_logs(&self) -> bool {
        !self.runs_full
    }
}
