//! FIEMAP of ranges at and over the limits of what a file can have: the engine's call tells what the kernel's tells of the same files, as
//! far as it lies in the range, and where Linux refuses a range, the engine has nothing to tell of it.

mod common;

use std::path::Path;

use common::full::{create, make, open};
use ubtrfs_engine::{DataFile, Filesystem};
use ubtrfs_iomap::{FiemapExtent, FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::{KernelMount, Oracle, oracle, run};

const BLOCK: u64 = 4096;
/// The last byte that a file can have is in front of this.
const MAX: u64 = i64::MAX.cast_unsigned();
/// Where most of the files end.
const SIZE: u64 = 10_000;

const STARTS: [u64; 15] = [
    0,
    1,
    BLOCK - 1,
    BLOCK,
    BLOCK + 904,
    2 * BLOCK,
    SIZE - 1,
    SIZE,
    3 * BLOCK,
    10 * BLOCK,
    MAX - 4095,
    MAX - 1,
    MAX,
    MAX + 1,
    u64::MAX,
];
const LENS: [u64; 9] = [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 1, MAX - 4096, MAX, MAX + 1, u64::MAX];
/// Extents that there is room for; none asks Linux for their number.
const COUNTS: [usize; 4] = [0, 1, 2, 100];

const EINVAL: i32 = 22;
const EFBIG: i32 = 27;

/// FIEMAP_EXTENT_*.
const LAST: u32 = 1;
const UNKNOWN: u32 = 2;
const DELALLOC: u32 = 4;
const ENCODED: u32 = 8;
const NOT_ALIGNED: u32 = 0x100;
const DATA_INLINE: u32 = 0x200;
const UNWRITTEN: u32 = 0x800;
const SHARED: u32 = 0x2000;

/// Takes a path and calls, each as start,length,count; tells of each the errno, or how many extents there are, and those.
const SCRIPT: &str = "
import fcntl, struct, sys
with open(sys.argv[1], 'rb') as file:
    for call in sys.argv[2:]:
        start, length, count = map(int, call.split(','))
        room = bytearray(struct.pack('=QQIIII', start, length, 1, 0, count, 0) + bytes(56 * count))
        try:
            fcntl.ioctl(file, 0xC020660B, room)
        except OSError as error:
            print('error', error.errno)
            continue
        mapped = struct.unpack_from('=I', room, 20)[0]
        told = [struct.unpack_from('=QQQQQI', room, 32 + 56 * at) for at in range(min(mapped, count))]
        print(mapped, *(f'{e[0]},{e[1]},{e[2]},{e[5]}' for e in told))
";

/// As Linux tells it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Extent {
    logical: u64,
    physical: u64,
    len_bytes: u64,
    flags: u32,
}

impl Extent {
    fn of_engine(extent: &FiemapExtent) -> Self {
        let of = extent.flags;
        let flags = [
            (of.is_last, LAST),
            (of.is_delalloc, DELALLOC | UNKNOWN),
            (of.is_unwritten, UNWRITTEN),
            (of.is_encoded, ENCODED),
            (of.is_inline, DATA_INLINE | NOT_ALIGNED),
            (of.is_shared, SHARED),
        ];
        Self {
            logical: extent.range.start.bytes(),
            physical: extent.address.unwrap_or(0),
            len_bytes: extent.range.len_bytes(),
            flags: flags.iter().filter(|(is, _)| *is).map(|(_, bits)| bits).sum(),
        }
    }

    /// Linux tells an extent whole, and the engine what of it lies in the blocks of the range; of what is encoded all has the place of its
    /// beginning. One whose end is cut off is not the last.
    fn cut_to(&self, range: FileRange) -> Self {
        let whole = range.round_out(BLOCK);
        // That of a file's last byte ends behind where a file can.
        let (start, end) = (whole.start.bytes(), whole.end.bytes());
        let own_end = self.logical + self.len_bytes;
        let logical = self.logical.max(start);
        let into = if self.flags & ENCODED == 0 { logical - self.logical } else { 0 };
        let cut = if own_end > end { LAST } else { 0 };
        Self {
            logical,
            physical: self.physical + into,
            len_bytes: own_end.min(end) - logical,
            flags: self.flags & !cut,
        }
    }

    fn of_kernel(text: &str) -> Self {
        let numbers: Vec<u64> = text.split(',').map(|number| number.parse().unwrap()).collect();
        let [logical, physical, len_bytes, flags] = numbers[..] else { panic!("{text}") };
        Self { logical, physical, len_bytes, flags: u32::try_from(flags).unwrap() }
    }
}

/// A range, and for how many extents there is room.
#[derive(Clone, Copy, Debug)]
struct Call {
    start: u64,
    len_bytes: u64,
    count: usize,
}

