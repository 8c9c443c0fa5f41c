//! Where files lie: what the engine and the kernel report of each other's files, extent by extent.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::filefrag::{self, Extent};
use common::{judge, open_for_writing};
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, Reservation,
    SetAttributes, SnapshotOptions, mkfs,
};
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, command, oracle, run};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const KIB: u64 = 1024;

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn extents(fs: &Filesystem, id: InodeId) -> Vec<Extent> {
    filefrag::by_engine(&fs.open_data(id).unwrap())
}

/// Both say the same of each file below the root of `image`; returns how many there are.
fn assert_same_extents(image: &Path) -> usize {
    let mount = KernelMount::read_only(image, "");
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(mount.path()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            files.push(PathBuf::from(entry.file_name()));
        }
    }
    let theirs: Vec<(PathBuf, Vec<Extent>)> = files
        .into_iter()
        .map(|name| {
            let extents = filefrag::by_kernel(&mount.path().join(&name));
            (name, extents)
        })
        .collect();
    mount.unmount();
    let fs = open_for_writing(image);
    for (name, theirs) in &theirs {
        let bytes = name.as_os_str().as_encoded_bytes();
        let id = fs.lookup(fs.top_level(), bytes).unwrap();
        assert_eq!(&extents(&fs, id), theirs, "{}", name.display());
    }
    theirs.len()
}

fn has_kernel() -> bool {
    oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs])
}

fn shell(script: &str, directory: &Path) {
    let output = command("bash").args(["-ec", script]).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn extents_of_kernel_written_files_are_told_as_the_kernel_tells_them() {
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kinds = [
        ("", ""),
        ("compress-force=zstd", ""),
        ("compress-force=lzo", "--nodesize 4096"),
        ("compress-force=zlib", "--nodesize 65536"),
    ];
    for (round, (options, of_mkfs)) in kinds.into_iter().enumerate() {
        let image = dir.path().join(format!("image {round}"));
        MkfsBtrfs::new().options(of_mkfs).size_bytes(512 << 20).make(&image);
        let mount = KernelMount::read_write(&image, options);
        shell(
            "
            dd if=/dev/urandom of=noise bs=4k count=300 status=none
            head -c 700000 /dev/zero | tr '\\0' a > text
            printf short > inline; touch packed; chattr +c packed; head -c 3000 /dev/zero > packed
            : > empty
            truncate -s 1M hole
            fallocate -l 300K whole; touch beyond; fallocate -n -l 200K beyond; printf x > part
            fallocate -l 1M part; dd if=/dev/urandom of=part bs=4k seek=20 count=7 conv=notrunc status=none
            for i in 1 3 5 9; do dd if=/dev/urandom of=sparse bs=4k seek=$((i*4)) count=2 conv=notrunc status=none; sync -f .; done
            touch nocow; chattr +C nocow; dd if=/dev/urandom of=nocow bs=4k count=50 status=none; sync -f .
            dd if=/dev/urandom of=nocow bs=4k seek=9 count=5 conv=notrunc status=none
            cp --reflink=always noise twin; sync -f .
            fallocate -p -o 40K -l 64K noise
            dd if=/dev/urandom of=twin bs=4k seek=100 count=10 conv=notrunc status=none; sync -f .
            btrfs subvolume snapshot . snap > /dev/null
            dd if=/dev/urandom of=text bs=4k seek=3 count=2 conv=notrunc status=none
            printf after > after
            # More references than the extent's item holds, and then few: those that are left stand in items of their own.
            for file in 1 2 3 4; do
                head -c 8192 /dev/urandom > many; sync -f .
                for copy in $(seq 60); do cp --reflink=always many copy$file.$copy; done; sync -f .
                mv copy$file.50 few$file; mv copy$file.59 left$file; rm many copy*; test $file = 4 || rm left$file; sync -f .
            done
            ",
            mount.path(),
        );
        mount.unmount();
        assert_eq!(assert_same_extents(&image), 18);
        judge(&image);
    }
}

fn make(image: &Path) -> Filesystem {
    std::fs::File::create(image).unwrap().set_len(512 << 20).unwrap();
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device: Arc<dyn Device> = Arc::new(device);
    mkfs(vec![device], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
    open_for_writing(image)
}

fn open_with(image: &Path, options: OpenOptions) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, options).unwrap()
}

