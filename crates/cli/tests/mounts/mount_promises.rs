//! What a mount promises where others than its programs have a hand in it: commands at it, who unmounts it, a medium that fails, a server
//! that is gone.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::place::{Memory, PATIENCE, Place, assert_image_clean, wait_until};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use ubtrfs_testkit::{KernelMount, LoopDevice};

fn run(program: &str, words: &[&str], path: &Path) {
    let output = Command::new(program).args(words).arg(path).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

fn opened_to_append(path: &Path, flags: OFlags) -> File {
    let flags = i32::try_from(flags.bits()).unwrap();
    File::options().append(true).create(true).custom_flags(flags).open(path).unwrap()
}

/// It committed the trees, and left what files had in the server's memory.
#[test]
fn sync_by_command_makes_durable_what_files_have() {
    for options in ["commit=3600", "commit=3600,writeback"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let mut file = File::create(place.directory.join("file")).unwrap();
        file.write_all(&[b'x'; 300_000]).unwrap();
        place.done(&["filesystem", "sync"], &[&place.directory]);
        place.cut_off();
        drop(file);
        let bytes = place.done(&["cat"], &[&place.image, Path::new("/file")]);
        assert!(bytes.len() == 300_000 && bytes.bytes().all(|byte| byte == b'x'), "{options}");
        place.assert_clean();
    }
}

/// What was written could not be stored, and the one who syncs all is told, as is the one who has the file open. It was answered that
/// all was well as long as the file stayed open.
#[test]
fn lost_data_is_told_to_who_syncs_or_unmounts_and_to_who_has_the_file_open() {
    for by in [&["filesystem", "sync"][..], &["umount"]] {
        let Some(mut place) = Place::new(true) else { return };
        let memory = Memory::with_image(&mut place, "100M");
        place.mount(&["-o", "commit=3600,cache=8M"]);
        let mut file = File::create(place.directory.join("file")).unwrap();
        file.write_all(b"before").unwrap();
        file.sync_all().unwrap();
        memory.lose(&mut file);
        // Closed for those who unmount; the server has it open all the same.
        let kept = (by != ["umount"]).then_some(file);
        let output = place.run(by, &[&place.directory]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("No space left"), "{by:?}: {said}");
        assert!(place.is_mounted());
        if let Some(file) = kept {
            assert!(file.sync_all().is_err());
            file.sync_all().unwrap();
        }
        // Told once.
        place.done(&["filesystem", "sync"], &[&place.directory]);
        place.umount();
        place.assert_clean();
        // The directory of both goes behind it.
        drop(memory);
    }
}

#[test]
fn mount_that_nobody_serves_is_unmounted() {
    for is_root in [true, false] {
        for by_relative_name in [false, true] {
            let Some(place) = Place::new(is_root) else { return };
            place.mount(&[]);
            place.kill();
            assert!(place.is_mounted());
            if by_relative_name {
                let mut command = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
                let name = place.directory.file_name().unwrap();
                let parent = place.directory.parent().unwrap();
                let output = command.arg("umount").arg(name).current_dir(parent).output().unwrap();
                assert!(output.status.success(), "{output:?}");
            } else {
                place.umount();
            }
            assert!(!place.is_mounted());
        }
    }
}

/// Ends those who look at it, also where an assertion fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// umount(8) returned while the process that serves still had the device, and might write to it.
#[test]
fn block_device_is_free_when_it_is_unmounted() {
    let Some(mut place) = Place::new(true) else { return };
    let device = LoopDevice::attach(&place.image, false);
    let image = std::mem::replace(&mut place.image, device.path().to_owned());
    for round in 0..5 {
        place.mount(&["-o", "commit=1"]);
        fs::write(place.directory.join(format!("file {round}")), vec![7; 1 << 20]).unwrap();
        // Work for the background.
        place.done(&["subvolume", "create"], &[&place.directory, Path::new("/sub")]);
        for number in 0..500 {
            fs::write(place.directory.join(format!("sub/{number}")), [8; 5000]).unwrap();
        }
        place.done(&["subvolume", "delete"], &[&place.directory, Path::new("/sub")]);
        let is_over = AtomicBool::new(false);
        let server = ubtrfs_volume::lock_holder(&place.image).unwrap();
        std::thread::scope(|scope| {
            // Commands all the while.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    place.run(&["touch"], &[&place.directory, Path::new("/touched")]);
                }
            });
            let until_over = SetOnDrop(&is_over);
            std::thread::sleep(Duration::from_millis(50));
            let begun = Instant::now();
            // Busy while a command is at it.
            while !Command::new("umount")
                .arg(&place.directory)
                .stderr(Stdio::null())
                .status()
                .unwrap()
                .success()
            {
                assert!(begun.elapsed() < PATIENCE);
            }
            drop(until_over);
            let file = File::options().read(true).write(true).open(&place.image).unwrap();
            assert_ne!(ubtrfs_volume::lock_holder(&place.image), Some(server), "still in use");
            // udev has a device locked for moments, to see what it has become.
            wait_until("locked", || match file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => {
                    let holder = ubtrfs_volume::lock_holder(&place.image);
                    assert_ne!(holder, Some(server), "the device is still in use");
                    false
                }
                Err(TryLockError::Error(error)) => panic!("{error}"),
            });
        });
        let written = fs::read(&image).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert!(fs::read(&image).unwrap() == written);
        assert_image_clean(&image);
    }
}

