//! Nobody else may write what is open here, and nothing is opened that somebody else writes.

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use common::{LoopDevice, Mount, judge_kernel_mount, mkfs, run, run_with};
use ubtrfs_ondisk::{DeviceId, LogicalAddr};
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

/// On a btrfs of the kernel's stat(2) tells of a file in a subvolume another device than the table of locks does, and the holder was not found.
#[test]
fn holder_of_an_image_in_a_subvolume_is_found() {
    if !judge_kernel_mount() || !common::judge(&["btrfs", "flock"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let outer = mkfs(dir.path(), 1, &[]).unwrap().remove(0);
    let mount = Mount::new("loop", &outer, dir.path().join("mount"));
    let subvolume = mount.point.join("subvolume");
    run("btrfs", &["subvolume", "create", subvolume.to_str().unwrap()]);
    let image = subvolume.join("image");
    std::fs::write(&image, b"").unwrap();
    assert_eq!(ubtrfs_volume::lock_holder(&image), None);
    let mut flock = std::process::Command::new("flock");
    flock.env("PATH", common::PATH).arg(&image).args(["sh", "-c", "echo locked; exec cat"]);
    flock.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut locker = flock.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(locker.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "locked\n");
    assert_eq!(ubtrfs_volume::lock_holder(&image), Some(locker.id()));
    let refused = open(&image, OpenMode::ReadWrite).unwrap_err().to_string();
    assert!(refused.contains(&format!("process {} (flock)", locker.id())), "{refused}");
    drop(locker.stdin.take());
    assert!(locker.wait().unwrap().success());
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
    // Whoever looks through all devices just now, as other judges do, has them open for a moment.
    let deletes = || {
        let status = std::process::Command::new("partx")
            .env("PATH", common::PATH)
            .arg("--delete")
            .arg(&disk.path)
            .status();
        pause();
        status.unwrap().success()
    };
    assert!((0..50).any(|_| deletes()));
}

/// The volume of an image that is opened for writing, and a place in it.
fn open_volume(images: &[PathBuf]) -> (Volume, LogicalAddr, Vec<u8>) {
    let devices = common::open_devices(images, OpenMode::ReadWrite);
    let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let at = volume.chunks().first().unwrap().start;
    let mut bytes = vec![0; 4096];
    volume.read(at, &mut bytes, &|_| Ok(())).unwrap();
    (volume, at, bytes)
}

/// It looks now and again only.
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(100));
}

/// `umount` of a mount through FUSE returns while its server still writes, and the kernel was then let mount the image: both wrote to
/// the same free space, as a loop device is kept out by no lock, and only the next superblock told.
#[test]
fn write_to_an_image_that_the_kernel_mounted_meanwhile_is_refused() {
    if !judge_kernel_mount() {
        return;
    }
    for options in ["loop", "loop,ro"] {
        let dir = tempfile::tempdir().unwrap();
        let images = mkfs(dir.path(), 1, &[]).unwrap();
        let (volume, at, bytes) = open_volume(&images);
        volume.write(at, &bytes).unwrap();
        let mount = Mount::new(options, &images[0], dir.path().join("mount"));
        pause();
        let refused = [
            volume.write(at, &bytes),
            volume.discard(at, 4096),
            volume.write_superblocks(&volume.superblock()),
        ];
        for result in refused {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::MountedByKernel { .. }), "{options}: {error}");
        }
        drop(mount);
        let written = volume.write(at, &bytes);
        match options {
            // It wrote nothing.
            "loop,ro" => written.unwrap(),
            _ => {
                let error = written.unwrap_err();
                assert!(matches!(error, Error::SuperblockChanged { .. }), "{error}");
                drop(volume);
                let (volume, at, bytes) = open_volume(&images);
                volume.write(at, &bytes).unwrap();
                volume.write_superblocks(&volume.superblock()).unwrap();
            }
        }
    }
}

