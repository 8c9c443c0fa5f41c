//! Where files of a mount end for the kernel, when what makes them longer fails, or waits.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::place::Place;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;
use ubtrfs_testkit::{KernelMount, Oracle, oracle};

const OLD: usize = 1000;

fn opened(path: &Path, flags: OFlags) -> File {
    let flags = i32::try_from(flags.bits()).unwrap();
    File::options().read(true).write(true).custom_flags(flags).open(path).unwrap()
}

/// A file of so many letters, which the kernel has in memory.
fn cached(place: &Place, name: &str, len: usize) -> PathBuf {
    let path = place.directory.join(name);
    fs::write(&path, vec![b'a'; len]).unwrap();
    // Of what was written before it was read the kernel has nothing whole.
    assert_eq!(fs::read(&path).unwrap().len(), len);
    path
}

fn assert_stored(place: &Place, name: &str, expected: &[u8]) {
    let stored = place.done(&["cat"], &[&place.image, &Path::new("/").join(name)]);
    assert!(stored.as_bytes() == expected, "{name}: {} bytes", stored.len());
}

fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

/// The kernel was told that the file had grown before it did, and appended behind the gap.
#[test]
fn append_goes_to_the_end_after_a_change_that_was_refused() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let mut expected = vec![b'a'; OLD];
    expected.extend(b"end");
    for name in ["truncate", "allocate"] {
        let path = cached(&place, name, OLD);
        let mut file = opened(&path, OFlags::APPEND);
        let refused = match name {
            "truncate" => {
                let status = Command::new("chattr").arg("+a").arg(&path).status().unwrap();
                assert!(status.success());
                errno(&file.set_len(5000).unwrap_err())
            }
            _ => fallocate(&file, FallocateFlags::empty(), 0, 10 << 30).err(),
        };
        assert!(matches!(refused, Some(Errno::PERM | Errno::NOSPC)), "{name}: {refused:?}");
        file.write_all(b"end").unwrap();
        drop(file);
        assert!(fs::read(&path).unwrap() == expected, "{name}");
    }
    place.umount();
    for name in ["truncate", "allocate"] {
        assert_stored(&place, name, &expected);
    }
    place.assert_clean();
}

/// The kernel cut the file off where it believed it to end, which was too far.
#[test]
fn direct_write_behind_the_end_that_fails_leaves_the_file_as_long_as_it_was() {
    for len in [OLD, 3000] {
        let Some(place) = Place::new(true) else { return };
        File::create(&place.image).unwrap().set_len(160 << 20).unwrap();
        place.done(&["mkfs", "-f"], &[&place.image]);
        place.mount(&[]);
        let stored = |name: &str, bytes: &[u8]| {
            let path = place.directory.join(name);
            fs::write(&path, bytes).unwrap();
            File::open(&path).unwrap().sync_all().unwrap();
            path
        };
        stored("file", &vec![b'a'; len]);
        let small = stored("small", &[b's'; 64 << 10]);
        let path = cached(&place, "file", len);
        let mut filler = File::create(place.directory.join("filler")).unwrap();
        for len in [1 << 20, 4096] {
            while filler.write_all(&vec![b'f'; len]).is_ok() {}
            filler.sync_all().unwrap();
        }
        let file = opened(&path, OFlags::DIRECT);
        let write = || file.write_at(&vec![b'b'; 4 << 20], 8192);
        assert_eq!(errno(&write().unwrap_err()), Some(Errno::NOSPC));
        assert_eq!(file.metadata().unwrap().len(), len as u64);
        // Of what has space in part that part is written.
        fs::remove_file(small).unwrap();
        File::open(&place.directory).unwrap().sync_all().unwrap();
        let written = write().unwrap();
        assert!((4096..4 << 20).contains(&written), "{written}");
        assert_eq!(file.metadata().unwrap().len(), 8192 + written as u64);
        drop((file, filler));
        place.umount();
        let mut expected = vec![b'a'; len];
        expected.resize(8192, 0);
        expected.resize(8192 + written, b'b');
        assert_stored(&place, "file", &expected);
        place.assert_clean();
    }
}