/// What the kernel writes back begins with the page, and was refused as it changed what was there.
#[test]
fn what_is_appended_to_append_only_files_is_stored_with_writeback() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "writeback"]);
    let path = place.directory.join("log");
    fs::write(&path, b"begin\n").unwrap();
    run("sync", &[], &path);
    run("chattr", &["+a"], &path);
    let mut expected = b"begin\n".to_vec();
    let mut file = opened_to_append(&path, OFlags::empty());
    for round in 0..5 {
        let line = vec![b'a' + round; 3000];
        file.write_all(&line).unwrap();
        file.sync_all().unwrap();
        expected.extend(line);
    }
    drop(file);
    assert!(File::options().write(true).truncate(true).open(&path).is_err());
    place.umount();
    let stored = place.done(&["cat"], &[&place.image, Path::new("/log")]);
    assert!(stored.as_bytes() == expected);
}

/// The kernel holds back what was appended before, so that only it knows where the file ends.
#[test]
fn direct_append_goes_behind_what_the_kernel_holds_back() {
    for after_commands in [false, true] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", "writeback,commit=3600"]);
        let path = place.directory.join("file");
        let mut cached = opened_to_append(&path, OFlags::empty());
        let mut direct = opened_to_append(&path, OFlags::DIRECT);
        let mut expected = Vec::new();
        for round in 0..4_u8 {
            if after_commands {
                let name = PathBuf::from(format!("/snapshot {round}"));
                place.done(&["subvolume", "snapshot"], &[&place.directory, Path::new("/"), &name]);
            }
            // Whole pages: of a page in which both lie the kernel would bring the first part before.
            for (file, letter, len) in [(&mut cached, b'a', 8192), (&mut direct, b'A', 4096)] {
                let bytes = vec![letter + round; len];
                file.write_all(&bytes).unwrap();
                expected.extend(bytes);
            }
        }
        drop((cached, direct));
        assert!(fs::read(&path).unwrap() == expected);
        place.umount();
        let stored = place.done(&["cat"], &[&place.image, Path::new("/file")]);
        assert!(stored.as_bytes() == expected);
    }
}

/// Each new name comes behind all others, and so was listed, too.
#[test]
fn listing_ends_where_each_name_listed_is_renamed() {
    const COUNT: usize = 4000;
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let directory = place.directory.join("dir");
    fs::create_dir(&directory).unwrap();
    for number in 0..COUNT {
        File::create(directory.join(format!("first {number}"))).unwrap();
    }
    for round in 0..2 {
        let mut count = 0;
        for (number, entry) in fs::read_dir(&directory).unwrap().enumerate() {
            let new = directory.join(format!("renamed {round} {number}"));
            fs::rename(entry.unwrap().path(), new).unwrap();
            count += 1;
            assert!(count <= 3 * COUNT, "it does not end");
        }
        assert!(count >= COUNT, "{count}");
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), COUNT);
    place.umount();
    place.assert_clean();
}

