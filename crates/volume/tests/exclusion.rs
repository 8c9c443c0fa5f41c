//! Nobody else may write what is open here, and nothing is opened that somebody else writes.

mod common;

use std::path::Path;

use common::{LoopDevice, Mount, judge_kernel_mount, mkfs, run, run_with};
use ubtrfs_volume::{Device, Error, FileDevice, OpenMode, Result, Volume, VolumeOptions, Window};

fn open(path: &Path, mode: OpenMode) -> Result<FileDevice> {
    FileDevice::open(path, mode, Window::Whole)
}

fn assert_mounted_on(point: &Path, result: Result<FileDevice>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::MountedByKernel { .. }), "{error}");
    assert!(error.to_string().contains(point.to_str().unwrap()), "{error}");
}

#[test]
fn open_twice_readers_share_and_writers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let writer = open(&path, OpenMode::CreateNew { len_bytes: 1 << 20 }).unwrap();
    for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
        let error = open(&path, mode).unwrap_err();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        let expect = format!("process {} (", std::process::id());
        assert!(error.to_string().contains(&expect), "{error}");
    }
    drop(writer);
    let readers = [open(&path, OpenMode::ReadOnly), open(&path, OpenMode::ReadOnly)];
    assert!(readers.iter().all(Result::is_ok));
    assert!(matches!(open(&path, OpenMode::ReadWrite), Err(Error::Busy { .. })));
    drop(readers);
    open(&path, OpenMode::ReadWrite).unwrap();
}

/// The holder was looked up in a table of which the kernel gives out one page at a time; where other
/// locks came and went in between, the line that was looked for could be passed over, and the
/// message said "another program".
#[test]
fn open_of_a_busy_image_names_the_holder_while_other_locks_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let _writer = open(&path, OpenMode::CreateNew { len_bytes: 1 << 20 }).unwrap();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (dir, is_done) = (dir.path(), &is_done);
            scope.spawn(move || {
                let files: Vec<_> = (0..100)
                    .map(|number| std::fs::File::create(dir.join(format!("{thread}-{number}"))))
                    .collect::<Result<_, _>>()
                    .unwrap();
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    files.iter().for_each(|file| file.lock().unwrap());
                    files.iter().for_each(|file| file.unlock().unwrap());
                }
            });
        }
        let expect = format!("process {} (", std::process::id());
        let missed: Vec<String> = (0..2000)
            .map(|_| open(&path, OpenMode::ReadOnly).unwrap_err().to_string())
            .filter(|error| !error.contains(&expect))
            .collect();
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(missed.is_empty(), "{} times: {}", missed.len(), missed[0]);
    });
}

/// Starting a program copies the open files into the new process for a moment. The lock must end
/// with the device all the same, not with that moment.
#[test]
fn open_after_close_while_programs_start_is_never_busy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    drop(open(&path, OpenMode::CreateNew { len_bytes: 1 << 20 }).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    std::process::Command::new("true").status().unwrap();
                }
            });
        }
        for _ in 0..20_000 {
            drop(open(&path, OpenMode::ReadWrite).unwrap());
        }
    });
}

#[test]
fn create_new_over_a_file_is_refused_and_leaves_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, b"precious").unwrap();
    assert!(open(&path, OpenMode::CreateNew { len_bytes: 1 << 20 }).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn open_of_what_is_no_image_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    run("mkfifo", &[fifo.to_str().unwrap()]);
    for path in ["/", "/dev/null", "/nonexistent", fifo.to_str().unwrap()] {
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let error = open(Path::new(path), mode).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error}");
            assert!(error.to_string().starts_with(path), "{error}");
        }
    }
}

#[test]
fn open_of_an_image_that_the_kernel_mounted_is_refused_by_name() {
    if !judge_kernel_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = mkfs(dir.path(), 1, &[]).unwrap().remove(0);
    let mount = Mount::new("loop", &image, dir.path().join("a mount"));
    assert_mounted_on(&mount.point, open(&image, OpenMode::ReadWrite));
    assert_mounted_on(&mount.point, open(&image, OpenMode::ReadOnly));
    drop(mount);
    open(&image, OpenMode::ReadWrite).unwrap();

    let mount = Mount::new("loop,ro", &image, dir.path().join("ro"));
    open(&image, OpenMode::ReadOnly).unwrap();
    assert_mounted_on(&mount.point, open(&image, OpenMode::ReadWrite));
}

