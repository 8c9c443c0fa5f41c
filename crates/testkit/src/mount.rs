//! Images in the kernel's hands: loop devices and mounts that go away by themselves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::run::{command, run, transcript};

/// How often it is looked whether a device is detached.
const DETACH_WAITS_MAX: usize = 500;

/// A loop device over an image file; detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    device: PathBuf,
    image: PathBuf,
}

impl LoopDevice {
    /// Attaches an image file.
    ///
    /// # Panics
    /// If there is no free loop device.
    pub fn attach(image: &Path, read_only: bool) -> Self {
        let mut last = String::new();
        // Another test may take the free device that losetup found.
        for _ in 0..20 {
            let mut losetup = command("losetup");
            losetup.args(["--find", "--show"]);
            if read_only {
                losetup.arg("--read-only");
            }
            let output = losetup.arg(image).output().expect("losetup can be started");
            if output.status.success() {
                let name = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                // The kernel keeps partitions of the image that was there before, and btrfs check
                // looks for filesystems in those and not on the device.
                let _ = command("partx").args(["--delete", &name]).output();
                return Self { device: name.into(), image: image.to_owned() };
            }
            last = transcript(&output);
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("losetup {}: {last}", image.display());
    }

    /// Its path, as `/dev/loop3`.
    pub fn path(&self) -> &Path {
        &self.device
    }

    /// Whether the kernel still holds the image: whoever looks through all devices at the moment, as
    /// `btrfs check` does, keeps a detached one until it is done.
    fn is_attached(&self) -> bool {
        let Some(name) = self.device.file_name() else { return false };
        let file = Path::new("/sys/block").join(name).join("loop/backing_file");
        let image = std::fs::canonicalize(&self.image).unwrap_or_else(|_| self.image.clone());
        let image = image.as_os_str().as_encoded_bytes();
        // Behind the name of a file that was removed it says so.
        std::fs::read(file).is_ok_and(|backing| backing.starts_with(image))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The kernel forgets the device as a member of its filesystem, or the next image on it
        // is taken for that.
        let _ = command("btrfs").args(["device", "scan", "--forget"]).arg(&self.device).output();
        let _ = command("losetup").arg("--detach").arg(&self.device).output();
        // An old state of a filesystem would be taken for a device of the next that is looked at.
        for _ in 0..DETACH_WAITS_MAX {
            if !self.is_attached() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A filesystem that the kernel has mounted in a directory of its own; unmounted when dropped.
#[derive(Debug)]
pub struct KernelMount {
    directory: Option<TempDir>,
    path: PathBuf,
    // After the directory's: dropped once unmounted.
    _devices: Vec<LoopDevice>,
}

impl KernelMount {
    /// Mounts an image file, with further options such as `compress=zstd`, or none.
    ///
    /// # Panics
    /// With the kernel's words, if it cannot be mounted.
    pub fn read_write(image: &Path, options: &str) -> Self {
        Self::mount(&[image.to_owned()], options, false)
            .unwrap_or_else(|why| panic!("mount {}: {why}", image.display()))
    }

    /// Mounts an image file read-only.
    ///
    /// # Panics
    /// As [`Self::read_write`].
    pub fn read_only(image: &Path, options: &str) -> Self {
        Self::mount(&[image.to_owned()], options, true)
            .unwrap_or_else(|why| panic!("mount {}: {why}", image.display()))
    }

    /// Mounts a filesystem over several image files.
    ///
    /// # Errors
    /// What mount said.
    pub fn mount(images: &[PathBuf], options: &str, read_only: bool) -> Result<Self, String> {
        // A log can only be replayed onto a device that is writable.
        let devices: Vec<LoopDevice> =
            images.iter().map(|image| LoopDevice::attach(image, false)).collect();
        let directory = tempfile::Builder::new()
            .prefix("ubtrfs-mount-")
            .tempdir()
            .expect("a temporary directory can be made");
        let path = directory.path().to_owned();
        let mut all = vec![if read_only { "ro" } else { "rw" }.to_owned()];
        if !options.is_empty() {
            all.push(options.to_owned());
        }
        if devices.len() > 1 {
            for device in &devices {
                run("btrfs", ["device".as_ref(), "scan".as_ref(), device.path().as_os_str()]);
                all.push(format!("device={}", device.path().display()));
            }
        }
        let output = command("mount")
            .args(["-t", "btrfs", "-o", &all.join(",")])
            .arg(devices[0].path())
            .arg(&path)
            .output()
            .expect("mount can be started");
        if !output.status.success() {
            return Err(format!(
                "{} -o {}: {}",
                path.display(),
                all.join(","),
                transcript(&output)
            ));
        }
        Ok(Self { directory: Some(directory), path, _devices: devices })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it, and waits until everything is on the image.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn unmount(mut self) {
        self.end().expect("the filesystem is unmounted");
    }

    fn end(&mut self) -> Result<(), String> {
        let Some(directory) = self.directory.take() else { return Ok(()) };
        let mut last = String::new();
        for _ in 0..50 {
            let output = command("umount").arg(&self.path).output().expect("umount can be started");
            if output.status.success() {
                let _ = directory.close();
                return Ok(());
            }
            last = transcript(&output);
            std::thread::sleep(Duration::from_millis(100));
        }
        // Out of the tree at least; the kernel ends it with its last user.
        let _ = command("umount").arg("--lazy").arg(&self.path).output();
        // Not removed: what could not be unmounted must not be deleted by name.
        let _ = directory.keep();
        Err(last)
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if let Err(why) = self.end()
            && !std::thread::panicking()
        {
            panic!("umount {}: {why}", self.path.display());
        }
    }
}