fn create(fs: &Filesystem, name: &str, bits: u64) -> (InodeId, DataFile) {
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let new = NewInode::new(0o100_644, Time::default());
    let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
    let flags = Some(bits);
    handle.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() }).unwrap();
    drop(handle);
    (id, fs.open_data(id).unwrap())
}

/// An extent that a file refers to by its inode and, where its items lie in a leaf that was another
/// tree's once, by that leaf, has two references, though nobody else shows it.
#[test]
fn extent_that_one_file_refers_to_in_two_ways_is_told_as_the_kernel_tells_it() {
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().size_bytes(512 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "");
    shell(
        "
        btrfs subvolume create old > /dev/null
        dd if=/dev/urandom of=old/file bs=4k count=440 status=none; sync -f .
        # Two leaves of items.
        for at in $(seq 0 2 438); do fallocate -p -o $((at * 4096)) -l 4096 old/file; done; sync -f .
        btrfs subvolume snapshot old new > /dev/null
        for at in $(seq 1 32 438); do fallocate -p -o $((at * 4096)) -l 4096 old/file; done; sync -f .
        fallocate -p -o 4096 -l 4096 new/file; sync -f .
        btrfs subvolume delete -C old > /dev/null; btrfs subvolume sync .
        ",
        mount.path(),
    );
    let theirs = filefrag::by_kernel(&mount.path().join("new/file"));
    mount.unmount();
    assert!(theirs.len() > 200 && theirs.iter().any(|extent| extent.is("shared")));
    let fs = open_for_writing(&image);
    let id = fs.resolve(fs.top_level(), b"new/file").unwrap();
    assert_eq!(extents(&fs, id), theirs);
}

/// A reference that is dropped, but still waits for the commit, made an extent shared.
#[test]
fn extent_is_not_shared_once_its_other_file_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let (one, file) = create(&fs, "one", 0);
    let (two, _) = create(&fs, "two", 0);
    let len = 64 * KIB;
    file.write(at(0), &noise(len, 1)).unwrap();
    fs.sync().unwrap();
    let disk = ubtrfs_ondisk::FileOffset;
    let is_shared = || extents(&fs, one)[0].is("shared");
    assert!(!is_shared());
    fs.clone_range(one, disk(0)..disk(len), two, disk(0)).unwrap();
    assert!(is_shared(), "before the commit");
    fs.commit().unwrap();
    assert!(is_shared());
    fs.unlink(fs.top_level(), b"two").unwrap();
    assert!(!is_shared(), "before the commit");
    fs.commit().unwrap();
    assert!(!is_shared());
    // Within one file, at two offsets.
    fs.clone_range(one, disk(0)..disk(len), one, disk(len)).unwrap();
    assert!(is_shared());
    fs.commit().unwrap();
    assert!(is_shared());
}

/// A part of an extent that was split while it was told was taken for damage: it begins before where the
/// walk stands.
#[test]
fn walk_over_extents_goes_on_behind_one_that_was_split() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let (id, file) = create(&fs, "file", 0);
    file.write(at(0), &noise(64 * KIB, 1)).unwrap();
    file.write(at(128 * KIB), &noise(64 * KIB, 2)).unwrap();
    drop(file);
    fs.sync().unwrap();
    let mut extents = fs.file_extents(id, ubtrfs_ondisk::FileOffset(0)).unwrap();
    let first = extents.next().unwrap().unwrap();
    assert_eq!((first.offset.0, first.len_bytes), (0, 64 * KIB));
    fs.write(id, ubtrfs_ondisk::FileOffset(16 * KIB), &noise(16 * KIB, 3)).unwrap();
    let rest: Vec<u64> = extents.map(|extent| extent.unwrap().offset.0).collect();
    assert_eq!(rest, [64 * KIB, 128 * KIB]);
}

