//! Offsets and lengths at and over the limits of what a file can have: an open file answers each call as the kernel's btrfs does, with
//! the same number or the same error, and is the same file afterwards. A seek from a negative offset is answered otherwise; both answers
//! are here.

mod common;

use std::path::{Path, PathBuf};

use common::full::{create, open};
use common::judge;
use rustix::fs::{self, FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::{self, Errno};
use ubtrfs_engine::{DataFile, Error, Filesystem};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, oracle, run};

const BLOCK: u64 = 4096;
/// The last byte that a file can have is in front of this.
const MAX: u64 = i64::MAX.cast_unsigned();
const MIN: u64 = i64::MIN.cast_unsigned();
/// A hole in the file that a case begins with; in front of it and behind it, up to `SIZE`, is data.
const HOLE: std::ops::Range<u64> = BLOCK..2 * BLOCK;
const SIZE: u64 = 10_000;

/// To which that file is truncated.
const SIZES: [u64; 4] = [SIZE, 0, MAX - 4095, MAX];
/// At blocks (`MAX` is one byte less than whole blocks), inside of them, around the ends; and negative ones.
const OFFSETS: [u64; 15] = [
    0,
    1,
    HOLE.start,
    HOLE.start + 904,
    SIZE - 1,
    SIZE,
    3 * BLOCK,
    MAX - 8191,
    MAX - 4096,
    MAX - 4095,
    MAX - 1,
    MAX,
    MIN,
    negative(4096),
    negative(1),
];
/// Of what is read or written.
const BUFFER_LENS: [usize; 5] = [0, 1, 4096, 10_000, BUFFER_LEN_MAX];
const BUFFER_LEN_MAX: usize = 16_384;
/// Of ranges, with those that end with the last byte and one behind it.
const RANGE_LENS: [u64; 8] = [0, 1, BLOCK, MAX - 4095, MAX, MIN, negative(4096), negative(1)];

/// As a system call is given it.
const fn negative(count: i64) -> u64 {
    (-count).cast_unsigned()
}

/// Offsets first, then lengths.
#[derive(Clone, Copy, Debug)]
enum Call {
    Read(u64, usize),
    Write(u64, usize),
    Append(usize),
    DirectRead(u64, usize),
    DirectWrite(u64, usize),
    Truncate(u64),
    Allocate(u64, u64, Reach),
    AllocateZeroed(u64, u64, Reach),
    PunchHole(u64, u64),
    ZeroRange(u64, u64),
    SeekData(u64),
    SeekHole(u64),
}

/// How many bytes, or where; 0 of a call that only succeeds.
type Answer = Result<u64, Errno>;

fn calls() -> Vec<Call> {
    let mut calls: Vec<_> = BUFFER_LENS.map(Call::Append).into();
    for at in OFFSETS {
        calls.extend([Call::Truncate(at), Call::SeekData(at), Call::SeekHole(at)]);
        for len in BUFFER_LENS {
            calls.extend([Call::Read(at, len), Call::Write(at, len)]);
            calls.extend([Call::DirectRead(at, len), Call::DirectWrite(at, len)]);
        }
        let upto_last = MAX.checked_sub(at);
        let ends = upto_last.into_iter().flat_map(|len| [len, len + 1]);
        for len in RANGE_LENS.into_iter().chain(ends) {
            for reach in [Reach::Extends, Reach::Stays] {
                calls.push(Call::Allocate(at, len, reach));
                calls.push(Call::AllocateZeroed(at, len, reach));
            }
            calls.extend([Call::PunchHole(at, len), Call::ZeroRange(at, len)]);
        }
    }
    calls
}

/// A file of the engine's, or of the kernel's.
trait Subject {
    fn call(&self, call: Call) -> Answer;
    fn read(&self, at: u64, buffer: &mut [u8]) -> Answer;
    fn size(&self) -> u64;

    /// Makes an empty file the one that a case begins with.
    fn begin(&self, size: u64) {
        for piece in [0..HOLE.start, HOLE.end..SIZE] {
            let len = piece.end - piece.start;
            assert_eq!(self.call(Call::Write(piece.start, buffer_len(len))), Ok(len));
        }
        assert_eq!(self.call(Call::Truncate(size)), Ok(0));
    }

    /// What is at the beginning of the file, and at its end.
    fn ends(&self) -> [Vec<u8>; 2] {
        [0, self.size().saturating_sub(BLOCK)].map(|at| {
            let len = (self.size() - at).min(BUFFER_LEN_MAX as u64);
            let mut bytes = vec![0; buffer_len(len)];
            assert_eq!(self.read(at, &mut bytes), Ok(len));
            bytes
        })
    }
}

fn buffer_len(len_bytes: u64) -> usize {
    usize::try_from(len_bytes).unwrap()
}

struct Ours(DataFile);

