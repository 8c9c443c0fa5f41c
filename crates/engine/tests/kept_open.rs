//! Who keeps a file open while others change it: readers and appenders.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ubtrfs_engine::{
    Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, PreparedData, RenameMode,
    Reservation, SnapshotOptions, mkfs,
};
use ubtrfs_ondisk::{FileOffset, InodeNo, RootId};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, assert_checks_clean, oracle, run};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

const KIB: u64 = 1024;

fn make(image: &Path) -> Filesystem {
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap());
    let runtime = Arc::new(Runtime::system());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

fn create(fs: &Filesystem, dir: InodeId, name: &[u8]) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    fs.begin(Reservation::create(0)).unwrap().create(dir, name, &new).unwrap()
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    let byte = |at: u64| seed.wrapping_add(u8::try_from(at / 512 % 251).unwrap());
    (0..len).map(byte).collect()
}

/// An appender entered extents where the file had ended when it was made: two of them lay over each
/// other, and Linux refused the leaf.
#[test]
fn appender_of_a_file_that_others_wrote_is_refused_and_nothing_lies_twice() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let file = create(&fs, fs.top_level(), b"file");
    let prepared = |len| PreparedData::new(pattern(1, len), &fs.write_options(None));
    let mut appender = fs.appender(file, 0).unwrap();
    fs.write(file, FileOffset(4 * KIB), &pattern(2, 4 * KIB)).unwrap();
    appender.push(FileOffset(0), prepared(KIB << 10)).unwrap();
    let refused = appender.finish();
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    // Of two appenders one wins.
    let other = create(&fs, fs.top_level(), b"other");
    let mut both = [fs.appender(other, 0).unwrap(), fs.appender(other, 0).unwrap()];
    for appender in &mut both {
        appender.push(FileOffset(0), prepared(64 * KIB)).unwrap();
    }
    let results = both.map(|appender| appender.finish().is_ok());
    assert_eq!(results, [true, false]);
    fs.commit().unwrap();
    drop(fs);
    common::judge(&image);
}

/// A file kept open for reading stood at items that were no more: it returned what had been
/// overwritten, or called good data damaged.
#[test]
fn reader_that_stays_open_sees_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let id = create(&fs, fs.top_level(), b"file");
    fs.write(id, FileOffset(128 * KIB), &pattern(1, 128 * KIB)).unwrap();
    fs.commit().unwrap();
    let mut file = fs.open_file(id).unwrap();
    let mut have = vec![0; 128 << 10];
    // The reader stands in front of the extent, behind the hole.
    file.read(FileOffset(0), &mut have).unwrap();
    for round in 2..40 {
        fs.write(id, FileOffset(128 * KIB), &pattern(round, 128 * KIB)).unwrap();
        if round % 3 == 0 {
            fs.commit().unwrap();
        }
        assert_eq!(file.read(FileOffset(128 * KIB), &mut have).unwrap(), have.len());
        assert!(have == pattern(round, 128 * KIB), "round {round}");
        assert_eq!(file.read(FileOffset(0), &mut have).unwrap(), have.len());
        assert!(have.iter().all(|byte| *byte == 0), "round {round}");
    }
    drop(file);
    fs.commit().unwrap();
    drop(fs);
    common::judge(&image);
}

/// Checksums move from where they wait into their tree while a reader looks for them: in one place,
/// then in the other. It found them in neither.
#[test]
fn reader_beside_commits_finds_each_checksum() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let files: Vec<InodeId> = (0..8_u8)
        .map(|number| {
            let id = create(&fs, fs.top_level(), &[b'f', b'0' + number]);
            fs.write(id, FileOffset(0), &pattern(number, 256 * KIB)).unwrap();
            id
        })
        .collect();
    let done = AtomicBool::new(false);
    let mut reads = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..150_u8 {
                let at = u64::from(round % 8) * 32 * KIB;
                fs.write(files[0], FileOffset(at), &pattern(round, 32 * KIB)).unwrap();
                fs.write(files[1], FileOffset(0), &pattern(1, 256 * KIB)).unwrap();
                fs.commit().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut open: Vec<_> = files.iter().map(|id| fs.open_file(*id).unwrap()).collect();
        let mut have = vec![0; 256 << 10];
        while !done.load(Ordering::Relaxed) {
            for (file, number) in open.iter_mut().zip(0..) {
                file.read(FileOffset(0), &mut have).unwrap();
                assert!(number == 0 || have == pattern(number, 256 * KIB), "file {number}");
                reads += 1;
            }
        }
    });
    assert!(reads > 8, "{reads}");
}

