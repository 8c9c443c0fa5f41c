//! The images of one run, and who judges them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use ubtrfs_engine::{Filesystem, Method, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::{
    CheckMode, MkfsBtrfs, assert_checks_clean_whatever_it_holds, btrfs_check, command, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use crate::shapes::Shape;

/// The images of one run.
pub struct Images {
    directory: Option<TempDir>,
    pub paths: Vec<PathBuf>,
}

impl Images {
    /// In memory, where that is a directory; in what UBTRFS_TURNS_KEEP names, if it does.
    pub fn make(name: &str, shape: &Shape) -> Self {
        let memory = Some(PathBuf::from("/dev/shm")).filter(|memory| memory.is_dir());
        let parent = kept_in().or(memory).unwrap_or_else(std::env::temp_dir);
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix(&format!("turns-{name}-")).tempdir_in(parent).unwrap();
        let image = |number| directory.path().join(format!("image{number}.now"));
        let paths: Vec<PathBuf> = (0..shape.device_count).map(image).collect();
        match shape.by_engine {
            true => make_by_engine(&paths, shape),
            false => {
                MkfsBtrfs::new().options(shape.mkfs).size_bytes(shape.size_bytes).make_on(&paths);
            }
        }
        Self { directory: Some(directory), paths }
    }

    /// Keeps what a turn begins with, if anything is to be kept.
    pub fn keep(&self) {
        if kept_in().is_some() {
            self.copy_to("before");
        }
    }

    fn copy_to(&self, name: &str) -> Vec<PathBuf> {
        let copy = |image: &PathBuf| {
            let copy = image.with_extension(name);
            run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
            copy
        };
        self.paths.iter().map(copy).collect()
    }

    /// Two copies that are the same: the kernel may be writing by itself, and a power cut is one moment.
    pub fn copy_at_one_moment(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        loop {
            let (one, two) = (self.copy_to("one"), self.copy_to("two"));
            let is_same = |(one, two): (&PathBuf, &PathBuf)| {
                command("cmp").arg("-s").arg(one).arg(two).status().unwrap().success()
            };
            if one.iter().zip(&two).all(is_same) {
                return (one, two);
            }
        }
    }

    pub fn replace_by(&self, others: &[PathBuf]) {
        for (image, other) in self.paths.iter().zip(others) {
            fs::rename(other, image).unwrap();
        }
    }

    pub fn open(&self, shape: &Shape, read_only: bool) -> Filesystem {
        let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
        let open = |image: &PathBuf| {
            let device = FileDevice::open(image, mode, Window::Whole).unwrap();
            Arc::new(device) as Arc<dyn Device>
        };
        let devices = self.paths.iter().map(open).collect();
        let options = VolumeOptions { read_only, ..VolumeOptions::default() };
        let volume = Volume::open(devices, &options).unwrap();
        let options = OpenOptions {
            read_only,
            compression: shape.compression.map(Method::with_default_level),
            force_compression: shape.mount.contains("compress-force"),
            ..OpenOptions::default()
        };
        Filesystem::open(volume, options).unwrap()
    }

    /// Whether Linux's first cache of free space is there, and not of the last commit, as after each of
    /// the engine's: who finds that does not use it, and `btrfs check` says so.
    fn has_stale_cache(&self) -> bool {
        let superblock = superblock_of(&self.paths[0]);
        let of_cache = superblock.cache_generation.get();
        ![0, u64::MAX, superblock.generation.get()].contains(&of_cache)
    }

    /// The generation of the last commit.
    pub fn generation(&self) -> u64 {
        superblock_of(&self.paths[0]).generation.get()
    }