fn calls() -> Vec<Call> {
    let mut calls = Vec::new();
    for start in STARTS {
        for len_bytes in LENS {
            calls.extend(COUNTS.map(|count| Call { start, len_bytes, count }));
        }
    }
    calls
}

impl Call {
    fn range(self) -> FileRange {
        FileRange::with_len(FileOffset::new(self.start), self.len_bytes)
    }
}

fn by_engine(file: &DataFile, call: Call) -> Vec<Extent> {
    let extents = file.fiemap(call.range(), call.count, FiemapSync::WriteBack).unwrap();
    extents.iter().map(Extent::of_engine).collect()
}

/// The errno, or how many extents, and as many of them as there is room for.
fn by_kernel(path: &Path, calls: &[Call]) -> Vec<Result<(usize, Vec<Extent>), i32>> {
    let mut arguments = vec!["-c".into(), SCRIPT.into(), path.as_os_str().to_owned()];
    let text = |call: &Call| format!("{},{},{}", call.start, call.len_bytes, call.count).into();
    arguments.extend(calls.iter().map(text));
    let answer = |line: &str| match line.strip_prefix("error ") {
        Some(error) => Err(error.parse().unwrap()),
        None => {
            let mut words = line.split(' ');
            let mapped = words.next().unwrap().parse().unwrap();
            Ok((mapped, words.map(Extent::of_kernel).collect()))
        }
    };
    run("python3", arguments).lines().map(answer).collect()
}

fn write(file: &DataFile, offset: u64, len_bytes: u64) {
    let bytes = vec![7; usize::try_from(len_bytes).unwrap()];
    assert_eq!(file.write(FileOffset::new(offset), &bytes).unwrap(), bytes.len());
}

/// Files with data around a hole, and whatever else lies at their ends.
fn files(fs: &Filesystem) -> Vec<(&'static str, DataFile)> {
    let file = |name: &'static str, bits: u64| (name, create(fs, name, bits).unwrap());
    let around_hole = |name: &'static str, bits| {
        let (name, file) = file(name, bits);
        write(&file, 0, BLOCK);
        write(&file, 2 * BLOCK, SIZE - 2 * BLOCK);
        (name, file)
    };
    let allocated = around_hole("allocated behind the end", 0);
    allocated.1.allocate(FileOffset::new(8 * BLOCK), 4 * BLOCK, Reach::Stays).unwrap();
    let largest = around_hole("largest", 0);
    largest.1.truncate(FileOffset::MAX).unwrap();
    let to_the_end = around_hole("to the end", 0);
    write(&to_the_end.1, MAX - 2 * BLOCK + 1, 2 * BLOCK - 1);
    let inline = file("inline", 0);
    write(&inline.1, 0, 100);
    let packed = file("packed", flags::COMPRESS);
    write(&packed.1, 0, 4 * BLOCK);
    vec![
        file("empty", 0),
        around_hole("around a hole", 0),
        allocated,
        largest,
        to_the_end,
        inline,
        packed,
    ]
}

#[test]
fn extents_of_ranges_at_the_limits_are_told_as_by_the_kernel() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let fs = open(&image);
    let files = files(&fs);
    fs.sync().unwrap();
    let calls = calls();
    let ours: Vec<(&str, Vec<_>)> = files
        .into_iter()
        .map(|(name, file)| (name, calls.iter().map(|call| by_engine(&file, *call)).collect()))
        .collect();
    drop(fs);
    let mount = KernelMount::read_only(&image, "");
    let mut differences = Vec::new();
    let mut refused = [0; 2];
    for (name, ours) in ours {
        let theirs = by_kernel(&mount.path().join(name), &calls);
        assert_eq!(theirs.len(), calls.len(), "{name}");
        for ((call, ours), theirs) in calls.iter().zip(&ours).zip(theirs) {
            let is_same = match &theirs {
                // What the engine has no error for: there is no byte in such a range.
                Err(errno) => {
                    let is_empty = call.len_bytes == 0;
                    refused[usize::from(is_empty)] += 1;
                    assert!(call.start >= MAX || is_empty, "{name}, {call:?}: {errno}");
                    assert_eq!(*errno, if is_empty { EINVAL } else { EFBIG }, "{name}, {call:?}");
                    ours.is_empty()
                }
                // Linux only counts then.
                Ok((_, told)) if call.count == 0 => told.is_empty() && ours.is_empty(),
                Ok((mapped, told)) => {
                    let cut = told.iter().map(|extent| extent.cut_to(call.range()));
                    *mapped == told.len() && cut.eq(ours.iter().cloned())
                }
            };
            if !is_same {
                differences
                    .push(format!("{name}, {call:?}:\n  kernel {theirs:?}\n  engine {ours:?}"));
            }
        }
    }
    mount.unmount();
    assert!(refused.iter().all(|count| *count > 0), "{refused:?}");
    assert!(
        differences.is_empty(),
        "{}\n{} differences",
        differences.join("\n"),
        differences.len()
    );
}
