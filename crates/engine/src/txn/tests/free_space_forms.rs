//! Free space that goes to bitmaps as a large group falls to pieces, and back to extents as the pieces
//! join: by the engine, by the kernel, and by one after the other.

use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::free_space::{FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_rt::Time;
use ubtrfs_testkit::KernelMount;

use super::*;
use crate::{NewInode, PreparedData};

/// Data groups are a tenth of that: in one of 8 MiB and less the free space never comes back from bitmaps.
const DEVICE_BYTES: u64 = 2 << 30;
/// Files whose extents lie side by side, so that each second one that goes leaves a hole.
const FILES: u64 = 800;
/// Lies over borders of bitmaps, which are of 8 MiB each.
const LARGE_BYTES: usize = 20 << 20;

/// How the free space tree has the second group of data, which is large.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Form {
    uses_bitmaps: bool,
    extent_count: u64,
}

/// Extents above which the group goes to bitmaps, and below which it comes back: by the published format, worked out here again.
fn limits(fs: &Filesystem) -> (u64, u64) {
    let bitmaps = data_group(fs).1.div_ceil(256 * 8 * 4096);
    let high = bitmaps * (25 + 256) / 25;
    (high, high - 100)
}

fn data_group(fs: &Filesystem) -> (u64, u64) {
    let chunks = fs.volume().chunks();
    let mut data = chunks.iter().filter(|chunk| chunk.flags.contains(BlockGroupFlags::DATA));
    let chunk = data.nth(1).unwrap();
    (chunk.start.0, chunk.len_bytes)
}

/// What the tree says, which is what it holds.
fn form(fs: &Filesystem) -> Form {
    let (start, len_bytes) = data_group(fs);
    let tree = fs.tree(RootId::FREE_SPACE_TREE).unwrap();
    let mut cursor = tree.cursor();
    cursor.seek(&Key::new(ObjectId(start), KeyType::FREE_SPACE_INFO, len_bytes)).unwrap();
    let (key, data) = cursor.current().unwrap().unwrap();
    assert_eq!(key, Key::new(ObjectId(start), KeyType::FREE_SPACE_INFO, len_bytes));
    let info = *FreeSpaceInfo::peek(data).unwrap();
    let uses_bitmaps = info.flags.get() == USING_BITMAPS;
    assert!(uses_bitmaps || info.flags.get() == 0);
    cursor.next().unwrap();
    let (mut extent_count, mut was_free) = (0, false);
    while let Some((key, data)) = cursor.current().unwrap() {
        if key.objectid.0 >= start + len_bytes {
            break;
        }
        if key.ty == KeyType::FREE_SPACE_BITMAP {
            assert!(uses_bitmaps, "{key}");
            for bit in data.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)) {
                extent_count += u64::from(bit && !was_free);
                was_free = bit;
            }
        } else {
            assert!(!uses_bitmaps && key.ty == KeyType::FREE_SPACE_EXTENT, "{key}");
            extent_count += 1;
        }
        cursor.next().unwrap();
    }
    assert_eq!(extent_count, u64::from(info.extent_count.get()));
    Form { uses_bitmaps, extent_count }
}

fn add(fs: &Filesystem, name: &str, len: usize) {
    let reservation = Reservation::create(1).and(Reservation::extents(32));
    let mut handle = fs.begin(reservation).unwrap();
    let new = NewInode::new(0o100_644, Time::default());
    let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
    let pieces = (0..len).step_by(1 << 20).map(|at| {
        let data = PreparedData::new(vec![7; (len - at).min(1 << 20)], &fs.write_options(None));
        (FileOffset(at as u64), data)
    });
    handle.write_file(id, pieces.collect(), len as u64).unwrap();
}

fn fill(fs: &Filesystem) {
    for number in 0..FILES {
        add(fs, &format!("{number}"), 8192);
        if number == FILES / 2 {
            add(fs, "large", LARGE_BYTES);
        }
    }
    fs.commit().unwrap();
}

/// A filesystem whose first group of data, of 8 MiB, is full: all that comes lies in the next.
fn made(image: &Path) -> Filesystem {
    let fs = make(image, DEVICE_BYTES, &MkfsOptions::default());
    add(&fs, "first", 8 << 20);
    add(&fs, "second", 8192);
    fs.commit().unwrap();
    assert!(data_group(&fs).1 > 100 << 20);
    fs
}

fn open(image: &Path, cache_free_space_form: bool) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions { cache_free_space_form, ..open_options() }).unwrap()
}

/// Removes files, committing after each `batch`; after each commit the form is as the limits have it.
fn remove(fs: &Filesystem, numbers: impl Iterator<Item = u64>, batch: usize) -> Vec<Form> {
    let (high, low) = limits(fs);
    let mut forms = vec![form(fs)];
    let numbers: Vec<u64> = numbers.collect();
    for some in numbers.chunks(batch) {
        for number in some {
            fs.unlink(fs.top_level(), format!("{number}").as_bytes()).unwrap();
        }
        // What is freed by one commit is free in the tree by then, and may be given out after it.
        fs.commit().unwrap();
        let (was, now) = (forms[forms.len() - 1], form(fs));
        if now.extent_count > high {
            assert!(now.uses_bitmaps, "{now:?}");
        } else if now.extent_count < low {
            assert!(!now.uses_bitmaps, "{now:?}");
        } else {
            assert_eq!(now.uses_bitmaps, was.uses_bitmaps, "{was:?}, {now:?}");
        }
        forms.push(now);
    }
    forms
}

