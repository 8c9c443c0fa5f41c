use tempfile::tempdir;
use ubtrfs_engine::OpenOptions;
use ubtrfs_rt::{Arc, Executor, Runtime};
use ubtrfs_testkit::odd::odd_files;
use ubtrfs_testkit::{Compare, KernelMount, MkfsBtrfs, Oracle, TreeSnapshot, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use super::*;
use crate::model::{Model, seen, to_model};
use crate::sink::tree::TreeOptions;
use crate::source::tar::TarSource;

fn open(image: &Path, executor: Executor) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
    let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device)];
    let volume = Volume::open(devices, &VolumeOptions { read_only: true, ..Default::default() });
    let runtime = Arc::new(Runtime { executor, ..Runtime::system() });
    let options = OpenOptions { read_only: true, runtime, ..OpenOptions::default() };
    Filesystem::open(volume.unwrap(), options).unwrap()
}

/// An image that the kernel filled with odd files, in a subvolume of it.
fn kernel_image(directory: &Path, mount_options: &str) -> (std::path::PathBuf, TreeSnapshot) {
    let image = directory.join("image");
    MkfsBtrfs::new().size_bytes(512 << 20).make(&image);
    let mount = KernelMount::read_write(&image, mount_options);
    let files = mount.path().join("files");
    std::fs::create_dir(&files).unwrap();
    odd_files(&files, 3);
    let seen = seen(&files);
    mount.unmount();
    (image, seen)
}

#[test]
fn export_kernel_image_equal_to_mount() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::MkfsBtrfs, Oracle::Root]) {
        return;
    }
    for mount_options in ["compress=zstd", "noatime"] {
        let dir = tempdir().unwrap();
        let (image, before) = kernel_image(dir.path(), mount_options);
        for executor in [Executor::Inline, Executor::Threads(3)] {
            let filesystem = open(&image, executor);
            let from = filesystem.resolve(filesystem.top_level(), b"files").unwrap();
            // On a filesystem of the same kind, which holds all that the image can.
            let target = dir.path().join("target");
            MkfsBtrfs::new().size_bytes(512 << 20).make(&target);
            let mount = KernelMount::read_write(&target, "");
            let directory = mount.path().join("new");
            let mut warnings = Vec::new();
            to_directory(&filesystem, from, &directory, Existing::Refuse, &mut warnings).unwrap();
            assert_eq!(warnings, []);
            seen(&directory).assert_same(&before, &Compare::copied());
            mount.unmount();

            let (summary, bytes) =
                to_tar(&filesystem, from, Vec::new(), Compression::Zstd, &mut warnings).unwrap();
            assert_eq!(summary.skipped, 1, "the socket");
            let source = TarSource::new(Box::new(std::io::Cursor::new(bytes)), 4096, executor);
            let (model, ..) =
                to_model(source.unwrap(), Model::new(), TreeOptions::default(), executor).unwrap();
            let mut before = before.clone();
            before.entries.remove(&b"special/socket"[..]);
            model.snapshot().assert_same(&before, &Compare::copied());
            warnings.clear();
        }
    }
}