/// The kernel appended where the file had ended, and zeros were between.
#[test]
fn append_goes_to_the_end_that_a_command_gave_the_file() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    // What the kernel has of an append that went elsewhere it forgets soon, and not before the append returns.
    let shows = |expected: &[u8]| wait_until("shown", || fs::read(&path).unwrap() == expected);
    for flags in [OFlags::empty(), OFlags::DIRECT] {
        let _ = fs::remove_file(&path);
        let mut file = opened_to_append(&path, flags);
        file.write_all(&[b'a'; 10_000]).unwrap();
        let at = |size: &str| {
            place.done(&["truncate", "-s", size], &[&place.directory, Path::new("/file")]);
        };
        at("100");
        file.write_all(b"one\n").unwrap();
        file.write_all(b"two\n").unwrap();
        let mut expected = vec![b'a'; 100];
        expected.extend(b"one\ntwo\n");
        shows(&expected);
        assert_eq!(file.metadata().unwrap().len(), 108);
        file.write_all(b"three\n").unwrap();
        expected.extend(b"three\n");
        at("20000");
        let long: Vec<u8> = (0..3_000_000_u32).map(|at| b'A' + (at / 70_000) as u8).collect();
        file.write_all(&long).unwrap();
        expected.resize(20_000, 0);
        expected.extend(long);
        shows(&expected);
        assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
        file.write_all(b"four\n").unwrap();
        expected.extend(b"four\n");
        shows(&expected);
    }
    let expected = fs::read(&path).unwrap();
    place.umount();
    let stored = place.done(&["cat"], &[&place.image, Path::new("/file")]);
    assert!(stored.as_bytes() == expected);
    place.assert_clean();
}

/// The kernel cut the file off where it had ended before the command, once it had to take back what it had appended.
#[test]
fn append_that_fails_takes_nothing_from_what_a_command_gave_the_file() {
    let Some(place) = Place::new(true) else { return };
    File::create(&place.image).unwrap().set_len(160 << 20).unwrap();
    place.done(&["mkfs", "-f"], &[&place.image]);
    place.mount(&[]);
    let path = place.directory.join("file");
    let mut file = opened_to_append(&path, OFlags::DIRECT);
    // Whole blocks, so that it takes no space to make it longer.
    file.write_all(&[b'a'; 8192]).unwrap();
    let mut filler = opened_to_append(&place.directory.join("filler"), OFlags::DIRECT);
    for len in [1 << 20, 4096] {
        while filler.write_all(&vec![b'f'; len]).is_ok() {}
    }
    place.done(&["truncate", "-s", "50000"], &[&place.directory, Path::new("/file")]);
    let refused = file.write(&[b'b'; 3 << 20]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(file.metadata().unwrap().len(), 50_000);
    // What a program wants cut off goes.
    file.set_len(20_000).unwrap();
    let mut expected = vec![b'a'; 8192];
    expected.resize(20_000, 0);
    wait_until("shown", || fs::read(&path).unwrap() == expected);
    drop((file, filler));
    place.umount();
    let stored = place.done(&["cat"], &[&place.image, Path::new("/file")]);
    assert!(stored.as_bytes() == expected);
    place.assert_clean();
}

/// Once a write had found none, the server did not look for them again.
#[test]
fn capabilities_that_a_command_gave_go_with_a_write() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("program");
    let file = File::create(&path).unwrap();
    let has_some = || {
        let getfattr = ["-n", "security.capability", "--absolute-names"];
        Command::new("getfattr").args(getfattr).arg(&path).output().unwrap().status.success()
    };
    for round in 0..4_u64 {
        assert!(!has_some());
        for _ in 0..2 {
            file.write_all_at(b"text", round * 4).unwrap();
        }
        let capability = "0x0100000200200000000000000000000000000000";
        let words = ["setfattr", "-n", "security.capability", "-v", capability];
        place.done(&words, &[&place.directory, Path::new("/program")]);
        // But once not asked whether they are there: the kernel would look, too.
        if round == 3 {
            assert!(has_some());
        }
        match round {
            0 | 3 => file.write_all_at(b"changed", 0).unwrap(),
            1 => file.set_len(3).unwrap(),
            _ => run("fallocate", &["-l", "100000"], &path),
        }
        assert!(!has_some(), "{round}");
    }
}

/// A process that has a file mapped and has stored to it.
struct Mapper(Child);