/// The name that the kernel was told need not be the one by which the image is opened.
#[test]
fn open_of_an_image_that_the_kernel_mounted_by_another_name_is_refused() {
    if !judge_kernel_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = mkfs(dir.path(), 1, &[]).unwrap().remove(0);
    let [hard, symbolic, space] = ["hard", "symbolic", "a \\ b"].map(|name| dir.path().join(name));
    for link in [&hard, &space] {
        std::fs::hard_link(&image, link).unwrap();
    }
    std::os::unix::fs::symlink(&hard, &symbolic).unwrap();
    for name in [&hard, &symbolic, &space] {
        let mount = Mount::new("loop", name, dir.path().join("mount"));
        for path in [&image, name] {
            for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
                assert_mounted_on(&mount.point, open(path, mode));
            }
        }
        drop(mount);
        open(&image, OpenMode::ReadWrite).unwrap();
    }
}

/// A name that is no text was passed over.
#[test]
fn open_of_an_image_whose_name_is_no_text_is_refused_where_the_kernel_mounted_it() {
    use std::os::unix::ffi::OsStrExt;
    if !judge_kernel_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join(std::ffi::OsStr::from_bytes(b"image\xff"));
    std::fs::rename(mkfs(dir.path(), 1, &[]).unwrap().remove(0), &image).unwrap();
    let output = std::process::Command::new("losetup").args(["-f", "--show"]).arg(&image).output();
    let name = String::from_utf8(output.unwrap().stdout).unwrap();
    let device = LoopDevice { path: name.trim_end().into() };
    let mount = Mount::new("rw", &device.path, dir.path().join("mount"));
    assert_mounted_on(&mount.point, open(&image, OpenMode::ReadWrite));
}

#[test]
fn open_of_any_device_of_a_mounted_filesystem_is_refused() {
    if !judge_kernel_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = mkfs(dir.path(), 2, &["-m", "raid1", "-d", "raid1"]).unwrap();
    let loops: Vec<LoopDevice> = images.iter().map(|image| LoopDevice::new(image, &[])).collect();
    let options = format!("device={},device={}", loops[0].path.display(), loops[1].path.display());
    let mount = Mount::new(&options, &loops[0].path, dir.path().join("mnt"));
    for path in images.iter().chain(loops.iter().map(|device| &device.path)) {
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            assert_mounted_on(&mount.point, open(path, mode));
        }
    }
    drop(mount);
    for device in &loops {
        let device = open(&device.path, OpenMode::ReadWrite).unwrap();
        assert_eq!(device.len_bytes(), 512 << 20);
        assert!(device.is_block_device());
        assert!(device.resize(1 << 20).is_err());
    }
    run("btrfs", &["device", "scan", "--forget"]);
}

#[test]
fn open_of_the_partition_beside_the_mounted_one_is_allowed() {
    if !judge_kernel_mount() || !common::judge(&["sfdisk", "partx"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let table = "label: gpt\nstart=2048, size=400000\nstart=409600, size=400000\n";
    run_with("sfdisk", &["-q", image.to_str().unwrap()], table);
    let disk = LoopDevice::new(&image, &[]);
    run("partx", &["-u", disk.path.to_str().unwrap()]);
    let partition = Path::new(&format!("{}p1", disk.path.display())).to_owned();
    run("mkfs.btrfs", &["-q", partition.to_str().unwrap()]);
    let mount = Mount::new("rw", &partition, dir.path().join("mnt"));
    for path in [&image, &disk.path] {
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let open = |window| FileDevice::open(path, mode, window);
            assert_mounted_on(&mount.point, open(Window::Partition(1)));
            let offset = Window::Offset { start_bytes: 2048 * 512, len_bytes: None };
            assert_mounted_on(&mount.point, open(offset));
            if path == &image || mode == OpenMode::ReadOnly {
                assert_eq!(open(Window::Partition(2)).unwrap().len_bytes(), 400000 * 512);
            }
        }
    }
    drop(mount);
    // They would stay when the image is detached, for the next one on that device.
    run("partx", &["--delete", disk.path.to_str().unwrap()]);
}

/// `umount` of a mount through FUSE returns while its server still writes, and the kernel was then let mount the image: both wrote to
/// the same free space, as a loop device is kept out by no lock, and only the next superblock told.
#[test]
fn write_to_an_image_that_the_kernel_mounted_meanwhile_is_refused() {
    if !judge_kernel_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = mkfs(dir.path(), 1, &[]).unwrap();
    let devices = common::open_devices(&images, OpenMode::ReadWrite);
    let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let at = volume.chunks().first().unwrap().start;
    let mut bytes = vec![0; 4096];
    volume.read(at, &mut bytes, &|_| Ok(())).unwrap();
    volume.write(at, &bytes).unwrap();
    let mount = Mount::new("loop", &images[0], dir.path().join("mount"));
    // It looks now and again only.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let refused = [
        volume.write(at, &bytes),
        volume.discard(at, 4096),
        volume.write_superblocks(&volume.superblock()),
    ];
    for result in refused {
        assert!(matches!(result, Err(Error::MountedByKernel { .. })), "{result:?}");
    }
    drop(mount);
    let written = volume.write(at, &bytes);
    assert!(written.is_ok(), "{written:?}");
}