/// Bytes that do not compress.
fn noise(len: u64, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            u8::try_from(state >> 56).unwrap()
        })
        .collect()
}

#[test]
fn extents_of_engine_written_files_are_told_as_the_kernel_tells_them() {
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    write_each_kind(&make(&image));
    assert_eq!(assert_same_extents(&image), 9);
    judge(&image);
}

/// Each extent took three searches from the root of a tree, and a handle. Now the next one's references are looked for beside the last one's.
#[test]
fn many_extents_are_told_as_the_kernel_tells_them_with_few_searches() {
    const COUNT: u64 = 1500;
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let ((one, file), (two, _)) = (create(&fs, "one", 0), create(&fs, "two", 0));
    let write = |index: u64| file.write(at(index * 8 * KIB), &noise(4 * KIB, index)).unwrap();
    (0..COUNT).for_each(|index| _ = write(index));
    fs.sync().unwrap();
    let disk = ubtrfs_ondisk::FileOffset;
    for index in (0..COUNT).step_by(7) {
        let start = index * 8 * KIB;
        fs.clone_range(one, disk(start)..disk(start + 4 * KIB), two, disk(start)).unwrap();
    }
    fs.snapshot(RootId::FS_TREE, fs.top_level(), b"snapshot", &SnapshotOptions::default()).unwrap();
    // Leaves that are the file's own then, leaves that the snapshot has, too, and new extents among old ones.
    (0..COUNT / 4).step_by(3).for_each(|index| _ = write(index));
    fs.sync().unwrap();
    let whole = FileRange::from(at(0));
    let before = fs.tree_searches();
    let told = file.fiemap(whole, usize::MAX, FiemapSync::AsIs).unwrap();
    let searches = fs.tree_searches() - before;
    assert_eq!(told.len() as u64, COUNT);
    // Those written last lie elsewhere than their neighbours: from one to the other and back it takes one each.
    assert!(searches < COUNT / 4, "{searches} searches");
    let shared = told.iter().filter(|extent| extent.flags.is_shared).count() as u64;
    assert!((COUNT / 2..COUNT).contains(&shared), "{shared} are shared");
    drop((file, fs));
    assert_eq!(assert_same_extents(&image), 2);
    judge(&image);
}

/// What is written to a file, and where, in blocks: `start, count`.
struct Unwritten {
    name: &'static str,
    is_in_place: bool,
    allocated: &'static [(u64, u64)],
    /// Is on the medium.
    synced: &'static [(u64, u64)],
    /// Is in memory only.
    dirty: &'static [(u64, u64)],
}

const fn unwritten(
    name: &'static str,
    allocated: &'static [(u64, u64)],
    synced: &'static [(u64, u64)],
    dirty: &'static [(u64, u64)],
) -> Unwritten {
    Unwritten { name, is_in_place: false, allocated, synced, dirty }
}

const UNWRITTEN: [Unwritten; 10] = [
    unwritten("new", &[], &[], &[(0, 4)]),
    unwritten("hole before", &[], &[], &[(8, 2)]),
    unwritten("holes", &[], &[], &[(1, 1), (3, 2), (9, 1)]),
    unwritten("appended", &[], &[(0, 4)], &[(4, 4), (12, 1)]),
    unwritten("allocated", &[(0, 16)], &[], &[(2, 3), (8, 1), (15, 1)]),
    unwritten("allocated behind", &[(4, 8)], &[(0, 2)], &[(2, 4), (20, 2)]),
    unwritten("over data", &[], &[(0, 8)], &[(2, 3)]),
    unwritten("over all data", &[], &[(0, 8)], &[(0, 8)]),
    unwritten("over data and behind", &[], &[(0, 4), (8, 2)], &[(2, 8)]),
    Unwritten { is_in_place: true, ..unwritten("in place", &[], &[(0, 8)], &[(2, 3), (7, 3)]) },
];