impl Mapper {
    /// All of a file of so many bytes is this letter, and only the kernel knows: it would write what was stored when anybody closes the file, as does
    /// each process that is started while it is open here.
    fn new(path: &Path, bytes: usize, letter: char) -> Self {
        let mut child = Command::new("stdbuf")
            .args(["-oL", "xfs_io"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let number = u32::from(letter);
        let input = child.stdin.as_mut().unwrap();
        let store = format!("mwrite -S {number} 0 {bytes}\nmread -v {} 16", bytes - 16);
        writeln!(input, "mmap -rw 0 {bytes}\n{store}").unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert!(said.trim_end().ends_with(&letter.to_string().repeat(16)), "{said}");
        Self(child)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What was stored to a map was with the kernel only.
#[test]
fn snapshot_and_sync_have_what_was_stored_to_a_map() {
    const LEN: usize = 100_000;
    for options in ["commit=3600", "commit=3600,writeback"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let path = place.directory.join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(&[b'a'; LEN]).unwrap();
        file.sync_all().unwrap();
        for (round, letter) in ['b', 'c'].into_iter().enumerate() {
            let mapper = Mapper::new(&path, LEN, letter);
            let stored = vec![letter as u8; LEN];
            let name = format!("snapshot{round}");
            let inside = PathBuf::from(format!("/{name}"));
            let words = ["subvolume", "snapshot", "-r"];
            place.done(&words, &[&place.directory, Path::new("/"), &inside]);
            assert!(
                fs::read(place.directory.join(name).join("file")).unwrap() == stored,
                "{options}"
            );
            drop(mapper);
        }
        let mapper = Mapper::new(&path, LEN, 'd');
        place.done(&["filesystem", "sync"], &[&place.directory]);
        place.cut_off();
        drop((mapper, file));
        let bytes = place.done(&["cat"], &[&place.image, Path::new("/file")]);
        assert!(bytes.as_bytes() == [b'd'; LEN], "{options}");
        place.assert_clean();
    }
}

/// What was stored to a map is in a copy that a command makes, and does not come back over what a command has cut off.
#[test]
fn commands_that_change_files_come_behind_what_was_stored_to_a_map() {
    const LEN: usize = 100_000;
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    fs::write(&path, [b'a'; LEN]).unwrap();
    let mapper = Mapper::new(&path, LEN, 'b');
    place.done(&["reflink"], &[&place.directory, Path::new("/file"), Path::new("/copy")]);
    assert!(fs::read(place.directory.join("copy")).unwrap() == [b'b'; LEN]);
    drop(mapper);
    let mapper = Mapper::new(&path, LEN, 'c');
    place.done(&["truncate", "-s", "5000"], &[&place.directory, Path::new("/file")]);
    drop(mapper);
    assert!(fs::read(&path).unwrap() == [b'c'; 5000]);
    place.umount();
    let bytes = place.done(&["cat"], &[&place.image, Path::new("/file")]);
    assert!(bytes.as_bytes() == [b'c'; 5000]);
    place.assert_clean();
}

/// A hole was told where only the kernel had what was stored to a map, and who copied the file left that out.
#[test]
fn what_was_stored_to_a_map_over_a_hole_is_found_as_data() {
    const LEN: u64 = 300_000;
    const STORED: u64 = 25 * 4096;
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=3600"]);
    let sought = [
        (SeekFrom::Data(0), Ok(0)),
        (SeekFrom::Hole(0), Ok(STORED)),
        // What is a hole stays one, though the kernel may have read it.
        (SeekFrom::Data(STORED), Err(Errno::NXIO)),
        (SeekFrom::Hole(STORED), Ok(STORED)),
    ];
    for (number, (place_sought, expected)) in sought.into_iter().enumerate() {
        let path = place.directory.join(format!("file {number}"));
        let file = File::create(&path).unwrap();
        file.set_len(LEN).unwrap();
        // Two holes, with data between.
        file.write_all_at(&[b'a'; 4096], 8 * 4096).unwrap();
        drop(file);
        let mapper = Mapper::new(&path, 25 * 4096, 'b');
        let file = File::open(&path).unwrap();
        assert_eq!(rustix::fs::seek(&file, place_sought), expected, "{place_sought:?}");
        drop((file, mapper));
    }
    place.umount();
    place.assert_clean();
}

/// A program that maps a file may store behind its end, and what was there became data when the file grew: the kernel leaves that to the
/// server.
#[test]
fn what_was_stored_behind_the_end_is_not_there_when_the_file_grows() {
    const OLD: usize = 1024;
    let grown = [
        ("write behind", "pwrite -S 98 32768 4096"),
        ("write in the page", "pwrite -S 98 4000 96"),
        ("truncate", "truncate 10000"),
        ("allocate", "falloc 8192 4096"),
        ("copy", "copy_range -s 0 -d 8192 -l 4096 source"),
        ("direct", "open -d direct\npwrite -S 98 8192 4096"),
    ];
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    fs::write(place.directory.join("source"), [b's'; 4096]).unwrap();
    // Once more when it is in order: the first one may have been told nothing of the file.
    for round in 0..2 {
        for (name, grow) in grown {
            let path = place.directory.join(name);
            let script = format!(
                "truncate 4096\nmmap -rw 0 4096\ntruncate 0\npwrite -S 97 0 {OLD}\n\
                 mwrite -S 88 {OLD} 3072\nmread -v 2000 16\n{grow}\nmsync -s\nfsync\nquit\n"
            );
            let mut child = Command::new("xfs_io")
                .args(["-f", "-t", name])
                .current_dir(&place.directory)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            // It ends well whether or not it could store that.
            assert!(output.status.success() && said.contains("58 58 58 58"), "{name}: {said}");
            let bytes = fs::read(&path).unwrap();
            assert!(bytes.len() >= 4096 && bytes[..OLD] == [b'a'; OLD], "{name}: {}", bytes.len());
            assert!(!bytes.contains(&b'X'), "{name}, round {round}");
        }
    }
    let expected = grown.map(|(name, _)| fs::read(place.directory.join(name)).unwrap());
    place.umount();
    for ((name, _), expected) in grown.iter().zip(expected) {
        let stored = place.done(&["cat"], &[&place.image, &Path::new("/").join(name)]);
        assert!(stored.as_bytes() == expected, "{name}");
    }
}

/// What was mounted inside of the mount was taken off by any command that changed a name.
#[test]
fn commands_take_nothing_off_that_is_mounted_inside() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let inside = place.directory.join("dir/inside");
    fs::create_dir_all(&inside).unwrap();
    run("mount", &["-t", "tmpfs", "none"], &inside);
    fs::write(inside.join("file"), b"in memory").unwrap();
    let top = &place.directory;
    // That there is none the kernel remembers, too.
    assert!(!top.join("made").exists());
    place.done(&["mkdir"], &[top, Path::new("/made")]);
    assert!(top.join("made").is_dir());
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    place.done(&["subvolume", "snapshot"], &[top, Path::new("/sub"), Path::new("/dir/snapshot")]);
    assert!(top.join("dir/snapshot").is_dir());
    assert_eq!(fs::read(inside.join("file")).unwrap(), b"in memory");
    // What is taken away is gone, and may be made again.
    place.done(&["subvolume", "delete"], &[top, Path::new("/sub")]);
    assert!(!top.join("sub").exists());
    fs::create_dir(top.join("sub")).unwrap();
    assert_eq!(fs::read(inside.join("file")).unwrap(), b"in memory");
    run("umount", &[], &inside);
    place.umount();
    place.assert_clean();
}

/// Who closes a file or subvolume to changes does not lose what was stored to maps of it before. Through a map that was made after that
/// a file was changed.
#[test]
fn what_was_stored_to_a_map_is_kept_where_changes_are_forbidden_then() {
    const LEN: usize = 50_000;
    for options in ["commit=3600", "commit=3600,writeback"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let top = &place.directory;
        for name in ["sub", "other"] {
            place.done(&["subvolume", "create"], &[top, &Path::new("/").join(name)]);
        }
        // With writeback the kernel would say yet when it was stored, which the subvolume does not take any more.
        let by_ioctl = (!options.contains("writeback")).then_some("other/file");
        let names = ["immutable", "append", "sub/file"].into_iter().chain(by_ioctl);
        for name in names.clone() {
            let path = top.join(name);
            fs::write(&path, [b'a'; LEN]).unwrap();
            let mapper = Mapper::new(&path, LEN, 'b');
            match name {
                "immutable" => run("chattr", &["+i"], &path),
                "append" => run("chattr", &["+a"], &path),
                "sub/file" => drop(place.done(
                    &["property", "set"],
                    &[top, Path::new("/sub"), Path::new("ro"), Path::new("true")],
                )),
                _ => set_read_only(&top.join("other")),
            }
            drop(mapper);
            // With writeback the kernel sends appends so, too.
            let is_told = name == "immutable" || name == "append" && by_ioctl.is_some();
            if is_told {
                drop(Mapper::new(&path, LEN, 'c'));
                // Who syncs all next is told that it was lost.
                let synced = place.run(&["filesystem", "sync"], &[top]);
                assert!(!synced.status.success(), "{synced:?}");
                wait_until("shown", || fs::read(&path).unwrap() == [b'b'; LEN]);
            }
        }
        place.umount();
        for name in names {
            let stored = place.done(&["cat"], &[&place.image, &Path::new("/").join(name)]);
            assert!(stored.as_bytes() == [b'b'; LEN], "{name} {options}");
        }
    }
}

/// As `btrfs property set` does it: BTRFS_IOC_SUBVOL_SETFLAGS.
fn set_read_only(subvolume: &Path) {
    let script = "open(F, '<', $ARGV[0]) or die $!; my $b = pack('Q', 2); ioctl(F, 0x4008941a, $b) or die $!";
    run("perl", &["-e", script], subvolume);
}

/// Who serves makes all durable after the mount is gone, and the next one was told that the image is in use.
#[test]
fn next_opener_waits_for_who_served_a_mount_that_has_ended() {
    const LEN: usize = 60 << 20;
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&["-o", "commit=3600"]);
        let file = format!("of={}", place.directory.join("file").display());
        let mut dd = place.command("dd");
        let words = ["if=/dev/zero", "bs=1M", "count=60", "status=none"];
        assert!(dd.args(words).arg(file).status().unwrap().success());
        let mut unmount = match is_root {
            true => Command::new("umount"),
            false => {
                let mut unmount = place.command("fusermount3");
                unmount.arg("-u");
                unmount
            }
        };
        assert!(unmount.arg(&place.directory).status().unwrap().success());
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]).len(), LEN);
        // Who has it mounted is not waited for.
        place.mount(&[]);
        let said = place.run(&["ls"], &[&place.image]);
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("It is mounted on"), "{said}");
        place.umount();
    }
}

