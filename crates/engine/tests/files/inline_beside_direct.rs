//! A direct write behind the end of a short file whose first block goes to the medium meanwhile.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::full::{create, make, open, open_failing, read};
use crate::common::judge;
use ubtrfs_engine::{Filesystem, InodeId, MappingKind};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;

const BLOCK: u64 = 4096;
const SHORT: usize = 100;

fn at(bytes: u64) -> FileOffset {
    FileOffset::new(bytes)
}

/// A file that begins with some bytes in memory only, and to which a block is written directly behind its first. While the device holds that
/// block up, the background writes the beginning.
fn write_beside(image: &Path) -> InodeId {
    make(image, 512 << 20);
    let (fs, faults) = open_failing(image);
    let file = create(&fs, "file", 0).unwrap();
    file.write(at(0), &[1; SHORT]).unwrap();
    faults.stalls.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let direct = scope.spawn(|| file.direct_write(at(BLOCK), &[2; BLOCK as usize]));
        while !faults.is_stalled.load(Ordering::Relaxed) {
            assert!(!direct.is_finished());
            std::thread::sleep(Duration::from_millis(1));
        }
        // Should it have data to write, it is held up, too.
        let background = scope.spawn(|| fs.write_back_due(u64::MAX));
        for _ in 0..1000 {
            if background.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        faults.stalls.store(false, Ordering::Relaxed);
        background.join().unwrap();
        assert_eq!(direct.join().unwrap().unwrap() as u64, BLOCK);
    });
    file.fsync().unwrap();
    let id = file.id();
    drop((file, fs));
    id
}

fn kinds(fs: &Filesystem, id: InodeId) -> Vec<MappingKind> {
    fs.file_extents(id, DiskOffset(0)).unwrap().map(|mapping| mapping.unwrap().kind).collect()
}

/// Whether there was inline data to be moved was looked at before the block was written, and no more when it was entered: the file had
/// inline data and an extent behind it.
#[test]
fn beginning_written_back_beside_a_direct_write_is_not_inline() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let id = write_beside(&image);
    let fs = open(&image);
    let mut expected = vec![0; 2 * BLOCK as usize];
    expected[..SHORT].fill(1);
    expected[BLOCK as usize..].fill(2);
    assert!(read(&fs, id) == expected);
    let kinds = kinds(&fs, id);
    assert!(!kinds.contains(&MappingKind::Inline), "beside an extent: {kinds:?}");
    drop(fs);
    judge(&image);
}