const BLOCK: u64 = 4 * KIB;

/// What the kernel says of a file of which a part is in memory only.
fn unwritten_by_kernel(mount: &Path, case: &Unwritten) -> Vec<Extent> {
    let name = case.name;
    let dd = |(start, count): &(u64, u64)| {
        let to = format!("if=/dev/zero of='{name}' bs=4k conv=notrunc status=none");
        format!("dd {to} seek={start} count={count}\n")
    };
    let allocate = |(start, count): &(u64, u64)| {
        format!("fallocate -n -o {} -l {} '{name}'\n", start * BLOCK, count * BLOCK)
    };
    let mut script = format!("touch '{name}'\n");
    if case.is_in_place {
        script += &format!("chattr +C '{name}'\n");
    }
    script.extend(case.allocated.iter().map(allocate));
    script.extend(case.synced.iter().map(dd));
    script += &format!("sync '{name}'\n");
    script.extend(case.dirty.iter().map(dd));
    shell(&script, mount);
    // It begins a new one where what lies below changes, which nobody knows of what has no place.
    let mut told: Vec<Extent> = Vec::new();
    for next in filefrag::by_kernel(&mount.join(name)) {
        match told.last_mut() {
            Some(last)
                if last.logical + last.len_bytes == next.logical
                    && last.is("delalloc")
                    && next.is("delalloc") =>
            {
                last.len_bytes += next.len_bytes;
                last.flags.extend(next.flags);
            }
            _ => told.push(next),
        }
    }
    told
}

/// What is in memory only is told without a sync as the kernel tells it: over holes, behind the end and over preallocated space it has no
/// place; over data that has one, that place is told, whether it will be written there or elsewhere.
#[test]
fn extents_of_what_is_not_written_yet_are_told_as_the_kernel_tells_them() {
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("kernel's");
    MkfsBtrfs::new().size_bytes(512 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "");
    let fs = make(&dir.path().join("ours"));
    for case in UNWRITTEN {
        let name = case.name;
        let theirs = unwritten_by_kernel(mount.path(), &case);
        let bits = if case.is_in_place { flags::NODATACOW | flags::NODATASUM } else { 0 };
        let (_, file) = create(&fs, name, bits);
        let put = |ranges: &[(u64, u64)]| {
            for (start, count) in ranges {
                let bytes = vec![0; usize::try_from(count * BLOCK).unwrap()];
                file.write(at(start * BLOCK), &bytes).unwrap();
            }
        };
        for (start, count) in case.allocated {
            file.allocate(at(start * BLOCK), count * BLOCK, Reach::Stays).unwrap();
        }
        put(case.synced);
        file.fsync().unwrap();
        let before = filefrag::by_engine(&file);
        put(case.dirty);
        assert!(file.space().is_dirty(), "{name}");
        let ours = filefrag::by_engine_as(&file, FiemapSync::AsIs);
        let without_place = |extents: &[Extent]| {
            let told = |extent: &Extent| {
                (extent.logical, extent.len_bytes, extent.physical.is_some(), extent.flags.clone())
            };
            extents.iter().map(told).collect::<Vec<_>>()
        };
        assert_eq!(without_place(&ours), without_place(&theirs), "{name}");
        // Where that is nobody can compare; but data has the place that it had.
        let place_of = |extents: &[Extent], logical| {
            let found = extents.iter().find(|extent| extent.logical == logical);
            found.and_then(|extent| extent.physical)
        };
        let is_data = |extent: &&Extent| !extent.is("delalloc") && !extent.is("unwritten");
        for extent in ours.iter().filter(is_data) {
            assert_eq!(extent.physical, place_of(&before, extent.logical), "{name}");
        }
        let is_elsewhere = place_of(&filefrag::by_engine(&file), 0) != place_of(&before, 0);
        assert!(!(case.is_in_place && is_elsewhere), "{name}");
        assert!(name != "over all data" || is_elsewhere, "{name}");
    }
}

