//! Files whose mappings lie in leaves of which one cannot be read: what is asked of them fails or is right. A walk that had met the end
//! of the leaf before took the rest of the file for a hole when it was asked again: zeros were read, and stored where part of a block was
//! written.

use std::sync::Arc;

use crate::common::simulated::{check, empty, new, open, path};
use ubtrfs_engine::{DataFile, Error, Filesystem, MappingKind, MkfsOptions, Reservation};
use ubtrfs_iomap::{FileOffset as Offset, Reach};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimArray, SimDevice};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 600;
const SIZE: usize = (BLOCKS * BLOCK) as usize;

fn byte_of(block: u64) -> u8 {
    1 + u8::try_from(block % 251).unwrap()
}

/// Every other block is data.
fn expected() -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    for block in (1..BLOCKS).step_by(2) {
        let at = usize::try_from(block * BLOCK).unwrap();
        bytes[at..at + BLOCK as usize].fill(byte_of(block));
    }
    bytes
}

/// One such file, whose extents fill several leaves.
fn made() -> Image {
    let options = MkfsOptions { no_holes: true, block_group_tree: false, ..MkfsOptions::default() };
    let (device, fs) = empty(&options);
    let mut handle = fs.begin(Reservation::create(1)).unwrap();
    let id = handle.create(fs.top_level(), b"file", &new(0o100_644)).unwrap();
    drop(handle);
    let file = fs.open_data(id).unwrap();
    for block in (1..BLOCKS).step_by(2) {
        file.write(Offset::new(block * BLOCK), &[byte_of(block); BLOCK as usize]).unwrap();
    }
    file.fsync().unwrap();
    fs.sync().unwrap();
    drop((file, fs));
    device.image()
}

/// What to do while reads fail. Errors are as good as what is right.
type Job = fn(&Filesystem, &[u8]) -> Result<(), Error>;

/// What was read must be a front of what is expected there.
fn assert_right(found: &[u8], expected: &[u8], what: &str) {
    let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert!(
        wrong.is_none(),
        "{what}: wrong from {wrong:?} on, in block {:?}",
        wrong.unwrap() / 4096
    );
}

fn read_through_memory(fs: &Filesystem, expected: &[u8]) -> Result<(), Error> {
    let file = fs.open_data(path(fs, "file")?)?;
    let mut found = vec![0; SIZE];
    // As a program does that tries again where it was told of an error.
    let (mut done, mut failed) = (0, Ok(()));
    for _ in 0..4 {
        match file.read(Offset::new(done as u64), &mut found[done..]) {
            Ok(len) => done += len,
            Err(error) => failed = Err(error),
        }
        assert_right(&found[..done], expected, "through memory");
    }
    failed
}

fn read_by_parts(fs: &Filesystem, expected: &[u8]) -> Result<(), Error> {
    let file = fs.open_data(path(fs, "file")?)?;
    let mut failed = Ok(());
    for (index, part) in expected.chunks(4096).enumerate() {
        let mut found = [0; 4096];
        for _ in 0..2 {
            match file.read(Offset::new(index as u64 * BLOCK), &mut found) {
                Ok(len) => assert_right(&found[..len], part, "by parts"),
                Err(error) => failed = Err(error),
            }
        }
    }
    failed
}

fn read_directly(fs: &Filesystem, expected: &[u8]) -> Result<(), Error> {
    let file = fs.open_data(path(fs, "file")?)?;
    let mut found = vec![0; SIZE];
    let (mut done, mut failed) = (0, Ok(()));
    for _ in 0..4 {
        match file.direct_read(Offset::new(done as u64), &mut found[done..]) {
            Ok(len) => done += len,
            Err(error) => failed = Err(error),
        }
        assert_right(&found[..done], expected, "directly");
    }
    failed
}

/// Of a file that nobody has open, again and again where the last piece ended.
fn read_closed(fs: &Filesystem, expected: &[u8]) -> Result<(), Error> {
    let mut file = fs.open_file(path(fs, "file")?)?;
    let mut failed = Ok(());
    let mut at = 0;
    while at < SIZE {
        let mut found = [0; 8192];
        for _ in 0..3 {
            match file.read(FileOffset(at as u64), &mut found) {
                Ok(len) => assert_right(&found[..len], &expected[at..], "closed"),
                Err(error) => failed = Err(error),
            }
        }
        at += 8192;
    }
    failed
}

