//! `mkfs.btrfs` with its options.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::oracle;
use crate::run::{command, transcript};

/// Makes images with `mkfs.btrfs`.
#[derive(Clone, Debug, Default)]
pub struct MkfsBtrfs {
    options: Vec<String>,
    size_bytes: Option<u64>,
    by_new_progs: bool,
}

impl MkfsBtrfs {
    /// What an image is long where nothing else is said.
    pub const SIZE_BYTES_DEFAULT: u64 = 512 << 20;

    /// With the defaults of the installed version.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds options as on a command line, separated by spaces.
    #[must_use]
    pub fn options(mut self, options: &str) -> Self {
        self.options.extend(options.split_whitespace().map(str::to_owned));
        self
    }

    /// Sets each device's length.
    #[must_use]
    pub fn size_bytes(mut self, size_bytes: u64) -> Self {
        self.size_bytes = Some(size_bytes);
        self
    }

    /// Takes the newer version, of [`Oracle::NewBtrfsProgs`](crate::Oracle::NewBtrfsProgs).
    #[must_use]
    pub fn by_new_progs(mut self) -> Self {
        self.by_new_progs = true;
        self
    }

    /// Makes one image file.
    ///
    /// # Panics
    /// If that fails.
    pub fn make(&self, image: &Path) {
        self.make_on(&[image.to_owned()]);
    }

    /// Makes one filesystem over several image files.
    ///
    /// # Panics
    /// If that fails.
    pub fn make_on(&self, images: &[PathBuf]) {
        for image in images {
            let file = File::create(image).expect("the image can be created");
            file.set_len(self.size_bytes.unwrap_or(Self::SIZE_BYTES_DEFAULT))
                .expect("the image can be that long");
        }
        let program = match (self.by_new_progs, oracle::new_btrfs_progs()) {
            (true, Some(directory)) => directory.join("sbin/mkfs.btrfs"),
            (true, None) => panic!("no newer btrfs-progs: require Oracle::NewBtrfsProgs first"),
            (false, _) => "mkfs.btrfs".into(),
        };
        let mut command = command(program.to_str().expect("the program's path is text"));
        command.arg("-q").args(&self.options).args(images);
        let output = command.output().expect("mkfs.btrfs can be started");
        assert!(output.status.success(), "{command:?}: {}", transcript(&output));
    }
}
