//! Judges of an image that know nothing of the engine: the offline checker, `btrfs check`, the
//! kernel.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use ubtrfs_check::CheckOptions;
use ubtrfs_testkit::crash::{Image, SimDevice};
use ubtrfs_testkit::model::Model;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean,
    assert_checks_clean_but_for_extended_refs, assert_checks_clean_but_for_half_dropped,
    half_dropped_roots, has_extended_refs, oracle,
};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use crate::compare::Differs;

/// Has the offline checker look at all of an image, data included.
///
/// # Errors
/// What it finds.
pub(crate) fn is_clean(image: &Image) -> Differs {
    let device: Arc<dyn Device> = Arc::new(SimDevice::of_image(image.clone()));
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![device], &options).map_err(|error| error.to_string())?;
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = ubtrfs_check::check(&volume, &options).map_err(|error| error.to_string())?;
    if report.is_clean() {
        return Ok(());
    }
    let findings: Vec<String> = report.errors().map(|finding| finding.to_string()).collect();
    Err(format!("the checker finds {}", findings.join("; ")))
}

/// Judges that need an image file, which they get in memory where the system has such a place.
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

    /// Has `btrfs check` look at an image. Returns whether there is one.
    pub(crate) fn check(&self, image: &Image) -> bool {
        if self.has_progs {
            let file = self.scratch.join("checked");
            image.write_to(&file);
            check_file(&file);
        }
        self.has_progs
    }

    /// Has the kernel mount an image, read-only and then for writing, and show it; then has
    /// `btrfs check` look at what it left. Returns whether there are both.
    pub(crate) fn mount(&self, image: &Image, model: &Model) -> bool {
        if !self.has_kernel || !self.check(image) {
            return false;
        }
        let file = self.scratch.join("mounted");
        image.write_to(&file);
        let expected = model.tree();
        for read_only in [true, false] {
            let mounted =
                KernelMount::mount(std::slice::from_ref(&file), "subvolid=5,noatime", read_only)
                    .unwrap_or_else(|why| panic!("the kernel does not mount it: {why}"));
            let seen = TreeSnapshot::of_directory(mounted.path());
            mounted.unmount();
            seen.assert_same(&expected, &Compare::same_filesystem());
        }
        check_file(&file);
        true
    }
}

fn check_file(file: &Path) {
    if !half_dropped_roots(file).is_empty() {
        assert_checks_clean_but_for_half_dropped(file);
    } else if has_extended_refs(file) {
        assert_checks_clean_but_for_extended_refs(file);
    } else {
        assert_checks_clean(file);
    }
}