fn seek(fs: &Filesystem, _: &[u8]) -> Result<(), Error> {
    let file = fs.open_data(path(fs, "file")?)?;
    let mut failed = Ok(());
    for block in 0..BLOCKS {
        let at = Offset::new(block * BLOCK);
        let (hole, data) = if block % 2 == 0 { (block, block + 1) } else { (block + 1, block) };
        for _ in 0..2 {
            match file.seek_data(at) {
                Ok(found) => assert_eq!(found.bytes(), data * BLOCK, "data from {block}"),
                Err(error) => failed = Err(error),
            }
            match file.seek_hole(at) {
                Ok(found) => assert_eq!(found.bytes(), hole * BLOCK, "hole from {block}"),
                Err(error) => failed = Err(error),
            }
        }
    }
    failed
}

fn walk(fs: &Filesystem, _: &[u8]) -> Result<(), Error> {
    let id = path(fs, "file")?;
    let mut at = 0;
    for mapping in fs.file_extents(id, FileOffset(0))? {
        let mapping = mapping?;
        assert_eq!((mapping.offset.0, mapping.len_bytes), (at, BLOCK));
        assert_eq!(mapping.kind == MappingKind::Data, at / BLOCK % 2 == 1);
        at += BLOCK;
    }
    assert_eq!(at, BLOCKS * BLOCK);
    Ok(())
}

/// Part of each block of data. What is told to be written is asserted behind.
fn write_parts(fs: &Filesystem, _: &[u8]) -> Result<(), Error> {
    let file = fs.open_data(path(fs, "file")?)?;
    let mut failed = Ok(());
    for block in (1..BLOCKS).step_by(2) {
        for _ in 0..2 {
            if let Err(error) = file.write(Offset::new(block * BLOCK + 9), &[byte_of(block); 50]) {
                failed = Err(error);
            }
        }
    }
    file.fsync()?;
    failed
}

const JOBS: [(&str, Job, u64); 7] = [
    ("reading through memory", read_through_memory, 10),
    ("reading by parts", read_by_parts, 10),
    ("reading directly", read_directly, 10),
    ("reading what is not open", read_closed, 10),
    ("looking for data and holes", seek, 6),
    ("telling the extents", walk, 6),
    ("writing parts of blocks", write_parts, 10),
];

#[test]
fn file_whose_nth_read_fails_shows_no_holes_where_it_has_data() {
    let image = made();
    for (name, job, reads_min) in JOBS {
        for stays in [false, true] {
            let mut nth = 0;
            while fails(&image, name, job, nth, stays) {
                // Each of the first, which are of leaves.
                nth += 1 + nth / 16;
            }
            eprintln!("{name} {nth}");
            assert!(nth >= reads_min.min(1), "{name} makes {nth} reads only");
        }
    }
}

/// Whether there was such a read.
fn fails(image: &Image, name: &str, job: Job, nth: u64, stays: bool) -> bool {
    let array = SimArray::of_images(vec![image.clone()]);
    let device: Arc<SimDevice> = Arc::new(array.device(0));
    let fs = open(&device);
    let request = Request::Read;
    device.plan(Fault { device: None, request, after: nth, effect: Effect::Fail, stays });
    let expected = expected();
    let result = job(&fs, &expected);
    let is_over = array.strikes().is_empty();
    device.forget_faults();
    let what = format!("{name}, read {nth}, stays: {stays}: {result:?}");
    assert!(result.is_ok() || !is_over, "{what}");
    // None of the jobs changes what the file holds.
    let whole = |fs: &Filesystem| {
        let mut found = vec![0; SIZE];
        let id = path(fs, "file").unwrap();
        assert_eq!(fs.open_data(id).unwrap().read_whole(Offset::ZERO, &mut found).unwrap(), SIZE);
        assert_right(&found, &expected, &what);
    };
    // In memory a transaction that was aborted shows what was half done.
    if !matches!(result, Err(Error::Aborted { .. })) {
        whole(&fs);
    }
    drop(fs);
    check(&device, &what);
    whole(&open(&device));
    !is_over
}