/// `btrfs check`, which counts the free extents, and the kernel, which gives space out of the group: it writes a file and removes another.
fn judge(image: &Path, kernel_removes: impl Iterator<Item = u64>) {
    let has_check = oracle::require(Oracle::BtrfsProgs);
    if has_check {
        assert_checks_clean(image);
    }
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        for number in kernel_removes {
            let fs = open(image, true);
            fs.unlink(fs.top_level(), format!("{number}").as_bytes()).unwrap();
            fs.commit().unwrap();
        }
        return;
    }
    let mount = KernelMount::read_write(image, "subvolid=5");
    for number in kernel_removes {
        std::fs::remove_file(mount.path().join(format!("{number}"))).unwrap();
    }
    let new = mount.path().join("of the kernel");
    std::fs::write(&new, vec![9; 300_000]).unwrap();
    std::fs::File::open(&new).unwrap().sync_all().unwrap();
    std::fs::remove_file(new).unwrap();
    mount.unmount();
    if has_check {
        assert_checks_clean(image);
    }
}

fn even() -> impl Iterator<Item = u64> {
    (0..FILES).step_by(2)
}

fn odd() -> impl Iterator<Item = u64> {
    // The last stays: a group of which nothing is used would be removed.
    (1..FILES - 1).step_by(2)
}

fn there_and_back(cache_free_space_form: bool) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    drop(made(&image));
    // One commit for all, or one for some: within a change of one group, or between two.
    for batch in [16, FILES as usize] {
        let fs = open(&image, cache_free_space_form);
        fill(&fs);
        let (high, low) = limits(&fs);
        assert!(low > 50, "a group too small to come back");
        let forms = remove(&fs, even(), batch);
        assert!(!forms[0].uses_bitmaps && forms[0].extent_count < low, "{:?}", forms[0]);
        let last = forms[forms.len() - 1];
        assert!(last.uses_bitmaps && last.extent_count > high, "{last:?}");
        drop(fs);
        judge(&image, std::iter::empty());

        let fs = open(&image, cache_free_space_form);
        assert!(form(&fs).uses_bitmaps);
        // Taken and given back in this form, over the borders of bitmaps.
        add(&fs, "another", LARGE_BYTES);
        fs.commit().unwrap();
        fs.unlink(fs.top_level(), b"large").unwrap();
        fs.commit().unwrap();
        let middle = if batch == 16 { (high - low) as usize } else { 0 };
        let forms = remove(&fs, odd().take(middle), batch);
        // Between the limits it stays as it is, also for who opens it then.
        assert!(forms.iter().all(|form| form.uses_bitmaps));
        drop(fs);
        let fs = open(&image, cache_free_space_form);
        let forms = remove(&fs, odd().skip(middle), batch);
        let last = forms[forms.len() - 1];
        assert!(!last.uses_bitmaps && last.extent_count < low, "{last:?}");
        drop(fs);
        judge(&image, std::iter::empty());

        let fs = open(&image, cache_free_space_form);
        assert!(!form(&fs).uses_bitmaps);
        for name in ["another".to_owned(), format!("{}", FILES - 1)] {
            fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
        }
        add(&fs, &format!("keeps the group {batch}"), 8192);
        fs.commit().unwrap();
    }
    judge(&image, std::iter::empty());
}

#[test]
fn free_space_of_a_large_group_goes_to_bitmaps_and_back() {
    there_and_back(true);
}

#[test]
fn free_space_of_a_large_group_goes_to_bitmaps_and_back_where_its_form_is_not_remembered() {
    there_and_back(false);
}

/// The kernel has the same limits: what one of the two turns, the other turns back.
#[test]
fn free_space_that_one_of_engine_and_kernel_turned_is_turned_back_by_the_other() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    let fs = made(&image);
    fill(&fs);
    assert!(!form(&fs).uses_bitmaps);
    drop(fs);
    judge(&image, even());
    let fs = open(&image, true);
    assert!(form(&fs).uses_bitmaps);
    let forms = remove(&fs, odd(), 16);
    assert!(!forms[forms.len() - 1].uses_bitmaps);
    fs.unlink(fs.top_level(), b"large").unwrap();
    fs.unlink(fs.top_level(), format!("{}", FILES - 1).as_bytes()).unwrap();
    fill(&fs);
    remove(&fs, even(), 16);
    assert!(form(&fs).uses_bitmaps);
    drop(fs);
    judge(&image, odd());
    let fs = open(&image, true);
    assert!(!form(&fs).uses_bitmaps);
    let forms = remove(&fs, std::iter::once(FILES - 1), 1);
    assert!(forms.iter().all(|form| !form.uses_bitmaps));
    drop(fs);
    judge(&image, std::iter::empty());
}
