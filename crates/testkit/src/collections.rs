//! Images that others collected: fuzzers' findings and broken filesystems, from btrfs-progs's
//! tests. `scripts/fetch-collections` unpacks them.

use std::path::{Path, PathBuf};

/// One image of the collections.
#[derive(Clone, Debug)]
pub struct CollectedImage {
    /// The raw image file. It is shared: never write to it.
    pub path: PathBuf,
    /// Where in btrfs-progs's source it comes from, as `tests/fuzz-tests/images/…`.
    pub origin: String,
}

/// The directory of the collections, if they were fetched.
pub fn directory() -> Option<PathBuf> {
    let directory = match std::env::var_os("UBTRFS_COLLECTIONS") {
        Some(directory) => PathBuf::from(directory),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/collections"),
    };
    let directory = directory.canonicalize().ok()?;
    directory.join("manifest").exists().then_some(directory)
}

/// All images, in the order of their names; none where they were not fetched.
///
/// # Panics
/// If the manifest cannot be read.
pub fn images() -> Vec<CollectedImage> {
    let Some(directory) = directory() else { return Vec::new() };
    let manifest = std::fs::read_to_string(directory.join("manifest")).expect("a manifest");
    manifest
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (file, origin) = line.split_once('\t').expect("a file and its origin");
            CollectedImage { path: directory.join(file), origin: origin.to_owned() }
        })
        .collect()
}