/// Of each 256 bytes 16 are noise, from the one that is named on.
fn mostly_zeros(noise_from: usize) -> Vec<u8> {
    let mut bytes = vec![0; 256 << 10];
    let noise = noise(16 << 10, 1);
    for (part, noise) in bytes.chunks_mut(256).zip(noise.chunks(16)) {
        part[noise_from..noise_from + 16].copy_from_slice(noise);
    }
    bytes
}

/// Data is looked at before it is compressed: the first 16 of each 256 bytes. What is noise there, and zeros elsewhere, would shrink to less than
/// an eighth, and is stored as it is, but where compression is forced. Nothing else shows that it was looked at.
#[test]
fn data_that_looks_like_noise_is_compressed_by_force_only() {
    let (hidden, seen, all_noise) = (mostly_zeros(0), mostly_zeros(128), noise(256 << 10, 2));
    for algorithm in [Compression::Zlib, Compression::Lzo, Compression::Zstd] {
        for is_forced in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let image = dir.path().join("image");
            drop(make(&image));
            let options = || OpenOptions {
                compression: Some(Method::with_default_level(algorithm)),
                force_compression: is_forced,
                ..OpenOptions::default()
            };
            let fs = open_with(&image, options());
            let expected = [
                ("hidden", &hidden, is_forced),
                ("seen", &seen, true),
                ("noise", &all_noise, false),
            ];
            for (name, bytes, _) in expected {
                // Through memory, as whole blocks and as what is no block.
                let (_, file) = create(&fs, name, 0);
                file.write(at(0), &bytes[..100_001]).unwrap();
                file.write(at(100_001), &bytes[100_001..]).unwrap();
                file.fsync().unwrap();
            }
            drop(fs);
            let fs = open_with(&image, options());
            for (name, bytes, is_encoded) in expected {
                let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
                let told = extents(&fs, id);
                let right = told.iter().all(|extent| extent.is("encoded") == is_encoded);
                assert!(right, "{algorithm:?}, forced: {is_forced}, {name}: {told:?}");
                let mut have = vec![0; bytes.len()];
                fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut have).unwrap();
                assert!(have == *bytes, "{algorithm:?}, forced: {is_forced}, {name}");
            }
            drop(fs);
            judge(&image);
        }
    }
}

fn write_each_kind(fs: &Filesystem) {
    let (plain, file) = create(fs, "plain", 0);
    file.write(at(0), &noise(3 << 20, 1)).unwrap();
    let (_, file) = create(fs, "packed", flags::COMPRESS);
    file.write(at(0), &vec![7; 700_000]).unwrap();
    let (_, file) = create(fs, "inline", 0);
    file.write(at(0), b"short").unwrap();
    // Inline and compressed: neither would be without the other.
    let (_, file) = create(fs, "packed inline", flags::COMPRESS);
    file.write(at(0), &vec![7; 3000]).unwrap();
    fs.sync().unwrap();
    let told = file.fiemap(FileRange::new(at(0), at(4096)), 2, FiemapSync::AsIs).unwrap();
    assert!(told.len() == 1 && told[0].flags.is_inline && told[0].flags.is_encoded, "{told:?}");
    let (_, file) = create(fs, "sparse", 0);
    for block in [1, 3, 5, 9] {
        file.write(at(block * 16 * KIB), &noise(8 * KIB, block)).unwrap();
        file.fsync().unwrap();
    }
    let (_, file) = create(fs, "allocated", 0);
    file.allocate(at(0), 1 << 20, Reach::Stays).unwrap();
    file.write(at(80 * KIB), &noise(28 * KIB, 3)).unwrap();
    file.fsync().unwrap();
    file.write(at(108 * KIB), &noise(4 * KIB, 4)).unwrap();
    let (_, file) = create(fs, "in place", flags::NODATACOW | flags::NODATASUM);
    file.write(at(0), &noise(200 * KIB, 5)).unwrap();
    file.fsync().unwrap();
    file.write(at(36 * KIB), &noise(20 * KIB, 6)).unwrap();
    let (twin, file) = create(fs, "twin", 0);
    let whole = ubtrfs_ondisk::FileOffset(0)..ubtrfs_ondisk::FileOffset(3 << 20);
    fs.clone_range(plain, whole, twin, ubtrfs_ondisk::FileOffset(0)).unwrap();
    file.punch_hole(at(40 * KIB), 64 * KIB).unwrap();
    file.write(at(400 * KIB), &noise(40 * KIB, 7)).unwrap();
    fs.sync().unwrap();
    let top = fs.top_level();
    fs.snapshot(top.root, top, b"snap", &SnapshotOptions::default()).unwrap();
    file.write(at(800 * KIB), &noise(4 * KIB, 8)).unwrap();
    let (_, after) = create(fs, "after", 0);
    after.write(at(0), &noise(100 * KIB, 9)).unwrap();
    fs.sync().unwrap();
}