fn failing_read(device: &SimDevice, after: u64, stays: bool) {
    device.plan(Fault { device: None, request: Request::Read, after, effect: Effect::Fail, stays });
}

fn whole_of(fs: &Filesystem) -> Vec<u8> {
    let file = fs.open_data(path(fs, "file").unwrap()).unwrap();
    let mut found = vec![0; usize::try_from(file.size().bytes()).unwrap()];
    assert_eq!(file.read_whole(Offset::ZERO, &mut found).unwrap(), found.len());
    found
}

/// Runs a job on the file with its nth read failing, for each, and looks behind each that failed: what is shown then must be what is shown
/// after reopening, too.
fn with_each_failing(
    name: &str,
    change: impl Fn(&DataFile) -> Result<(), Error>,
    look: impl Fn(&DataFile, &str),
) {
    let image = made();
    for stays in [false, true] {
        for nth in 0.. {
            let array = SimArray::of_images(vec![image.clone()]);
            let device: Arc<SimDevice> = Arc::new(array.device(0));
            let fs = open(&device);
            let file = fs.open_data(path(&fs, "file").unwrap()).unwrap();
            file.write(Offset::new(BLOCK), &[0xEE; BLOCK as usize]).unwrap();
            failing_read(&device, nth, stays);
            let result = change(&file);
            let is_over = array.strikes().is_empty();
            device.forget_faults();
            let what = format!("{name}, read {nth}, stays: {stays}: {result:?}");
            if is_over {
                result.unwrap();
                assert!(nth > 0, "{what}");
                break;
            }
            let is_aborted = matches!(result, Err(Error::Aborted { .. }));
            if !is_aborted {
                if result.is_err() {
                    look(&file, &what);
                }
                // What was lost is told once.
                file.fsync().ok();
                file.fsync().unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            let shown = (!is_aborted).then(|| whole_of(&fs));
            drop((file, fs));
            check(&device, &what);
            if let Some(shown) = shown {
                assert!(whole_of(&open(&device)) == shown, "{what}: it was shown otherwise");
            }
        }
    }
}

/// What was dirty in a range that was to become a hole, or zeros, was thrown away before anything could fail: then what had been there
/// before came back, and fsync said that all was well.
#[test]
fn hole_that_cannot_be_made_brings_nothing_older_back() {
    let look = |file: &DataFile, what: &str| {
        let mut found = [1; BLOCK as usize];
        file.read(Offset::new(BLOCK), &mut found).unwrap();
        assert!(
            found == [0xEE; BLOCK as usize] || found == [0; BLOCK as usize],
            "{what}: {}",
            found[0]
        );
    };
    let all = SIZE as u64;
    with_each_failing("a hole", |file| file.punch_hole(Offset::ZERO, all), look);
    let zeroed = |file: &DataFile| file.allocate_zeroed(Offset::ZERO, all, Reach::Stays);
    with_each_failing("zeros", zeroed, look);
}

/// A truncation that failed left a file that ended in memory where the medium had more. Then fsync promised an end that was not there, and
/// what had been cut off was shown where zeros belong.
#[test]
fn truncation_that_fails_leaves_one_end() {
    for size in [0, 5000] {
        let cut = |file: &DataFile| file.truncate(Offset::new(size));
        with_each_failing("written behind", cut, |file, _| {
            file.write(Offset::ZERO, b"x").unwrap();
        });
        with_each_failing("grown behind", cut, |file, what| {
            let end = file.size().bytes();
            assert!(end >= size, "{what}");
            file.truncate(Offset::new(end + 100 * BLOCK)).unwrap();
            let mut found = vec![1; 100 * BLOCK as usize];
            let len = file.read_whole(Offset::new(end), &mut found).unwrap();
            assert!(found == vec![0; len], "{what}: what was cut off is back");
        });
        with_each_failing("closed behind", cut, |_, _| {});
    }
}
