//! Images that the kernel wrote, one for each option that leaves its mark on the medium, each with
//! the kernel's own account of what it holds.
//!
//! They are made on first use and kept below the build directory, until this code or the kernel
//! changes.

mod fill;
mod recipes;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};

use crate::{KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, oracle, run};
use recipes::{RECIPES, Recipe};

/// A filesystem that the kernel wrote. Its files are shared between tests: write to
/// [a copy](Self::copy_to) only.
#[derive(Clone, Debug)]
pub struct KernelImage {
    /// What it is called, after what is special in it.
    pub name: &'static str,
    /// Its devices, by ascending number.
    pub devices: Vec<PathBuf>,
    /// All that it holds, from the top-level subvolume down, subvolumes included, as the kernel
    /// shows it. With a log, after its replay.
    pub snapshot: TreeSnapshot,
    /// The same without the replay of its log, if it has one.
    pub snapshot_without_log: Option<TreeSnapshot>,
}

impl KernelImage {
    /// Copies the devices into a directory, holes kept, and returns the copies.
    ///
    /// # Panics
    /// If that fails.
    pub fn copy_to(&self, directory: &Path) -> Vec<PathBuf> {
        self.devices
            .iter()
            .map(|device| {
                let copy = directory.join(device.file_name().expect("an image has a name"));
                copy_sparse(device, &copy);
                copy
            })
            .collect()
    }
}

/// What the images are called.
pub fn names() -> impl Iterator<Item = &'static str> {
    RECIPES.iter().map(|recipe| recipe.name)
}

/// All images that can be made here. Needs [`Oracle::KernelBtrfs`]; those that need a newer
/// btrfs-progs are left out, and said so, where it is missing.
///
/// # Panics
/// If one cannot be made.
pub fn kernel_images() -> impl Iterator<Item = KernelImage> {
    names().filter_map(kernel_image)
}

/// One image by its name; `None` where a judge that it needs is missing.
///
/// # Panics
/// If there is none of that name, or it cannot be made.
pub fn kernel_image(name: &str) -> Option<KernelImage> {
    let recipe = RECIPES
        .iter()
        .find(|recipe| recipe.name == name)
        .unwrap_or_else(|| panic!("no image is called {name}"));
    let wanted = if recipe.by_new_progs {
        &[Oracle::KernelBtrfs, Oracle::NewBtrfsProgs][..]
    } else {
        &[Oracle::KernelBtrfs]
    };
    oracle::require_all(wanted).then(|| load_or_make(recipe))
}

fn load_or_make(recipe: &'static Recipe) -> KernelImage {
    let directory = cache_directory();
    fs::create_dir_all(&directory).expect("the cache can be made");
    let lock = File::create(directory.join(format!("{}.lock", recipe.name))).expect("a lock file");
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("the lock can be had");
    let kept = directory.join(recipe.name);
    if !kept.exists() {
        remove_older_versions(&directory);
        let making = directory.join(format!("{}.making", recipe.name));
        let _ = fs::remove_dir_all(&making);
        fs::create_dir(&making).expect("a directory");
        make(recipe, &making);
        fs::rename(&making, &kept).expect("the finished image takes its name");
    }
    load(recipe, &kept)
}

fn remove_older_versions(directory: &Path) {
    let siblings = directory.parent().and_then(|base| fs::read_dir(base).ok());
    for sibling in siblings.into_iter().flatten().flatten() {
        if sibling.path() != directory {
            // What stays takes space and does no harm.
            let _ = fs::remove_dir_all(sibling.path());
        }
    }
}

fn load(recipe: &Recipe, directory: &Path) -> KernelImage {
    let snapshot = |name: &str| {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        Some(TreeSnapshot::from_text(&text))
    };
    KernelImage {
        name: recipe.name,
        devices: device_paths(recipe, directory),
        snapshot: snapshot("snapshot").expect("every image has a snapshot"),
        snapshot_without_log: snapshot("snapshot-without-log"),
    }
}

fn device_paths(recipe: &Recipe, directory: &Path) -> Vec<PathBuf> {
    (1..=recipe.devices).map(|number| directory.join(format!("device-{number}.img"))).collect()
}

fn make(recipe: &Recipe, directory: &Path) {
    let devices = device_paths(recipe, directory);
    let mut mkfs = MkfsBtrfs::new().options(recipe.mkfs).size_bytes(recipe.size_bytes);
    if recipe.by_new_progs {
        mkfs = mkfs.by_new_progs();
    }
    mkfs.make_on(&devices);
    let mount = |devices: &[PathBuf], options: &str, read_only| {
        KernelMount::mount(devices, options, read_only)
            .unwrap_or_else(|why| panic!("{}: {why}", recipe.name))
    };
    let mounted = mount(&devices, recipe.mount, false);
    let mut prng = Prng::new(0x5eed);
    (recipe.fill)(mounted.path(), &mut prng);
    let show = |devices: &[PathBuf], options: &str, name: &str| {
        let mounted = mount(devices, &format!("subvolid=5,noatime{options}"), true);
        let snapshot = TreeSnapshot::of_directory(mounted.path());
        fs::write(directory.join(name), snapshot.to_text()).expect("the snapshot can be kept");
    };
    if let Some(leave_log) = recipe.leave_log {
        leave_log(mounted.path(), &mut prng);
        // Under the mount, as a power cut would leave it.
        let cut: Vec<PathBuf> = devices.iter().map(|path| path.with_extension("cut")).collect();
        devices.iter().zip(&cut).for_each(|(device, copy)| copy_sparse(device, copy));
        mounted.unmount();
        devices.iter().zip(&cut).for_each(|(device, copy)| copy_sparse(copy, device));
        show(&devices, ",rescue=nologreplay", "snapshot-without-log");
        show(&cut, "", "snapshot");
        cut.iter().for_each(|path| fs::remove_file(path).expect("the copy can be removed"));
    } else {
        mounted.unmount();
        show(&devices, "", "snapshot");
    }
}

fn copy_sparse(from: &Path, to: &Path) {
    run("cp", ["--sparse=always".as_ref(), from.as_os_str(), to.as_os_str()]);
}

/// Below the build directory, apart for each version of what makes the images.
fn cache_directory() -> PathBuf {
    let base = std::env::var_os("UBTRFS_KERNEL_IMAGES").map(PathBuf::from).unwrap_or_else(|| {
        let program = std::env::current_exe().expect("a test has a program");
        // <target>/debug/deps/<test>
        program
            .ancestors()
            .nth(3)
            .expect("a test lies in the build directory")
            .join("kernel-images")
    });
    let mut hasher = Sha256::new();
    let kernel = rustix::system::uname();
    hasher.update(kernel.release().to_bytes());
    for source in [
        include_str!("corpus.rs"),
        include_str!("corpus/fill.rs"),
        include_str!("corpus/recipes.rs"),
        include_str!("odd.rs"),
        include_str!("snapshot/walk.rs"),
        include_str!("snapshot/text.rs"),
    ] {
        hasher.update(source);
    }
    let version: String =
        hasher.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    base.join(version)
}