/// What is written in place, over preallocated space or data without checksums, must not be seen in a
/// snapshot or a clone that shares the space.
#[test]
fn data_in_place_leaves_what_shares_the_space_alone() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let (_, allocated) = create(&fs, "allocated", 0);
    allocated.allocate(at(0), 256 * KIB, Reach::Extends).unwrap();
    let (_, in_place) = create(&fs, "in place", flags::NODATACOW | flags::NODATASUM);
    in_place.write(at(0), &noise(256 * KIB, 1)).unwrap();
    fs.sync().unwrap();
    let before = space_of(&in_place);
    in_place.write(at(8 * KIB), &noise(8 * KIB, 2)).unwrap();
    in_place.fsync().unwrap();
    assert_eq!(space_of(&in_place), before, "it is written where it lies");
    allocated.write(at(8 * KIB), &noise(8 * KIB, 3)).unwrap();
    in_place.write(at(32 * KIB), &noise(8 * KIB, 4)).unwrap();

    let read = |id: InodeId| {
        let mut bytes = vec![0; 256 << 10];
        let have = fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap();
        assert_eq!(have, bytes.len());
        bytes
    };
    let moments = [read(allocated.id()), read(in_place.id())];
    // What is in memory at the time is in the snapshot.
    let snap = fs.snapshot(top.root, top, b"snap", &SnapshotOptions::default()).unwrap();
    let (clone, cloned) = create(&fs, "clone", flags::NODATACOW | flags::NODATASUM);
    let whole = ubtrfs_ondisk::FileOffset(0)..ubtrfs_ondisk::FileOffset(256 << 10);
    fs.clone_range(in_place.id(), whole, clone, ubtrfs_ondisk::FileOffset(0)).unwrap();
    for (offset, seed) in [(0, 5), (8, 6), (64, 7), (200, 8)] {
        allocated.write(at(offset * KIB), &noise(12 * KIB, seed)).unwrap();
        in_place.write(at(offset * KIB), &noise(12 * KIB, seed)).unwrap();
    }
    fs.sync().unwrap();
    cloned.write(at(128 * KIB), &noise(4 * KIB, 9)).unwrap();
    fs.sync().unwrap();
    for (name, moment) in [(&b"allocated"[..], &moments[0]), (b"in place", &moments[1])] {
        let id = fs.lookup(snap, name).unwrap();
        assert!(read(id) == *moment, "{} in the snapshot", String::from_utf8_lossy(name));
    }
    let mut expected = moments[1].clone();
    expected[128 << 10..132 << 10].copy_from_slice(&noise(4 * KIB, 9));
    assert!(read(clone) == expected, "the clone");
    drop((allocated, in_place, cloned));
    drop(fs);
    judge(&image);
}

