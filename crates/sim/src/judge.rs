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
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean_whatever_it_holds,
    clear_free_space_tree, oracle,
};
use ubtrfs_volume::{Volume, VolumeOptions};

use crate::compare::Differs;
use crate::superblocks;

/// Has the offline checker look at all that lies on devices, data included.
///
/// # Errors
/// What it finds.
pub(crate) fn is_clean(array: &SimArray) -> Differs {
    is_clean_but_for(array, &[])
}

/// As [`is_clean`], but for superblock copies of commits that were never made, which an earlier cut
/// left and a later one kept from being replaced.
///
/// # Errors
/// What it finds.
pub(crate) fn is_clean_but_for(array: &SimArray, ahead: &[Ahead]) -> Differs {
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
    let images = array.images();
    let never_made = || ahead.iter().filter(|copy| copy.is_in(&images));
    let is_of_lag = |finding: &&Finding| {
        let what = finding.to_string();
        let is_of = |device: &DeviceId| {
            what.starts_with("superblock copy") && what.contains(&format!("of device {device}:"))
        };
        lagging.iter().any(is_of) || never_made().any(|copy| copy.is_meant(&what))
    };
    let findings: Vec<String> =
        report.errors().filter(|one| !is_of_lag(one)).map(|finding| finding.to_string()).collect();
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!("the checker finds {}", findings.join("; ")))
}

/// A superblock copy of a commit whose primary a cut kept from being written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ahead {
    device: usize,
    place: usize,
    superblock: Box<Superblock>,
}

impl Ahead {
    /// All that there are.
    pub(crate) fn all(images: &[Image]) -> Vec<Self> {
        let copies = images.iter().enumerate().flat_map(|(device, image)| {
            let primary = superblocks::read(image, 0).map_or(0, |one| one.generation.get());
            (1..SUPERBLOCK_OFFSETS.len()).filter_map(move |place| {
                let superblock = superblocks::read(image, place)?;
                let is_ahead = superblock.generation.get() > primary;
                is_ahead.then_some(Self { device, place, superblock })
            })
        });
        copies.collect()
    }

    /// Whether it is still there.
    fn is_in(&self, images: &[Image]) -> bool {
        superblocks::read(&images[self.device], self.place).as_ref() == Some(&self.superblock)
    }

    /// Whether a finding is of it.
    fn is_meant(&self, finding: &str) -> bool {
        let device = self.superblock.dev_item.devid;
        finding.starts_with(&format!("superblock copy {} of device {device}:", self.place))
    }
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

    /// Has `btrfs check` look at images, unless they hold a free space tree that is to be made anew,
    /// which it would look at. Returns whether there is one, and it did.
    pub(crate) fn check(&self, images: &[Image]) -> bool {
        // It looks for the other devices of a filesystem among those that the kernel knows.
        let can = self.has_progs && (images.len() == 1 || self.has_kernel);
        let can = can && !superblocks::has_stale_free_space_tree(images);
        if can {
            assert_checks_clean_whatever_it_holds(&self.write("checked", images));
        }
        can
    }

    /// What the kernel shows of images that it mounts for writing, of which `btrfs check` must then
    /// find nothing; `None` if one of them is not there.
    pub(crate) fn seen_by_kernel(&self, images: &[Image]) -> Option<TreeSnapshot> {
        if !self.has_kernel || !self.has_progs {
            return None;
        }
        let files = self.write("mounted", images);
        let seen = show(images, &files, false);
        assert_checks_clean_whatever_it_holds(&files);
        Some(seen)
    }

    /// Has the kernel mount images, read-only and then for writing, and show them; then has
    /// `btrfs check` look at what it left. Returns whether there are both.
    pub(crate) fn mount(&self, images: &[Image], model: &Model) -> bool {
        if !self.has_kernel || !self.has_progs {
            return false;
        }
        self.check(images);
        let files = self.write("mounted", images);
        let expected = model.tree();
        for read_only in [true, false] {
            let seen = show(images, &files, read_only);
            seen.assert_same(&expected, &Compare::same_filesystem());
        }
        assert_checks_clean_whatever_it_holds(&files);
        true
    }
}

/// What the kernel shows of images that lie in files. Where it might fail to make the free space
/// tree anew, it makes it after btrfs-progs has taken the old one away; where it must fail, it does without.
fn show(images: &[Image], files: &[PathBuf], read_only: bool) -> TreeSnapshot {
    let mut options = "subvolid=5,noatime";
    if !read_only && superblocks::has_stale_free_space_tree(images) {
        let has_no_room = superblocks::linux_keeps_all_metadata_back(images)
            .unwrap_or_else(|why| panic!("its chunks are not to be had: {why}"));
        if has_no_room {
            clear_free_space_tree(files);
            options = "subvolid=5,noatime,nospace_cache";
        } else if superblocks::may_linux_fail_at_free_space_tree(images) {
            clear_free_space_tree(files);
            options = "subvolid=5,noatime,space_cache=v2";
        }
    }
    let mounted = KernelMount::mount(files, options, read_only)
        .unwrap_or_else(|why| panic!("the kernel does not mount it: {why}"));
    let seen = TreeSnapshot::of_directory(mounted.path());
    mounted.unmount();
    seen
}