/// For a moment who serves has neither a command line nor a table of mounts any more, and the image open yet. The next opener was refused in
/// that moment, in one run of hundreds; here it lasts, as somebody else has the same open file.
#[test]
fn next_opener_waits_for_who_has_ended_and_not_closed_the_image() {
    let Some(place) = Place::new(true) else { return };
    let held = File::options().read(true).write(true).open(&place.image).unwrap();
    let mut locker = {
        // It keeps what it is given as long as it lives.
        let mut flock = Command::new("flock");
        flock.args(["-n", "0"]).stdin(held.try_clone().unwrap()).spawn().unwrap()
    };
    let status = PathBuf::from(format!("/proc/{}/status", locker.id()));
    let has_ended = || fs::read_to_string(&status).unwrap().contains("State:\tZ");
    wait_until("ended", has_ended);
    let holder = ubtrfs_volume::lock_holder(&place.image);
    assert_eq!(holder, Some(locker.id()), "it is locked by who has ended");
    let mut opener = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
    let mut opener = opener.arg("ls").arg(&place.image).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(opener.try_wait().unwrap(), None, "it waits");
    drop(held);
    assert!(opener.wait().unwrap().success());
    assert!(locker.wait().unwrap().success());
}

/// Who named a mounted image otherwise than it was named there waited for two minutes, and so did who named one twice.
#[test]
fn image_that_is_in_use_by_another_name_is_not_waited_for() {
    const SOON: Duration = Duration::from_secs(30);
    let Some(place) = Place::new(true) else { return };
    let linked = place.image.with_file_name("linked");
    fs::hard_link(&place.image, &linked).unwrap();
    let begun = Instant::now();
    let twice = place.run(&["mount", "--device"], &[&place.image, &place.image, &place.directory]);
    assert!(!twice.status.success());
    place.mount(&[]);
    let renamed = place.image.with_file_name("renamed");
    for name in [&linked, &renamed] {
        if name == &renamed {
            fs::rename(&place.image, &renamed).unwrap();
        }
        let refused = place.run(&["ls"], &[name]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("It is mounted on"), "{said}");
        assert!(said.contains(&place.directory.display().to_string()), "{said}");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    place.umount();
}

#[test]
fn synchronous_mount_has_each_change_when_it_returns() {
    for option in ["sync", "dirsync"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", &format!("commit=3600,{option}")]);
        let top = &place.directory;
        let mut file = File::create(top.join("file")).unwrap();
        file.write_all(b"written").unwrap();
        fs::create_dir(top.join("dir")).unwrap();
        fs::rename(top.join("file"), top.join("dir/renamed")).unwrap();
        if option == "sync" {
            file.write_all(b" on").unwrap();
        }
        place.cut_off();
        drop(file);
        let stored = place.done(&["cat"], &[&place.image, Path::new("/dir/renamed")]);
        // What dirsync promises ends with the names.
        assert!(option == "dirsync" || stored == "written on", "{stored}");
        place.assert_clean();
    }
}

/// It was taken off its directory, and nothing became durable as long as a program had a file open; nor where somebody had taken it off before.
#[test]
fn process_that_is_asked_to_end_while_in_use_makes_durable_what_there_is() {
    for (is_root, is_taken_off) in [(true, false), (true, true), (false, false), (false, true)] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&["-o", "commit=3600"]);
        // Root is not let in where another user mounted.
        let script = "exec 3>\"$0/file\"; printf 'not synced' >&3; echo written; read end";
        let mut shell = place.command("sh");
        shell
            .args(["-c", script])
            .arg(&place.directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut writer = shell.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "written\n");
        if is_taken_off {
            run("umount", &["-l"], &place.directory);
        }
        place.signal("-TERM");
        wait_until("taken off", || !place.is_mounted());
        // By the first superblock; who reads so gets what was committed last.
        let read = || {
            let copy = place.image.with_extension("copy");
            // Only its data: it is looked at often.
            let mut cp = Command::new("cp");
            cp.arg("--sparse=always").args([&place.image, &copy]);
            assert!(cp.status().unwrap().success());
            // The copy is root's.
            let output = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
                .arg("cat")
                .arg(&copy)
                .arg("/file")
                .output();
            String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
        };
        wait_until("durable", || read() == "not synced");
        place.kill();
        drop(writer.stdin.take());
        writer.wait().unwrap();
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "not synced");
    }
}

