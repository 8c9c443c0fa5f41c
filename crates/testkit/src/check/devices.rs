//! `btrfs check` on filesystems that lie on several devices, and whichever of the known false
//! alarms an image may raise.

use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};

use super::extended_refs::{is_bare_summary, make_modes_comparable};
use super::{
    CheckMode, assert_checks_clean_but_for_extended_refs, assert_checks_clean_but_for_half_dropped,
    btrfs_checks, half_dropped_roots, has_extended_refs, inline_gaps,
};
use crate::TreeSnapshot;
use crate::mount::{KernelMount, LoopDevice};
use crate::run::run;

/// Runs `btrfs check` in all its modes on a filesystem that lies in one image or in several, which
/// then become loop devices. What gives a known false alarm is told apart by the strictest call.
///
/// # Panics
/// With what was said, if anything else is found.
pub fn assert_checks_clean_whatever_it_holds(images: &[PathBuf]) {
    if has_bare_alarm_of_first_mode(images) {
        return check_with_orphans_removed(images);
    }
    if let [image] = images {
        if !half_dropped_roots(image).is_empty() {
            return assert_checks_clean_but_for_half_dropped(image);
        }
        if has_extended_refs(image) {
            return assert_checks_clean_but_for_extended_refs(image);
        }
        return check_but_for_inline_gaps(image);
    }
    let devices = attach(images);
    if !half_dropped_roots(devices[0].path()).is_empty() {
        return assert_checks_clean_but_for_half_dropped(devices[0].path());
    }
    let has_extended_refs = images.iter().any(|image| has_extended_refs(image));
    for (mode, outcome) in btrfs_checks(devices[0].path(), &CheckMode::ALL) {
        let is_alarm = has_extended_refs && mode == CheckMode::Lowmem && is_bare_summary(&outcome)
            || inline_gaps::is_alarm(devices[0].path(), mode, &outcome);
        assert!(outcome.is_clean || is_alarm, "btrfs check {mode:?}: {}", outcome.transcript);
    }
    drop(devices);
    if has_extended_refs {
        check_with_comparable_modes(images);
    }
}

fn check_but_for_inline_gaps(image: &Path) {
    for (mode, outcome) in btrfs_checks(image, &CheckMode::ALL) {
        let is_clean = outcome.is_clean || inline_gaps::is_alarm(image, mode, &outcome);
        assert!(is_clean, "btrfs check {mode:?} {}: {}", image.display(), outcome.transcript);
    }
}

/// Whether the first mode, which names all that it finds, ends with its bare summary.
fn has_bare_alarm_of_first_mode(images: &[PathBuf]) -> bool {
    let devices = if images.len() > 1 { attach(images) } else { Vec::new() };
    let image = devices.first().map_or(images[0].as_path(), LoopDevice::path);
    is_bare_summary(&super::btrfs_check(image, CheckMode::Original))
}

/// The first mode gives a false alarm without a word where an inode without a name lies in a leaf
/// that a subvolume shares with its snapshot: it forgets that it has looked at the inode when it
/// takes over what it knows of the leaf. The lowmem mode must find nothing then. Linux removes such
/// inodes from a snapshot after the commit that makes it, so that a cut leaves them there, too; in a
/// copy, it is made to remove them, and what is left must be clean in all modes.
fn check_with_orphans_removed(images: &[PathBuf]) {
    let lowmem = {
        let devices = attach(images);
        super::btrfs_check(devices[0].path(), CheckMode::Lowmem)
    };
    assert!(lowmem.is_clean, "btrfs check: the bare summary, and {}", lowmem.transcript);
    let scratch = Scratch::copy(images);
    let mount = KernelMount::mount(&scratch.copies, "subvolid=5,noatime", false)
        .unwrap_or_else(|why| panic!("btrfs check gives the bare summary, and {why}"));
    // They go when their subvolume is first looked up.
    let seen = TreeSnapshot::of_directory(mount.path());
    assert!(!seen.entries.is_empty());
    mount.unmount();
    assert!(
        !has_bare_alarm_of_first_mode(&scratch.copies),
        "btrfs check gives the bare summary, with orphans or without"
    );
    assert_checks_clean_whatever_it_holds(&scratch.copies);
}

/// Copies of images, as long as they are needed.
struct Scratch {
    _directory: tempfile::TempDir,
    copies: Vec<PathBuf>,
}

impl Scratch {
    fn copy(images: &[PathBuf]) -> Self {
        let directory = tempfile::tempdir_in(images[0].parent().unwrap_or(Path::new("/")));
        let directory = directory.expect("a temporary directory");
        let copy = |(number, image): (usize, &PathBuf)| {
            let copy = directory.path().join(number.to_string());
            run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
            copy
        };
        let copies = images.iter().enumerate().map(copy).collect();
        Self { _directory: directory, copies }
    }
}

fn check_with_comparable_modes(images: &[PathBuf]) {
    let scratch = Scratch::copy(images);
    for copy in &scratch.copies {
        make_modes_comparable(copy);
    }
    let devices = attach(&scratch.copies);
    for (mode, outcome) in btrfs_checks(devices[0].path(), &CheckMode::ALL) {
        let is_alarm = inline_gaps::is_alarm(devices[0].path(), mode, &outcome);
        let is_clean = outcome.is_clean || is_alarm;
        assert!(is_clean, "btrfs check {mode:?}, with other modes: {}", outcome.transcript);
    }
}

/// Has btrfs-progs take a filesystem's free space tree away, which Linux then makes anew when it
/// mounts it with `space_cache=v2`.
///
/// # Panics
/// With what was said, if it does not.
pub fn clear_free_space_tree(images: &[PathBuf]) {
    let devices = attach_for(images, false);
    let options = ["check", "--clear-space-cache", "v2"].map(OsStr::new);
    run("btrfs", options.into_iter().chain([devices[0].path().as_os_str()]));
}

fn attach(images: &[PathBuf]) -> Vec<LoopDevice> {
    attach_for(images, true)
}

/// Loop devices over images, that with the newest superblock first: btrfs-progs believes the
/// superblock of the device that it is given, and a power cut may leave others a commit behind.
fn attach_for(images: &[PathBuf], read_only: bool) -> Vec<LoopDevice> {
    let mut images: Vec<&PathBuf> = images.iter().collect();
    images.sort_by_cached_key(|image| std::cmp::Reverse(generation(image)));
    images.into_iter().map(|image| LoopDevice::attach(image, read_only)).collect()
}

/// The generation in an image's primary superblock; 0 if it has none.
fn generation(image: &Path) -> u64 {
    const AT: u64 = SUPERBLOCK_OFFSETS[0].0;
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let read = std::fs::File::open(image).and_then(|file| file.read_exact_at(&mut bytes, AT));
    let superblock = read.ok().and_then(|()| Superblock::parse(&bytes, SUPERBLOCK_OFFSETS[0]).ok());
    superblock.map_or(0, |superblock| superblock.generation.get())
}