/// What a deleted subvolume held is given to others.
#[test]
fn reader_of_a_deleted_subvolume_gets_an_error_and_not_another_files_data() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    let new = NewInode::new(0o755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let sub = handle.create_subvolume(top, b"sub", &new).unwrap();
    drop(handle);
    let id = create(&fs, sub, b"file");
    fs.write(id, FileOffset(0), &pattern(1, 256 * KIB)).unwrap();
    fs.commit().unwrap();
    let mut file = fs.open_file(id).unwrap();
    let mut have = vec![0; 256 << 10];
    file.read(FileOffset(0), &mut have).unwrap();
    fs.delete_subvolume(top, b"sub").unwrap();
    fs.clean_deleted_subvolumes().unwrap();
    fs.commit().unwrap();
    for number in 0..8_u8 {
        let other = create(&fs, top, &[b'o', b'0' + number]);
        fs.write(other, FileOffset(0), &pattern(100, 256 * KIB)).unwrap();
    }
    let read = file.read(FileOffset(0), &mut have);
    assert!(matches!(read, Err(Error::NotFound { .. })), "{read:?}");
}

/// A default subvolume that was deleted kept all others from being deleted, and Linux from mounting.
#[test]
fn deleted_subvolume_does_not_become_the_default_one() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    let new = NewInode::new(0o755, Time::default());
    for name in [b"one", b"two"] {
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        handle.create_subvolume(top, name, &new).unwrap();
    }
    let one = fs.delete_subvolume(top, b"one").unwrap();
    assert!(matches!(fs.set_default_subvolume(one), Err(Error::NotFound { .. })));
    fs.clean_deleted_subvolumes().unwrap();
    assert!(matches!(fs.set_default_subvolume(one), Err(Error::NotFound { .. })));
    assert_eq!(fs.default_subvolume().unwrap(), top);
    fs.delete_subvolume(top, b"two").unwrap();
}

/// Somebody who asked for a subvolume's number just when its snapshot was being made read the tree
/// from its item, and the block that only memory had was never written.
#[test]
fn snapshot_that_is_asked_for_while_it_is_made_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let new = NewInode::new(0o755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let source = handle.create_subvolume(top, b"source", &new).unwrap();
    drop(handle);
    let done = AtomicBool::new(false);
    let next = std::sync::atomic::AtomicU64::new(source.root.0 + 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let root = RootId(next.load(Ordering::Relaxed));
                let _ = fs.inode(InodeId { root, inode: InodeNo(256) });
            }
        });
        for number in 0..400 {
            create(&fs, source, format!("file {number}").as_bytes());
            let name = format!("snapshot {number}");
            let options = SnapshotOptions::default();
            let made = fs.snapshot(source.root, top, name.as_bytes(), &options).unwrap();
            next.store(made.root.0 + 1, Ordering::Relaxed);
        }
        done.store(true, Ordering::Relaxed);
    });
    fs.commit().unwrap();
    drop(fs);
    let fs = common::open(&[&image]);
    for number in 0..400 {
        let path = format!("snapshot {number}/file {number}");
        fs.resolve(fs.top_level(), path.as_bytes()).unwrap();
    }
    drop(fs);
    common::judge(&image);
}

/// A clone of a file's end to behind itself made the file longer than the rest was reckoned with.
#[test]
fn copy_within_one_file_beyond_its_end_copies_all() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let id = create(&fs, fs.top_level(), b"file");
    let bytes = pattern(3, 5851);
    fs.write(id, FileOffset(0), &bytes).unwrap();
    let range = FileOffset(3321)..FileOffset(5851);
    assert_eq!(fs.copy_range(id, range, id, FileOffset(11_513)).unwrap(), 2530);
    let mut have = vec![0; 11_513 + 2530];
    assert_eq!(fs.read(id, FileOffset(0), &mut have).unwrap(), have.len());
    assert!(have[..5851] == bytes && have[5851..11_513].iter().all(|byte| *byte == 0));
    assert!(have[11_513..] == bytes[3321..]);
}