/// What is written into preallocated space behind what was written there before is one item with it, which kept the generation of that: who
/// asks for what is newer, as `btrfs subvolume find-new` does, was told of nothing.
#[test]
fn data_written_into_preallocated_space_is_as_new_as_it_is() {
    if !has_kernel() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let (_, file) = create(&fs, "file", 0);
    file.allocate(at(0), 1024 * KIB, Reach::Extends).unwrap();
    let mut newest = 0;
    for part in 0..3 {
        newest = fs.superblock().generation.get() + 1;
        file.write(at(part * 4 * KIB), &noise(4 * KIB, part)).unwrap();
        fs.sync().unwrap();
    }
    drop((file, fs));
    judge(&image);
    let mount = KernelMount::read_only(&image, "");
    let arguments = ["subvolume".into(), "find-new".into(), mount.path().as_os_str().to_owned()];
    let found = run("btrfs", arguments.into_iter().chain([newest.to_string().into()]));
    let lines: Vec<&str> = found.lines().filter(|line| line.ends_with(" file")).collect();
    assert_eq!(lines.len(), 1, "{found}");
    assert!(lines[0].contains("len 12288 "), "{found}");
}

fn space_of(file: &DataFile) -> Vec<Option<u64>> {
    filefrag::by_engine(file).into_iter().map(|extent| extent.physical).collect()
}

/// Calls that know nothing of memory see what is there, and what they do is seen through open files.
#[test]
fn calls_beside_an_open_file_and_the_file_show_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let (id, file) = create(&fs, "file", 0);
    let disk = ubtrfs_ondisk::FileOffset;
    file.write(at(0), &[1; 10_000]).unwrap();
    assert_eq!(fs.inode(id).unwrap().size_bytes, 10_000);
    let mut bytes = [0; 10_000];
    assert_eq!(fs.read(id, disk(0), &mut bytes).unwrap(), 10_000);
    assert!(bytes == [1; 10_000]);
    fs.write(id, disk(5000), &[2; 100]).unwrap();
    file.write(at(5050), &[3; 10]).unwrap();
    let mut piece = [0; 120];
    file.read(at(4990), &mut piece).unwrap();
    let expected = [&[1; 10][..], &[2; 50], &[3; 10], &[2; 40], &[1; 10]].concat();
    assert_eq!(piece.as_slice(), expected.as_slice());
    fs.truncate(id, 5055).unwrap();
    assert_eq!(file.size(), at(5055));
    file.append(&[4; 5]).unwrap();
    assert!(matches!(fs.appender(id, 0), Err(Error::Unsupported { .. })));

    let (other, target) = create(&fs, "target", 0);
    target.write(at(0), &[9; 20_000]).unwrap();
    fs.clone_range(id, disk(0)..disk(4096), other, disk(8192)).unwrap();
    let mut piece = [0; 12_288];
    target.read(at(4096), &mut piece).unwrap();
    let expected = [&[9; 4096][..], &[1; 4096], &[9; 4096]].concat();
    assert!(piece.as_slice() == expected.as_slice());
    target.write(at(4096), &[1; 4096]).unwrap();
    assert!(fs.dedupe_range(id, disk(0)..disk(4096), other, disk(4096)).unwrap());
    assert!(!fs.dedupe_range(id, disk(0)..disk(4096), other, disk(12_288)).unwrap());
    target.write(at(12_288), &[1; 100]).unwrap();
    assert!(!fs.dedupe_range(id, disk(0)..disk(4096), other, disk(12_288)).unwrap());
    let mut piece = [0; 101];
    target.read(at(12_288), &mut piece).unwrap();
    assert_eq!(piece.as_slice(), [&[1; 100][..], &[9]].concat().as_slice());

    // Removed while it is open and dirty: nothing of it comes back, and its space is free.
    target.write(at(0), &[5; 4096]).unwrap();
    fs.unlink(fs.top_level(), b"target").unwrap();
    assert!(matches!(target.fsync(), Err(Error::NotFound { .. })));
    assert!(matches!(target.read(at(0), &mut [0; 10]), Err(Error::NotFound { .. })));
    drop((file, target));
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// Found by review: a copy of a file that was only in memory was empty, an fsync by number wrote nothing, a
/// time that was set was overwritten by the time of an earlier write, and flags that forbid writing
/// were not asked where the file was open.
#[test]
fn calls_by_number_see_what_is_only_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let disk = ubtrfs_ondisk::FileOffset;
    let (id, file) = create(&fs, "file", 0);
    let (copy, _) = create(&fs, "copy", 0);
    let bytes = noise(100_000, 1);
    file.write(at(0), &bytes).unwrap();
    assert_eq!(fs.copy_range(id, disk(0)..disk(1 << 20), copy, disk(0)).unwrap(), 100_000);
    file.append(&[7; 10]).unwrap();
    let mtime = Time { sec: 1_000_000, nsec: 5 };
    let times = SetAttributes { mtime: Some(mtime), ..SetAttributes::default() };
    fs.begin(Reservation::items(1)).unwrap().set_attributes(id, &times).unwrap();
    fs.fsync(id).unwrap();
    let bits = SetAttributes { flags: Some(flags::IMMUTABLE), ..SetAttributes::default() };
    fs.begin(Reservation::items(1)).unwrap().set_attributes(id, &bits).unwrap();
    let refused = [fs.write(id, disk(0), b"no"), fs.truncate(id, 5)];
    assert!(refused.iter().all(|r| matches!(r, Err(Error::NotPermitted { .. }))), "{refused:?}");
    drop(file);
    drop(fs);

    let fs = open_for_writing(&image);
    let inode = fs.inode(id).unwrap();
    assert_eq!((inode.size_bytes, inode.mtime), (100_010, mtime));
    let mut have = vec![0; 100_010];
    fs.read(id, disk(0), &mut have).unwrap();
    assert!(have == [&bytes[..], &[7; 10]].concat());
    assert_eq!(fs.read(copy, disk(0), &mut have).unwrap(), 100_000);
    assert!(have[..100_000] == bytes);
    drop(fs);
    judge(&image);
}