/// A mount anywhere on the machine whose name is not UTF-8 hid all of ours.
#[test]
fn mounts_are_found_beside_one_with_a_name_of_any_bytes() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9 \xff");
    let other = place.directory.with_file_name(name);
    fs::create_dir(&other).unwrap();
    run("mount", &["-t", "tmpfs", "none"], &other);
    let made = place.run(&["mkdir"], &[&place.directory, Path::new("/made")]);
    run("umount", &[], &other);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert!(place.directory.join("made").is_dir());
    place.umount();
}

/// It was stored, and told to be lost: when it was written could not be noted of a file that is immutable by then.
#[test]
fn what_the_kernel_held_back_is_stored_and_told_to_be_when_the_file_has_become_immutable() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "writeback,commit=3600"]);
    let path = place.directory.join("file");
    // By one that keeps the file open (chattr looks first): where it is closed the kernel writes what it holds. FS_IOC_SETFLAGS.
    let script = "use IO::Handle; open(F, '+>', $ARGV[0]) or die $!; syswrite(F, 'first'); F->sync or die $!; \
        syswrite(F, ' second'); my $b = pack('LL', 0x10, 0); ioctl(F, 0x40086602, $b) or die $!; F->sync or die $!";
    run("perl", &["-e", script], &path);
    place.umount();
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "first second");
}

/// When it was written the kernel knows, with `-o writeback`; the request that says so could come before the data.
#[test]
fn times_of_what_the_kernel_held_back_are_those_that_it_showed() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "writeback,commit=3600"]);
    let names: Vec<String> = (0..100).map(|number| format!("file {number}")).collect();
    for (number, name) in names.iter().enumerate() {
        fs::write(place.directory.join(name), vec![7; 1 + number * 7000]).unwrap();
    }
    let time = |path: &Path| {
        let about = fs::metadata(path).unwrap();
        (about.mtime(), about.mtime_nsec())
    };
    // None of them just now.
    std::thread::sleep(Duration::from_millis(20));
    let shown: Vec<_> = names.iter().map(|name| time(&place.directory.join(name))).collect();
    place.umount();
    let kernel = KernelMount::read_only(&place.image, "");
    for (name, shown) in names.iter().zip(shown) {
        assert_eq!(time(&kernel.path().join(name)), shown, "{name}");
    }
}
