//! A mount that a test serves itself.
#![allow(dead_code)] // Each test file uses its part.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;

use tempfile::TempDir;
use ubtrfs_engine::{BackgroundOptions, Filesystem, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_fuse::{
    FuseDevice, MountOptions, ServeOptions, Server, Transport, mount, reached, unmount,
};
use ubtrfs_iomap::CacheOptions;
use ubtrfs_rt::Runtime;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean_whatever_it_holds, oracle,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// One test at a time: a process that another one starts has, between its fork and its exec, all files of this process open,
/// and a mount with an open file is busy.
static ALONE: Mutex<()> = Mutex::new(());

/// A mount that a thread of this process serves.
pub struct Mounted {
    _scratch: TempDir,
    _alone: MutexGuard<'static, ()>,
    pub image: PathBuf,
    pub directory: PathBuf,
    pub serve_options: ServeOptions,
    pub server: Option<(Arc<Server>, JoinHandle<()>)>,
    /// What is served.
    pub fs: Option<Filesystem>,
}

pub fn device(image: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap())
}

pub fn open(image: &Path) -> Filesystem {
    let volume = Volume::open(vec![device(image)], &VolumeOptions::default()).unwrap();
    let page_cache = Some(CacheOptions { keeps_clean: false, ..CacheOptions::default() });
    Filesystem::open(volume, OpenOptions { page_cache, ..OpenOptions::default() }).unwrap()
}

impl Mounted {
    /// Of a new filesystem; `None` where mounting is not possible.
    pub fn new() -> Option<Self> {
        Self::served_with(ServeOptions::default())
    }

    pub fn served_with(serve_options: ServeOptions) -> Option<Self> {
        let judges = [Oracle::Root, Oracle::Fuse, Oracle::KernelBtrfs, Oracle::BtrfsProgs];
        if !oracle::require_all(&judges) {
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = tempfile::tempdir().unwrap();
        let (image, directory) = (scratch.path().join("image"), scratch.path().join("mounted"));
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        File::create(&image).unwrap().set_len(1 << 30).unwrap();
        mkfs(vec![device(&image)], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
        let mut mounted = Self {
            _scratch: scratch,
            _alone: alone,
            image,
            directory,
            serve_options,
            server: None,
            fs: None,
        };
        mounted.mount();
        Some(mounted)
    }

    pub fn mount(&mut self) {
        let fs = open(&self.image);
        let root = fs.default_subvolume().unwrap();
        let source = self.image.clone().into_os_string();
        let options = MountOptions { source, allow_other: true, ..MountOptions::default() };
        let device = mount(&self.directory, &options).unwrap();
        let transport: Arc<dyn Transport> = Arc::new(FuseDevice::new(device).unwrap());
        let server = Server::new(fs.clone(), root, self.serve_options);
        let serving = Arc::clone(&server);
        self.fs = Some(fs.clone());
        let (say_ready, ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let background = fs.run_in_background(BackgroundOptions::default()).unwrap();
            serving.run(&transport, || say_ready.send(()).unwrap()).unwrap();
            background.stop().unwrap();
        });
        self.server = Some((server, thread));
        ready.recv().unwrap();
    }

    pub fn unmount(&mut self) {
        if let Some((server, thread)) = self.server.take() {
            let reached = reached(&self.directory).unwrap().unwrap();
            unmount(&self.directory, reached.mount).unwrap();
            thread.join().unwrap();
            drop((server, self.fs.take()));
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Unmounts; all judges say that it is as it was seen.
    pub fn judge(&mut self) {
        self.judge_by(&Compare::same_filesystem());
    }

    pub fn judge_by(&mut self, compare: &Compare) {
        let seen = TreeSnapshot::of_directory(&self.directory);
        self.unmount();
        assert_checks_clean_whatever_it_holds(std::slice::from_ref(&self.image));
        let kernel = KernelMount::read_only(&self.image, "");
        let theirs = TreeSnapshot::of_directory(kernel.path());
        kernel.unmount();
        seen.assert_same(&theirs, compare);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.server.is_some() {
            let _ = Command::new("umount").arg("-l").arg(&self.directory).status();
        }
    }
}