    /// Whether all that is wrong with caches is wrong with those that the kernel wrote after the commit
    /// `since`, as `btrfs check` tells them. It frees space behind a cache that it has written and
    /// leaves it at that: when it reads one, it compares how much is free. In a cache from before,
    /// what the engine changed since would be wrong.
    fn has_wrong_caches_of_kernel(&self, since: u64) -> bool {
        let said = btrfs_check(&self.paths[0], CheckMode::Original).transcript;
        let words = "failed to load free space cache for block group ";
        let wrong: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix(words)).collect();
        if wrong.is_empty() {
            return false;
        }
        let image = self.paths[0].as_os_str();
        let words = ["inspect-internal", "dump-tree", "-t", "root"].map(OsStr::new);
        let dump = run("btrfs", words.into_iter().chain([image]));
        let written = |group: &str| {
            let header = dump.split(&format!("(FREE_SPACE UNTYPED {group})")).nth(1)?;
            let generation = header.split("cache generation ").nth(1)?.split_whitespace().next()?;
            generation.parse::<u64>().ok()
        };
        for group in wrong {
            assert!(written(group).is_some_and(|generation| generation > since), "{since}: {said}");
        }
        true
    }

    /// `btrfs check` says no more than that caches are stale or wrong, and nothing of copies without.
    fn judge_without_cache(&self) {
        let said = btrfs_check(&self.paths[0], CheckMode::Original).transcript;
        let is_told = said.contains("cache and super generation don't match")
            || said.contains("failed to load free space cache");
        assert!(is_told && said.contains("no error found"), "{said}");
        let copies = self.copy_to("judged");
        let words = ["check", "--clear-space-cache", "v1"].map(OsStr::new);
        run("btrfs", words.into_iter().chain([copies[0].as_os_str()]));
        assert_checks_clean_whatever_it_holds(&copies);
        copies.iter().for_each(|copy| fs::remove_file(copy).unwrap());
    }

    /// Both checkers find nothing.
    pub fn judge(&self, when: &str) {
        self.judge_since(when, u64::MAX);
    }

    /// As [`Images::judge`], after the kernel has changed what was committed last in the generation `since`.
    pub fn judge_since(&self, when: &str, since: u64) {
        println!("{when}");
        let has_caches = superblock_of(&self.paths[0]).cache_generation.get() == self.generation();
        if self.has_stale_cache()
            || has_caches && since < u64::MAX && self.has_wrong_caches_of_kernel(since)
        {
            self.judge_without_cache();
        } else {
            assert_checks_clean_whatever_it_holds(&self.paths);
        }
        let open = |image: &PathBuf| {
            let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
            Arc::new(device) as Arc<dyn Device>
        };
        let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(self.paths.iter().map(open).collect(), &options).unwrap();
        let options = ubtrfs_check::CheckOptions {
            data: true,
            executor: Executor::Threads(2),
            ..ubtrfs_check::CheckOptions::default()
        };
        let report = ubtrfs_check::check(&volume, &options).unwrap();
        let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
        assert!(report.is_clean(), "{when}: {errors:#?}");
    }
}

const SUPERBLOCK_AT: PhysicalAddr = SUPERBLOCK_OFFSETS[0];

fn superblock_of(image: &Path) -> Superblock {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    fs::File::open(image).unwrap().read_exact_at(&mut bytes, SUPERBLOCK_AT.0).unwrap();
    *Superblock::parse(&bytes, SUPERBLOCK_AT).unwrap()
}

fn make_by_engine(images: &[PathBuf], shape: &Shape) {
    let mode = OpenMode::CreateNew { len_bytes: shape.size_bytes };
    let open = |image: &PathBuf| {
        Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap()) as Arc<dyn Device>
    };
    let nodesize_bytes = u32::try_from(shape.nodesize_bytes()).unwrap();
    let options = MkfsOptions { nodesize_bytes, ..MkfsOptions::default() };
    mkfs(images.iter().map(open).collect(), &options, &Arc::new(Runtime::system())).unwrap();
}

fn kept_in() -> Option<PathBuf> {
    std::env::var_os("UBTRFS_TURNS_KEEP").map(PathBuf::from)
}

impl Drop for Images {
    fn drop(&mut self) {
        if std::thread::panicking() && kept_in().is_some() {
            let kept = self.directory.take().map(TempDir::keep);
            println!("kept: {kept:?}");
        }
    }
}