/// One write took all that was left of the devices for data, and nothing was left for names.
#[test]
fn large_write_on_a_small_device_takes_a_chunk_and_not_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 512 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let runtime = Arc::new(Runtime::system());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let before = fs.usage().unwrap().allocated_bytes;
    let id = create(&fs, fs.top_level(), b"file");
    let mut appender = fs.appender(id, 0).unwrap();
    appender
        .push(FileOffset(0), PreparedData::new(pattern(1, 90 << 20), &fs.write_options(None)))
        .unwrap();
    appender.finish().unwrap();
    fs.commit().unwrap();
    let taken = fs.usage().unwrap().allocated_bytes - before;
    assert!(taken < 200 << 20, "{} MiB for 90", taken >> 20);
    drop(fs);
    common::judge(&image);
}

/// Files that the kernel has open when the power goes, without a name, in a subvolume that is not the
/// top level: their orphan items are there, and so is their data.
#[test]
fn files_without_a_name_of_a_subvolume_go_when_it_is_first_changed() {
    use std::os::unix::fs::FileExt;
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mounted, image) = (dir.path().join("mounted"), dir.path().join("image"));
    MkfsBtrfs::new().size_bytes(300 << 20).make(&mounted);
    let mount = KernelMount::read_write(&mounted, "commit=300");
    let at = |name: &str| mount.path().join(name);
    for sub in ["sub", "other"] {
        run("btrfs", ["subvolume".as_ref(), "create".as_ref(), at(sub).as_os_str()]);
    }
    let mut open = Vec::new();
    for name in ["sub/unlinked", "other/unlinked"] {
        let file = std::fs::File::create(at(name)).unwrap();
        file.write_all_at(&vec![7; 8 << 20], 0).unwrap();
        std::fs::remove_file(at(name)).unwrap();
        open.push(file);
    }
    run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    run("cp", ["--sparse=always".as_ref(), mounted.as_os_str(), image.as_os_str()]);
    drop(open);
    mount.unmount();

    let fs = common::open_for_writing(&image);
    assert!(fs.notices().is_empty());
    let [sub, other] =
        ["sub", "other"].map(|name| fs.lookup(fs.top_level(), name.as_bytes()).unwrap());
    let nameless = |dir: InodeId| InodeId { inode: InodeNo(257), ..dir };
    assert_eq!(fs.inode(nameless(sub)).unwrap().nlink, 0);
    let used = fs.superblock().bytes_used.get();
    create(&fs, sub, b"new");
    fs.commit().unwrap();
    assert!(matches!(fs.inode(nameless(sub)), Err(Error::NotFound { .. })));
    assert_eq!(fs.inode(nameless(other)).unwrap().nlink, 0, "nobody has changed that one");
    let freed = used - fs.superblock().bytes_used.get();
    assert!(freed > 7 << 20, "{freed} bytes freed");
    drop(fs);
    assert_checks_clean(&image);
    let fs = common::open_for_writing(&image);
    create(&fs, other, b"new");
    fs.commit().unwrap();
    assert!(matches!(fs.inode(nameless(other)), Err(Error::NotFound { .. })));
    drop(fs);
    assert_checks_clean(&image);
    common::judge(&image);
}