impl Subject for Ours {
    fn call(&self, call: Call) -> Answer {
        let file = &self.0;
        let at = FileOffset::new;
        let mut bytes = [7; BUFFER_LEN_MAX];
        let count = |len: usize| len as u64;
        let nothing = |()| 0;
        let result = match call {
            Call::Read(offset, len) => file.read(at(offset), &mut bytes[..len]).map(count),
            Call::Write(offset, len) => file.write(at(offset), &bytes[..len]).map(count),
            Call::Append(len) => file.append(&bytes[..len]).map(|(_, len)| count(len)),
            Call::DirectRead(offset, len) => {
                file.direct_read(at(offset), &mut bytes[..len]).map(count)
            }
            Call::DirectWrite(offset, len) => {
                file.direct_write(at(offset), &bytes[..len]).map(count)
            }
            Call::Truncate(size) => file.truncate(at(size)).map(nothing),
            Call::Allocate(offset, len, reach) => {
                file.allocate(at(offset), len, reach).map(nothing)
            }
            Call::AllocateZeroed(offset, len, reach) => {
                file.allocate_zeroed(at(offset), len, reach).map(nothing)
            }
            Call::PunchHole(offset, len) => file.punch_hole(at(offset), len).map(nothing),
            Call::ZeroRange(offset, len) => file.zero_range(at(offset), len).map(nothing),
            Call::SeekData(offset) => file.seek_data(at(offset)).map(FileOffset::bytes),
            Call::SeekHole(offset) => file.seek_hole(at(offset)).map(FileOffset::bytes),
        };
        result.map_err(|error| errno(&error))
    }

    fn read(&self, at: u64, buffer: &mut [u8]) -> Answer {
        let result = self.0.read(FileOffset::new(at), buffer);
        result.map(|len| len as u64).map_err(|error| errno(&error))
    }

    fn size(&self) -> u64 {
        self.0.size().bytes()
    }
}

/// As a mount answers.
fn errno(error: &Error) -> Errno {
    match error {
        Error::InvalidArgument { .. } => Errno::INVAL,
        Error::NoSpace { .. } => Errno::NOSPC,
        Error::File(ubtrfs_iomap::Error::TooLarge { .. }) => Errno::FBIG,
        Error::File(ubtrfs_iomap::Error::NoData { .. }) => Errno::NXIO,
        Error::File(_) => Errno::INVAL,
        other => panic!("{other}"),
    }
}

struct Theirs(PathBuf);

