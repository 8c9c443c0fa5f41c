//! Where a new filesystem goes: opened so that nothing which is there is lost by mistake.

use std::fs;
use std::io;
use std::path::Path;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::Arc;
use ubtrfs_volume::{Device, Error, FileDevice, Op, OpenMode, Window};

use crate::failure::{Exit, Failure, Result};
use crate::image::{WindowArgs, open_device};
use crate::signature;
use crate::size;
use crate::unfinished::Unfinished;

/// What may be done to a target that holds something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Existing {
    /// Nothing: it is refused.
    Refuse,
    /// It is overwritten (`--force`).
    Overwrite,
}

/// How long a target is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// As long as it is. A file that does not exist is refused.
    AsItIs,
    /// So many bytes: a file is made, or made longer; of a longer one the beginning is used.
    Bytes(u64),
}

/// A target that was opened. A file made for it goes away again unless it is kept.
pub struct Target {
    device: Arc<FileDevice>,
    made: Option<Unfinished>,
}

impl Target {
    /// Opens `path`, or makes it.
    ///
    /// # Errors
    /// It is in use, holds something, does not exist and no length is given, or cannot be opened.
    pub fn open(
        path: &Path,
        window: &WindowArgs,
        length: Length,
        existing: Existing,
    ) -> Result<Self> {
        match fs::metadata(path) {
            Ok(metadata) => {
                let is_empty_file = metadata.is_file() && metadata.len() == 0;
                Self::open_existing(path, window, length, existing, is_empty_file)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self::make(path, window, length)
            }
            Err(error) => Err(Failure::io("opening", &error).at_path(path)),
        }
    }

    fn make(path: &Path, window: &WindowArgs, length: Length) -> Result<Self> {
        let Length::Bytes(len_bytes) = length else {
            return Err(no_length(path, "it does not exist"));
        };
        let window = window.window();
        let len_bytes = match window {
            Window::Offset { start_bytes, .. } => start_bytes
                .checked_add(len_bytes)
                .ok_or_else(|| Failure::usage("--offset", "too large"))?,
            Window::Partition(_) => {
                let why = "it does not exist, and so has no partitions";
                return Err(Failure::new(Exit::Io, "opening", why).at_path(path));
            }
            Window::Whole => len_bytes,
        };
        let open = |path: &Path| {
            FileDevice::open(path, OpenMode::CreateNew { len_bytes }, window).map_err(|error| {
                // Whoever could not make the file, or finds that it is another's by now, has none to take away.
                if !matches!(error, Error::Io { op: Op::Open, .. } | Error::Busy { .. }) {
                    let _ = fs::remove_file(path);
                }
                Failure::volume("opening", &error).at_path(path)
            })
        };
        let (made, device) = Unfinished::make(path.into(), open)?;
        Ok(Self { device: Arc::new(device), made: Some(made) })
    }

    fn open_existing(
        path: &Path,
        window: &WindowArgs,
        length: Length,
        existing: Existing,
        is_empty_file: bool,
    ) -> Result<Self> {
        let device = open_device(path, OpenMode::ReadWrite, window.window())?;
        if existing == Existing::Refuse {
            refuse_what_holds_something(&device, path)?;
        }
        let want_bytes = match length {
            Length::Bytes(bytes) => bytes,
            Length::AsItIs if is_empty_file => return Err(no_length(path, "it is empty")),
            Length::AsItIs if !device.is_end_known() => {
                let why = "where the filesystem is to end is not known: no partition begins there";
                return Err(no_length(path, why));
            }
            Length::AsItIs => device.len_bytes(),
        };
        let device = fit(device, path, want_bytes, existing)?;
        Ok(Self { device: Arc::new(device), made: None })
    }

    /// The device.
    pub fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.device) as Arc<dyn Device>
    }

    /// The filesystem is made: a file stays.
    pub fn keep(self) {
        if let Some(made) = self.made {
            made.keep();
        }
    }
}

fn no_length(path: &Path, why: &str) -> Failure {
    Failure::new(Exit::Io, "opening", why).at_path(path).advice(
        "Say how large the image is to be, for example --size 1G: it takes space only as it fills.",
    )
}

fn refuse_what_holds_something(device: &FileDevice, path: &Path) -> Result<()> {
    let failed = |error: io::Error| Failure::io("reading", &error).at_path(path);
    let found =
        signature::find(device.len_bytes(), |at, buf| device.read_at(PhysicalAddr(at), buf))
            .map_err(failed)?;
    let what = match found {
        Some(name) => format!("it holds {name}"),
        // Disks often carry remains of what they once were; a file with content is somebody's,
        // wherever in it the content lies.
        None if !device.is_block_device() && device.holds_data().map_err(failed)? => {
            "it is not empty, and holds no image that is known".to_owned()
        }
        None => return Ok(()),
    };
    Err(Failure::new(Exit::Io, "making a filesystem", format!("{what}; nothing was changed"))
        .at_path(path)
        .advice("Give -f (--force) if all of that may be lost, or choose another name."))
}

/// Makes the device `want_bytes` long, or uses the beginning of it.
fn fit(device: FileDevice, path: &Path, want_bytes: u64, existing: Existing) -> Result<FileDevice> {
    let have_bytes = device.len_bytes();
    if want_bytes == have_bytes {
        return Ok(device);
    }
    if want_bytes > have_bytes {
        device.resize(want_bytes).map_err(|error| {
            let why = if error.kind() == io::ErrorKind::Unsupported {
                format!(
                    "--size asks for {}, there are {}",
                    size::binary(want_bytes),
                    size::binary(have_bytes)
                )
            } else {
                error.to_string()
            };
            Failure::new(Exit::NoSpace, "making it longer", why).at_path(path)
        })?;
        return Ok(device);
    }
    let start_bytes = device.start_bytes();
    // The lock is given back before it is taken anew.
    drop(device);
    let window = Window::Offset { start_bytes, len_bytes: Some(want_bytes) };
    let device = open_device(path, OpenMode::ReadWrite, window)?;
    // In between somebody else could have it.
    if existing == Existing::Refuse {
        refuse_what_holds_something(&device, path)?;
    }
    Ok(device)
}