/// Found by review: a writeback that was under way when the file was truncated, and an fsync beside it, gave
/// the file its old length back on the medium.
#[test]
fn truncation_beside_writeback_and_fsync_keeps_its_size_on_the_medium() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let (id, file) = create(&fs, "file", 0);
    let is_done = std::sync::atomic::AtomicBool::new(false);
    for round in 0..40 {
        let size = 100 + round * 97 % 9000;
        is_done.store(false, std::sync::atomic::Ordering::Relaxed);
        std::thread::scope(|scope| {
            let (file, is_done) = (&file, &is_done);
            scope.spawn(move || {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    file.space().flush(FileRange::from(FileOffset::ZERO)).unwrap();
                }
            });
            let other = fs.open_data(id).unwrap();
            scope.spawn(move || {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    other.fsync().unwrap();
                }
            });
            for _ in 0..20 {
                file.write(at(0), &[1; 12_000]).unwrap();
                file.truncate(at(size)).unwrap();
            }
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        fs.sync().unwrap();
        assert_eq!(fs.inode(id).unwrap().size_bytes, size);
        assert_eq!(size_on_medium(&fs, id), size, "round {round}");
    }
    drop(file);
    drop(fs);
    judge(&image);
}

/// What a snapshot shows of the file's size is what the medium has.
fn size_on_medium(fs: &Filesystem, id: InodeId) -> u64 {
    let top = fs.top_level();
    let snap = fs.snapshot(top.root, top, b"moment", &SnapshotOptions::default()).unwrap();
    let size = fs.inode(InodeId { root: snap.root, inode: id.inode }).unwrap().size_bytes;
    fs.delete_subvolume(top, b"moment").unwrap();
    size
}