/// Who holds a subvolume by number keeps all of it when it is deleted, but its name: files go on being read and changed, through memory
/// or not; only subvolumes cannot be made in it, moved there, or be snapshots of it, which nobody could delete.
#[test]
fn held_subvolume_stays_when_it_is_deleted_and_goes_when_it_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let new = NewInode::new(0o755, Time::default());
    let make_subvolume = |dir, name| {
        fs.begin(Reservation::create_subvolume()).unwrap().create_subvolume(dir, name, &new)
    };
    let [sub, _] = [b"sub", b"two"].map(|name| make_subvolume(top, name).unwrap());
    let id = create(&fs, sub, b"file");
    fs.write(id, FileOffset(0), &pattern(1, 256 * KIB)).unwrap();
    let nameless = create(&fs, sub, b"nameless");
    fs.unlink_deferred(sub, b"nameless").unwrap();
    let hold = fs.subvolume_holds().hold(sub.root);
    let other_hold = fs.subvolume_holds().hold(sub.root);
    fs.commit().unwrap();
    let data = fs.open_data(id).unwrap();
    data.write(ubtrfs_iomap::FileOffset::new(4096), &pattern(2, 4 * KIB)).unwrap();
    assert_eq!(fs.delete_subvolume(top, b"sub").unwrap(), sub.root);
    assert!(matches!(fs.lookup(top, b"sub"), Err(Error::NotFound { .. })));
    assert!(fs.subvolumes().unwrap().iter().all(|info| info.id != sub.root || info.deleted));
    drop(other_hold);
    for round in 0..3_u8 {
        assert_eq!(fs.clean_deleted_subvolumes().unwrap(), 0);
        assert!(!fs.clean_deleted_step(100).unwrap());
        data.write(ubtrfs_iomap::FileOffset::new(0), &pattern(round, 8 * KIB)).unwrap();
        data.fsync().unwrap();
        let mut have = vec![0; 8 << 10];
        fs.read(id, FileOffset(0), &mut have).unwrap();
        assert!(have == pattern(round, 8 * KIB));
        let made = create(&fs, sub, &[b'0' + round]);
        fs.write(made, FileOffset(0), &pattern(round, 100 * KIB)).unwrap();
        fs.write(nameless, FileOffset(0), &pattern(round, 100 * KIB)).unwrap();
    }
    fs.evict(nameless).unwrap();
    fs.unlink(sub, b"1").unwrap();
    let options = SnapshotOptions::default();
    let refused = [
        make_subvolume(sub, b"nested").map(drop),
        fs.snapshot(sub.root, top, b"snapshot", &options).map(drop),
        fs.snapshot(top.root, sub, b"snapshot", &options).map(drop),
        fs.rename(top, b"two", sub, b"two", RenameMode::Replace),
        fs.set_default_subvolume(sub.root),
    ];
    for (number, refused) in refused.iter().enumerate() {
        assert!(matches!(refused, Err(Error::NotFound { .. })), "{number}: {refused:?}");
    }
    fs.sync().unwrap();
    // As a cut leaves it.
    let copy = dir.path().join("copy");
    std::fs::copy(&image, &copy).unwrap();
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&copy);
    }
    let later = common::open_for_writing(&copy);
    assert_eq!(later.clean_deleted_subvolumes().unwrap(), 1);
    later.commit().unwrap();
    drop(later);
    common::judge(&copy);

    drop(hold);
    data.write(ubtrfs_iomap::FileOffset::new(0), &pattern(9, 8 * KIB)).unwrap();
    assert_eq!(fs.clean_deleted_subvolumes().unwrap(), 1);
    assert!(matches!(fs.inode(id), Err(Error::NotFound { .. })));
    let refused = data.write(ubtrfs_iomap::FileOffset::new(0), b"x");
    assert!(matches!(refused, Err(Error::NotFound { .. })), "{refused:?}");
    drop(data);
    fs.sync().unwrap();
    drop(fs);
    common::judge(&image);
}

/// Holders come and go while the subvolume is deleted and dropped: each finds it whole, or gone.
#[test]
fn subvolume_that_is_held_just_when_it_is_deleted_is_whole_or_gone() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let new = NewInode::new(0o755, Time::default());
    let (mut whole, mut gone) = (0, 0);
    for round in 0..200_u32 {
        let made = fs.begin(Reservation::create_subvolume()).unwrap();
        let sub = { made }.create_subvolume(top, b"sub", &new).unwrap();
        let id = create(&fs, sub, b"file");
        fs.write(id, FileOffset(0), &pattern(7, 64 * KIB)).unwrap();
        let started = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                started.wait();
                for _ in 0..round % 40 {
                    std::hint::spin_loop();
                }
                let _hold = fs.subvolume_holds().hold(sub.root);
                let mut have = vec![0; 64 << 10];
                match fs.read(id, FileOffset(0), &mut have) {
                    Ok(_) => {
                        // It stays as long as it is held.
                        for _ in 0..20 {
                            fs.write(id, FileOffset(0), &pattern(8, 64 * KIB)).unwrap();
                            fs.read(id, FileOffset(0), &mut have).unwrap();
                            assert!(have == pattern(8, 64 * KIB));
                        }
                        true
                    }
                    Err(Error::NotFound { .. }) => false,
                    Err(error) => panic!("{error}"),
                }
            });
            started.wait();
            fs.delete_subvolume(top, b"sub").unwrap();
            fs.clean_deleted_subvolumes().unwrap();
            match held.join().unwrap() {
                true => whole += 1,
                false => gone += 1,
            }
        });
        fs.clean_deleted_subvolumes().unwrap();
    }
    println!("{whole} found it whole, {gone} gone");
    fs.commit().unwrap();
    assert!(fs.subvolumes().unwrap().iter().all(|info| info.id == top.root));
    drop(fs);
    common::judge(&image);
}