impl Theirs {
    fn truncate_below_0(&self, size: u64) -> Answer {
        const SCRIPT: &str = "
import os, sys
try:
    os.truncate(sys.argv[1], int(sys.argv[2]))
    print(0)
except OSError as error:
    print(error.errno)
";
        let size = size.cast_signed().to_string();
        let words = ["-c".as_ref(), SCRIPT.as_ref(), self.0.as_os_str(), size.as_ref()];
        match run("python3", words).trim().parse().unwrap() {
            0 => Ok(0),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    fn open(&self, flags: OFlags) -> rustix::fd::OwnedFd {
        fs::open(&self.0, OFlags::RDWR | flags, Mode::empty()).unwrap()
    }
}

impl Subject for Theirs {
    /// `allocate_zeroed` is what Linux calls FALLOC_FL_ZERO_RANGE. The engine's `zero_range` takes no space; Linux has no such call, so
    /// here it makes a hole, which takes none either and reads the same.
    fn call(&self, call: Call) -> Answer {
        let file = self.open(match call {
            Call::DirectRead(..) | Call::DirectWrite(..) => OFlags::DIRECT,
            Call::Append(_) => OFlags::APPEND,
            _ => OFlags::empty(),
        });
        // O_DIRECT wants memory that is aligned as well.
        let mut memory = vec![7; BUFFER_LEN_MAX + buffer_len(BLOCK)];
        let start = memory.as_ptr().align_offset(buffer_len(BLOCK));
        let bytes = &mut memory[start..];
        let count = |len: usize| len as u64;
        let allocate = |mode, offset, len| fs::fallocate(&file, mode, offset, len).map(|()| 0);
        let sized = |reach| match reach {
            Reach::Extends => FallocateFlags::empty(),
            Reach::Stays => FallocateFlags::KEEP_SIZE,
        };
        match call {
            Call::Read(offset, len) | Call::DirectRead(offset, len) => {
                io::pread(&file, &mut bytes[..len], offset).map(count)
            }
            Call::Write(offset, len) | Call::DirectWrite(offset, len) => {
                io::pwrite(&file, &bytes[..len], offset).map(count)
            }
            Call::Append(len) => io::write(&file, &bytes[..len]).map(count),
            // Rustix answers for itself.
            Call::Truncate(size) if size > MAX => self.truncate_below_0(size),
            Call::Truncate(size) => fs::ftruncate(&file, size).map(|()| 0),
            Call::Allocate(offset, len, reach) => allocate(sized(reach), offset, len),
            Call::AllocateZeroed(offset, len, reach) => {
                allocate(FallocateFlags::ZERO_RANGE | sized(reach), offset, len)
            }
            Call::PunchHole(offset, len) | Call::ZeroRange(offset, len) => {
                allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
            }
            Call::SeekData(offset) => fs::seek(&file, SeekFrom::Data(offset)),
            Call::SeekHole(offset) => fs::seek(&file, SeekFrom::Hole(offset)),
        }
    }

    fn read(&self, at: u64, buffer: &mut [u8]) -> Answer {
        io::pread(self.open(OFlags::empty()), buffer, at).map(|len| len as u64)
    }

    fn size(&self) -> u64 {
        std::fs::metadata(&self.0).unwrap().len()
    }
}

/// The same call from the beginning of the file, where one seeks from a negative offset.
fn from_beginning(call: Call) -> Option<Call> {
    match call {
        Call::SeekData(offset) if offset > MAX => Some(Call::SeekData(0)),
        Call::SeekHole(offset) if offset > MAX => Some(Call::SeekHole(0)),
        _ => None,
    }
}

/// What a call does to a new file of the engine's that the kernel's does not do.
fn difference(ours: &Ours, theirs: &Theirs, size: u64, call: Call) -> Option<String> {
    ours.begin(size);
    theirs.begin(size);
    let answers = (theirs.call(call), ours.call(call));
    if let Some(from_beginning) = from_beginning(call) {
        // The one call that is answered otherwise: Linux's btrfs takes a negative offset as the beginning, as does the server of a mount,
        // while Linux's other filesystems say that nothing is there, as the engine does.
        assert_eq!(answers.0, theirs.call(from_beginning), "{}", text(call));
        assert_eq!(answers.1, Err(Errno::NXIO), "{}", text(call));
        return None;
    }
    if answers.0 != answers.1 {
        return Some(format!("kernel {}, engine {}", shown(answers.0), shown(answers.1)));
    }
    let answer = shown(answers.0);
    let sizes = (theirs.size(), ours.size());
    if sizes.0 != sizes.1 {
        let sizes = [sizes.0, sizes.1].map(number);
        return Some(format!("both {answer}, then kernel of {}, engine of {}", sizes[0], sizes[1]));
    }
    let (theirs, ours) = (theirs.ends(), ours.ends());
    (theirs != ours)
        .then(|| format!("both {answer}, then kernel {}, engine {}", runs(&theirs), runs(&ours)))
}

fn case(fs: &Filesystem, directory: &Path, size: u64, call: Call) -> Option<String> {
    let theirs = Theirs(directory.join("file"));
    std::fs::File::create_new(&theirs.0).unwrap();
    let ours = Ours(create(fs, "file", 0).unwrap());
    let difference = difference(&ours, &theirs, size, call);
    drop(ours);
    fs.unlink(fs.top_level(), b"file").unwrap();
    std::fs::remove_file(&theirs.0).unwrap();
    difference.map(|what| format!("file of {}, {}: {what}", number(size), text(call)))
}

fn shown(answer: Answer) -> String {
    answer.map_or_else(|error| error.to_string(), number)
}

fn runs(ends: &[Vec<u8>; 2]) -> String {
    let runs = ends.each_ref().map(|bytes| {
        let runs = bytes.chunk_by(|a, b| a == b);
        runs.map(|run| format!("{} times {}", run.len(), run[0])).collect::<Vec<_>>()
    });
    format!("{runs:?}")
}

/// What is near a limit, relative to it.
fn number(number: u64) -> String {
    match number {
        MAX => "MAX".to_owned(),
        MIN => "MIN".to_owned(),
        0..MAX if number > MAX / 2 => format!("MAX-{}", MAX - number),
        _ => number.cast_signed().to_string(),
    }
}

fn text(call: Call) -> String {
    let text = format!("{call:?}");
    let numbers = text.split_inclusive(|letter: char| !letter.is_ascii_digit()).map(|word| {
        let digits = word.trim_end_matches(|letter: char| !letter.is_ascii_digit());
        let shown = digits.parse().map_or_else(|_| digits.to_owned(), number);
        shown + &word[digits.len()..]
    });
    numbers.collect()
}

#[test]
fn calls_at_the_limits_are_answered_as_the_kernel_does() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = ["ours", "theirs"].map(|name| dir.path().join(name));
    images.iter().for_each(|image| MkfsBtrfs::new().make(image));
    let mount = KernelMount::read_write(&images[1], "");
    let fs = open(&images[0]);
    let mut differences = Vec::new();
    for size in SIZES {
        let found = calls().into_iter().filter_map(|call| case(&fs, mount.path(), size, call));
        differences.extend(found);
    }
    mount.unmount();
    fs.sync().unwrap();
    drop(fs);
    judge(&images[0]);
    assert!(
        differences.is_empty(),
        "{}\n{} differences",
        differences.join("\n"),
        differences.len()
    );
}
