//! Where images lie while they are measured.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::{Error, Result};

/// A directory that goes away with what is in it.
#[derive(Debug)]
pub(crate) struct Scratch {
    directory: TempDir,
}

impl Scratch {
    /// Makes one below `parent`, or in memory where the machine offers that.
    ///
    /// # Errors
    /// If there is no such directory, or it cannot be written.
    pub(crate) fn new(parent: Option<&Path>) -> Result<Self> {
        let parent = parent.map_or_else(default_parent, Path::to_owned);
        let directory = tempfile::Builder::new()
            .prefix("ubtrfs-bench-")
            .tempdir_in(&parent)
            .map_err(Error::io(format!("make a directory in {}", parent.display())))?;
        Ok(Self { directory })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A new directory, of a name that nothing else has.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn new_directory(&self) -> Result<PathBuf> {
        let made = tempfile::Builder::new().tempdir_in(self.directory.path());
        Ok(made.map_err(Error::io("make a directory"))?.keep())
    }

    /// The filesystem that it lies on.
    pub(crate) fn kind(&self) -> &'static str {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let magic = rustix::fs::statfs(self.directory.path()).map(|stat| stat.f_type);
        match magic.map(u64::try_from) {
            Ok(Ok(TMPFS_MAGIC)) => "tmpfs",
            _ => "a disk",
        }
    }

    /// A path where no file is.
    ///
    /// # Errors
    /// If what is there cannot be removed.
    pub(crate) fn absent(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", path.display()))(error))
            }
            _ => Ok(path),
        }
    }

    /// An empty file of `len_bytes`, all a hole.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn blank(&self, name: &str, len_bytes: u64) -> Result<PathBuf> {
        let path = self.absent(name)?;
        std::fs::File::create_new(&path)
            .and_then(|file| file.set_len(len_bytes))
            .map_err(Error::io(format!("make {}", path.display())))?;
        Ok(path)
    }
}

fn default_parent() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}