/// Changes something in turns while a thread looks, until both were done often, however processors are given.
fn change_beside(look: impl Fn() + Sync, change: impl Fn(u64)) {
    const TIMES: u64 = 3000;
    let (is_over, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        let looking = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                look();
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let has_looked = || looks.load(Ordering::Relaxed) >= TIMES || looking.is_finished();
        (0..).take_while(|turn| *turn < TIMES || !has_looked()).for_each(change);
    });
}

/// Who looked a name up while something else took it over, or changed places with another, could find that there was none.
#[test]
fn name_that_is_replaced_is_always_there() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    create(&fs, top, b"file");
    create(&fs, top, b"other");
    let has_name = || assert!(fs.lookup(top, b"file").is_ok(), "something always has the name");
    change_beside(has_name, |turn| {
        let mode = if turn % 2 == 0 { RenameMode::Replace } else { RenameMode::Exchange };
        fs.rename(top, b"other", top, b"file", mode).unwrap();
        if mode == RenameMode::Replace {
            create(&fs, top, b"other");
        }
    });
    fs.commit().unwrap();
}

/// In that moment the name of a subvolume led to the empty directory that stands for one which is elsewhere.
#[test]
fn subvolumes_that_change_places_are_always_there() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    for name in [&b"one"[..], b"other"] {
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        let new = NewInode::new(0o40_755, Time::default());
        let root = handle.create_subvolume(top, name, &new).unwrap();
        drop(handle);
        create(&fs, root, b"file");
    }
    let has_file = || assert!(fs.resolve(top, b"one/file").is_ok(), "both have such a file");
    change_beside(has_file, |_| {
        fs.rename(top, b"other", top, b"one", RenameMode::Exchange).unwrap();
    });
    fs.commit().unwrap();
}

/// Ends whoever goes on until then, also where a thread panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What of a file that went was removed already was read as zeros, by who had it open and by its number.
#[test]
fn file_that_goes_is_read_as_it_was_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    let len = 16_u64 << 20;
    for round in 0..20 {
        let id = create(&fs, top, b"file");
        // Of many extents, so that it goes in many steps.
        for at in (0..len).step_by(8192) {
            fs.write(id, FileOffset(at), &[1; 4096]).unwrap();
        }
        fs.sync().unwrap();
        fs.drop_clean_data();
        let file = (round % 2 == 0).then(|| fs.open_data(id).unwrap());
        let read = |at, bytes: &mut [u8]| match &file {
            Some(file) => file.read(ubtrfs_iomap::FileOffset::new(at), bytes),
            None => fs.read(id, FileOffset(at), bytes),
        };
        std::thread::scope(|scope| {
            let going = scope.spawn(|| fs.unlink(top, b"file").unwrap());
            let mut bytes = vec![9; 4096];
            // From whichever end it goes.
            for at in [0, len - 8192].into_iter().cycle() {
                let is_gone = going.is_finished();
                match read(at, &mut bytes) {
                    Ok(read) => {
                        assert!(!is_gone, "it is read when it is gone");
                        assert!(read == 4096 && bytes.iter().all(|byte| *byte == 1), "at {at}");
                    }
                    Err(error) => {
                        assert!(matches!(error, Error::NotFound { .. }), "{round}: {error}");
                        break;
                    }
                }
                fs.drop_clean_data();
            }
            going.join().unwrap();
        });
    }
}