/// Each waited for the kernel, which kept the page for the write until that was answered.
#[test]
fn writes_with_gaps_between_them_wait_for_nobody() {
    const COUNT: u64 = 500;
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    fs::write(&path, [b'a'; OLD]).unwrap();
    place.umount();
    // The kernel knows nothing of it, and the server that it has something in it.
    place.mount(&[]);
    let file = opened(&path, OFlags::empty());
    let begun = Instant::now();
    for number in 0..COUNT {
        file.write_at(b"x", 1500 + number * 200).unwrap();
    }
    let lasted = begun.elapsed();
    drop(file);
    let mut expected = vec![0; 1500 + (COUNT as usize - 1) * 200 + 1];
    expected[..OLD].fill(b'a');
    expected[1500..].iter_mut().step_by(200).for_each(|byte| *byte = b'x');
    assert!(fs::read(&path).unwrap() == expected);
    place.umount();
    assert_stored(&place, "file", &expected);
    // It was 20 ms for each.
    assert!(lasted < Duration::from_secs(8), "{lasted:?}");
}

/// What of a page behind the end was stored through a map is gone, though the write into that page does not reach its end.
#[test]
fn what_was_stored_behind_the_end_is_gone_when_small_writes_with_gaps_come() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    for name in ["one", "two"] {
        let script = format!(
            "truncate 4096\nmmap -rw 0 4096\ntruncate 0\npwrite -S 97 0 {OLD}\n\
             mwrite -S 88 {OLD} 3096\nmread -v 3000 16\npwrite -S 98 1500 1\npwrite -S 98 3000 1\n\
             truncate 4096\nmsync -s\nfsync\nquit\n"
        );
        let mut child = Command::new("xfs_io")
            .args(["-f", "-t", name])
            .current_dir(&place.directory)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // Or nothing was behind the end.
        assert!(output.status.success() && said.contains("58 58 58 58"), "{said}");
        let mut expected = vec![0; 4096];
        expected[..OLD].fill(b'a');
        (expected[1500], expected[3000]) = (b'b', b'b');
        assert!(fs::read(place.directory.join(name)).unwrap() == expected, "{name}");
    }
    place.umount();
}

/// What was written over space that the file had already was counted twice until it was stored: `du` showed up to twice the size.
#[test]
fn space_of_what_is_in_memory_is_told_as_the_kernel_does() {
    let Some(place) = Place::new(true) else { return };
    let image = place.image.with_extension("twin");
    fs::copy(&place.image, &image).unwrap();
    place.mount(&["-o", "commit=3600"]);
    let here = blocks_step_by_step(&place.directory);
    place.umount();
    place.assert_clean();
    if oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        let mount = KernelMount::read_write(&image, "commit=3600");
        assert_eq!(here, blocks_step_by_step(mount.path()));
    }
}

fn blocks_step_by_step(directory: &Path) -> Vec<u64> {
    const HOLE: u64 = 4 << 20;
    let path = directory.join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let blocks = || fs::metadata(&path).unwrap().blocks();
    let mut seen = vec![blocks()];
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    seen.push(blocks());
    file.write_all_at(&[1; 300_000], 0).unwrap();
    seen.push(blocks());
    file.write_all_at(&[2; 8192], HOLE).unwrap();
    seen.push(blocks());
    file.sync_all().unwrap();
    seen.push(blocks());
    // Over data, over what was allocated, and behind the end.
    for (offset, len) in [(10_000, 50_000), (500_000, 10_000), (HOLE + 8192, 5000)] {
        file.write_all_at(&vec![3; len], offset).unwrap();
        seen.push(blocks());
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, flags, HOLE + 4096, 8192).unwrap();
    seen.push(blocks());
    file.set_len(20_000).unwrap();
    seen.push(blocks());
    seen
}
