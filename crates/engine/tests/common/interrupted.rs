//! A device at each of whose reads something else can be done.

use std::path::Path;
use std::sync::{Arc, Mutex};

use ubtrfs_engine::{Filesystem, OpenOptions};
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// What is done at each read; not at those that it makes itself.
pub type AtRead = Box<dyn Fn() + Send>;

#[derive(Clone, Default)]
pub struct Hook(Arc<Mutex<Option<AtRead>>>);

impl Hook {
    pub fn set(&self, at_read: impl Fn() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(at_read));
    }

    pub fn clear(&self) {
        *self.0.lock().unwrap() = None;
    }
}

pub fn open(image: &Path) -> (Filesystem, Hook) {
    let hook = Hook::default();
    let inner = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device = Arc::new(Interrupted { inner, at_read: hook.clone() });
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    (Filesystem::open(volume, OpenOptions::default()).unwrap(), hook)
}

struct Interrupted {
    inner: FileDevice,
    at_read: Hook,
}

impl std::fmt::Debug for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupted").finish_non_exhaustive()
    }
}

impl Device for Interrupted {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, write_at, flush, discard, resize, is_read_only);

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> std::io::Result<()> {
        let at_read = self.at_read.0.lock().unwrap().take();
        if let Some(at_read) = at_read {
            at_read();
            *self.at_read.0.lock().unwrap() = Some(at_read);
        }
        self.inner.read_at(at, buf)
    }
}
