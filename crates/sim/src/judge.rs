//! Judges of images that know nothing of the engine: the offline checker, `btrfs check`, the
//! kernel.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use ubtrfs_check::{CheckOptions, Finding};
use ubtrfs_ondisk::DeviceId;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_testkit::crash::{Image, SimArray};
use ubtrfs_testkit::model::Model;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean_whatever_it_holds, oracle,
};
use ubtrfs_volume::{Volume, VolumeOptions};

use crate::compare::Differs;

/// Has the offline checker look at all that lies on devices, data included.
///
/// # Errors
/// What it finds.
pub(crate) fn is_clean(array: &SimArray) -> Differs {
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(array.devices(), &options).map_err(|error| error.to_string())?;
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = ubtrfs_check::check(&volume, &options).map_err(|error| error.to_string())?;
    if report.is_clean() {
        return Ok(());
    }
    // A cut between the superblocks of two devices leaves the primary of one a commit behind its
    // copies, which were written before it.
    let lagging = lagging(&volume);
    let is_of_lag = |finding: &&Finding| {
        let what = finding.to_string();
        let is_of = |device: &DeviceId| {
            what.starts_with("superblock copy") && what.contains(&format!("of device {device}:"))
        };
        lagging.iter().any(is_of)
    };
    let findings: Vec<String> =
        report.errors().filter(|one| !is_of_lag(one)).map(|finding| finding.to_string()).collect();
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!("the checker finds {}", findings.join("; ")))
}

/// Devices whose superblock is of the commit before the newest.
fn lagging(volume: &Volume) -> Vec<DeviceId> {
    let newest = volume.superblock().generation.get();
    let is_behind = |device: &DeviceId| {
        let at = SUPERBLOCK_OFFSETS[0];
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let read = volume.device(*device).map(|medium| medium.read_at(at, &mut bytes));
        let own = read.and_then(|_| Superblock::parse(&bytes, at).ok());
        own.is_some_and(|own| own.generation.get() + 1 == newest)
    };
    let devices = volume.device_items().into_iter().map(|item| DeviceId(item.devid.get()));
    devices.filter(is_behind).collect()
}

/// As [`is_clean`], of what the devices held at one moment.
///
/// # Errors
/// What it finds.
pub(crate) fn are_clean(images: &[Image]) -> Differs {
    is_clean(&SimArray::of_images(images.to_vec()))
}

/// Judges that need image files, which they get in memory where the system has such a place.
#[derive(Debug)]
pub(crate) struct Outside {
    scratch: PathBuf,
    /// Removes it at the end.
    _directory: Option<TempDir>,
    has_progs: bool,
    has_kernel: bool,
}

impl Outside {
    pub(crate) fn new() -> Self {
        // Where somebody wants to look at the images afterwards.
        let kept = std::env::var_os("UBTRFS_SIM_KEEP").map(PathBuf::from);
        let (scratch, directory) = match kept {
            Some(directory) => (directory, None),
            None => {
                let memory = Path::new("/dev/shm");
                let directory = match memory.is_dir() {
                    true => tempfile::tempdir_in(memory),
                    false => tempfile::tempdir(),
                };
                let directory = directory.expect("a temporary directory can be made");
                (directory.path().to_owned(), Some(directory))
            }
        };
        Self {
            scratch,
            _directory: directory,
            has_progs: oracle::require(Oracle::BtrfsProgs),
            has_kernel: oracle::require(Oracle::KernelBtrfs),
        }
    }

    fn write(&self, name: &str, images: &[Image]) -> Vec<PathBuf> {
        let file = |(number, image): (usize, &Image)| {
            let file = self.scratch.join(format!("{name}-{number}"));
            image.write_to(&file);
            file
        };
        images.iter().enumerate().map(file).collect()
    }

    /// Has `btrfs check` look at images. Returns whether there is one.
    pub(crate) fn check(&self, images: &[Image]) -> bool {
        // It looks for the other devices of a filesystem among those that the kernel knows.
        let can = self.has_progs && (images.len() == 1 || self.has_kernel);
        if can {
            assert_checks_clean_whatever_it_holds(&self.write("checked", images));
        }
        can
    }

    /// Has the kernel mount images, read-only and then for writing, and show them; then has
    /// `btrfs check` look at what it left. Returns whether there are both.
    pub(crate) fn mount(&self, images: &[Image], model: &Model) -> bool {
        if !self.has_kernel || !self.check(images) {
            return false;
        }
        let files = self.write("mounted", images);
        let expected = model.tree();
        for read_only in [true, false] {
            let mounted = KernelMount::mount(&files, "subvolid=5,noatime", read_only)
                .unwrap_or_else(|why| panic!("the kernel does not mount it: {why}"));
            let seen = TreeSnapshot::of_directory(mounted.path());
            mounted.unmount();
            seen.assert_same(&expected, &Compare::same_filesystem());
        }
        assert_checks_clean_whatever_it_holds(&files);
        true
    }
}