/// Only who has an image mounted now was looked for: what the kernel had written and committed by then was written over, and the
/// superblock, which was compared when all else was written, told of it too late.
#[test]
fn write_to_an_image_that_the_kernel_wrote_to_meanwhile_is_refused_and_writes_nothing() {
    if !judge_kernel_mount() {
        return;
    }
    type Change = fn(&Volume, LogicalAddr) -> Result<()>;
    let changes: [(&str, Change); 5] = [
        ("write", |volume, at| volume.write(at, &[0x5a; 4096])),
        ("discard", |volume, at| volume.discard(at, 4096)),
        ("resize", |volume, _| volume.resize_device(DeviceId(1), 600 << 20)),
        ("look", |volume, _| volume.check_ours()),
        ("superblocks", |volume, _| volume.write_superblocks(&volume.superblock())),
    ];
    for count in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let images = mkfs(dir.path(), count, &["-m", ["dup", "raid1"][count - 1]]).unwrap();
        for (name, change) in changes {
            let (volume, at, _) = open_volume(&images);
            let loops: Vec<LoopDevice> =
                images.iter().map(|image| LoopDevice::new(image, &[])).collect();
            for device in &loops {
                run("btrfs", &["device", "scan", device.path.to_str().unwrap()]);
            }
            let mount = Mount::new("rw", &loops[0].path, dir.path().join("mount"));
            std::fs::write(mount.point.join(name), name).unwrap();
            drop(mount);
            for device in &loops {
                run("btrfs", &["device", "scan", "--forget", device.path.to_str().unwrap()]);
            }
            drop(loops);
            pause();
            // Whatever is done to a file moves its times.
            let state_of = |image: &PathBuf| {
                let metadata = std::fs::metadata(image).unwrap();
                (metadata.len(), metadata.modified().unwrap(), metadata.ctime_nsec())
            };
            let states = || images.iter().map(state_of).collect::<Vec<_>>();
            let before = states();
            for _ in 0..2 {
                let error = change(&volume, at).unwrap_err();
                let is_told = matches!(error, Error::SuperblockChanged { has_written: false, .. });
                assert!(is_told, "{count} devices, {name}: {error}");
                assert_eq!(states(), before, "{count} devices, {name}");
            }
            // What was refused once is not taken for want of a look.
            assert!(volume.write(at, &[0; 4096]).is_err());
            assert_eq!(states(), before, "{count} devices, {name}");
        }
    }
}

/// Where something was written since the last look, nobody knows what it lies over.
#[test]
fn write_after_another_wrote_tells_whether_something_may_be_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    for has_written in [false, true] {
        let (volume, at, bytes) = open_volume(&images);
        volume.write(at, &bytes).unwrap();
        if !has_written {
            volume.check_ours().unwrap();
        }
        // As the kernel does, past all that is locked.
        let image = std::fs::File::options().read(true).write(true).open(&images[0]).unwrap();
        let mut superblock = vec![0; 4096];
        image.read_exact_at(&mut superblock, 64 << 10).unwrap();
        image.write_all_at(&[0; 4096], 64 << 10).unwrap();
        pause();
        let error = volume.write(at, &bytes).unwrap_err();
        let text = error.to_string();
        match error {
            Error::SuperblockChanged { have: None, has_written: told, .. } => {
                assert_eq!(told, has_written, "{text}");
            }
            _ => panic!("{text}"),
        }
        assert_eq!(text.contains("nothing was written over that"), !has_written, "{text}");
        assert_eq!(text.contains("may lie over that"), has_written, "{text}");
        // It is not to be trusted any more, though it is as it was.
        image.write_all_at(&superblock, 64 << 10).unwrap();
        pause();
        assert!(matches!(volume.write(at, &bytes), Err(Error::SuperblockChanged { .. })));
    }
}

/// Threads that write while others write the superblocks take none of these for somebody else's.
#[test]
fn writes_beside_superblocks_of_the_same_volume_are_not_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let (volume, at, bytes) = open_volume(&images);
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while begun.elapsed().as_secs() < 2 {
                    volume.write(at, &bytes).unwrap();
                    volume.check_ours().unwrap();
                }
            });
        }
        let mut superblock = volume.superblock();
        while begun.elapsed().as_secs() < 2 {
            superblock.generation += 1;
            volume.write_superblocks(&superblock).unwrap();
        }
    });
}
