//! What the kernel does with an image or device: its mounts and swap areas, loop devices included.
//!
//! A loop device that backs a mount takes no lock on the image that we could see, and the devices
//! of a btrfs mount do not show in the mount table except for one. So both are followed through
//! sysfs: image to loop devices and their partitions, btrfs filesystem to its devices.
//!
//! This is a look at one moment, at open and then now and again while it is written: the kernel may mount an image that a server
//! still brings to its end. A mount that comes between is met by the check of the superblock before each commit.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Sysfs counts in sectors of this many bytes, whatever the device's are.
const SYSFS_SECTOR_BYTES: u64 = 512;

/// Whose use of the bytes is a conflict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Any use by the kernel.
    Write,
    /// A btrfs mount that the kernel may write through: what it has on the medium is in motion.
    Read,
}

/// Refuses bytes that the kernel has mounted or swaps to.
///
/// # Errors
/// `MountedByKernel` with the place. Where `/sys` or `/proc` cannot be read nothing is known, and
/// nothing is refused.
pub(crate) fn check_unused(path: &Path, range: Range<u64>, purpose: Purpose) -> Result<()> {
    let Some(file) = FileId::of(path) else { return Ok(()) };
    check(file, path, range, purpose)
}

/// As [`check_unused`], to write to an open file, which may have another name by now.
///
/// # Errors
/// As there.
pub(crate) fn check_file_unused(file: &fs::File, path: &Path, range: Range<u64>) -> Result<()> {
    let Ok(metadata) = file.metadata() else { return Ok(()) };
    check(FileId::of_metadata(&metadata), path, range, Purpose::Write)
}

fn check(file: FileId, path: &Path, range: Range<u64>, purpose: Purpose) -> Result<()> {
    let mounts = read_mounts();
    let refuse =
        |place: String| Err(Error::MountedByKernel { device: path.display().to_string(), place });
    for device in block_devices_of(file) {
        if device.range.start >= range.end || range.start >= device.range.end {
            continue;
        }
        let through = match file {
            FileId::Block(number) if number == device.number => String::new(),
            _ => format!(" through {}", device.name),
        };
        if let Some(members) = btrfs_members_with(device.number) {
            let mount = mounts.iter().find(|mount| {
                mount.is_btrfs && mount.source.is_some_and(|source| members.contains(&source))
            });
            match mount {
                Some(mount) if purpose == Purpose::Read && mount.read_only => {}
                Some(mount) => return refuse(format!("on {}{through}", mount.point.display())),
                None => return refuse(format!("where this process does not see it{through}")),
            }
        } else if purpose == Purpose::Write {
            if let Some(mount) = mounts.iter().find(|mount| mount.is_of(device.number)) {
                return refuse(format!("on {}{through}", mount.point.display()));
            }
            if swaps().any(|swap| swap == FileId::Block(device.number)) {
                return refuse(format!("as swap{through}"));
            }
        }
    }
    if purpose == Purpose::Write && swaps().any(|swap| swap == file) {
        return refuse("as swap".to_owned());
    }
    Ok(())
}

/// Device number, as in `st_rdev`.
type BlockNumber = u64;

/// What makes two paths the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileId {
    Block(BlockNumber),
    Regular { filesystem: u64, inode: u64 },
}

impl FileId {
    fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|metadata| Self::of_metadata(&metadata))
    }

    fn of_metadata(metadata: &fs::Metadata) -> Self {
        if metadata.file_type().is_block_device() {
            Self::Block(metadata.rdev())
        } else {
            Self::Regular { filesystem: metadata.dev(), inode: metadata.ino() }
        }
    }
}

/// A block device through which the kernel reaches bytes of the file.
#[derive(Debug)]
struct BlockDevice {
    number: BlockNumber,
    name: String,
    /// The bytes of the file that it shows.
    range: Range<u64>,
}

/// The device itself, its partitions, the disk that it is a partition of, and the loop devices
/// on any of them.
fn block_devices_of(file: FileId) -> Vec<BlockDevice> {
    let mut found = Vec::new();
    if let FileId::Block(number) = file {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        if let Ok(dir) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) {
            push_disk(&dir, 0..u64::MAX, &mut found);
            if dir.join("partition").exists()
                && let Some(disk) = dir.parent()
                && let Some(number) = block_number(&disk.join("dev"))
            {
                found.push(BlockDevice { number, name: dev_name(disk), range: 0..u64::MAX });
            }
        } else {
            found.push(BlockDevice { number, name: "it".to_owned(), range: 0..u64::MAX });
        }
    }
    for disk in read_dir("/sys/block") {
        let backing = fs::read_to_string(disk.join("loop/backing_file"));
        let Ok(backing) = backing else { continue };
        if FileId::of(Path::new(backing.trim_end_matches('\n'))) != Some(file) {
            continue;
        }
        let start = read_number(&disk.join("loop/offset")).unwrap_or(0);
        let end = match read_number(&disk.join("loop/sizelimit")) {
            None | Some(0) => u64::MAX,
            Some(len) => start.saturating_add(len),
        };
        push_disk(&disk, start..end, &mut found);
    }
    found
}

/// A disk whose sysfs directory is `dir`, which shows `range` of the file, and its partitions.
fn push_disk(dir: &Path, range: Range<u64>, found: &mut Vec<BlockDevice>) {
    let Some(number) = block_number(&dir.join("dev")) else { return };
    for partition in read_dir(dir).filter(|entry| entry.join("partition").exists()) {
        let bytes = |name| {
            let sectors: u64 = read_number(&partition.join(name))?;
            sectors.checked_mul(SYSFS_SECTOR_BYTES)
        };
        let Some((number, (start, len))) =
            block_number(&partition.join("dev")).zip(bytes("start").zip(bytes("size")))
        else {
            continue;
        };
        let start = range.start.saturating_add(start);
        let name = dev_name(&partition);
        found.push(BlockDevice { number, name, range: start..start.saturating_add(len) });
    }
    found.push(BlockDevice { number, name: dev_name(dir), range });
}

/// The devices of the mounted btrfs filesystem that this one belongs to.
fn btrfs_members_with(number: BlockNumber) -> Option<Vec<BlockNumber>> {
    read_dir("/sys/fs/btrfs").find_map(|filesystem| {
        let members: Vec<BlockNumber> = read_dir(filesystem.join("devices"))
            .filter_map(|device| block_number(&device.join("dev")))
            .collect();
        members.contains(&number).then_some(members)
    })
}

/// A line of the mount table.
#[derive(Debug)]
struct Mount {
    /// The device number that files on it have; not a block device's for btrfs.
    number: BlockNumber,
    point: PathBuf,
    is_btrfs: bool,
    /// The block device it names as its source.
    source: Option<BlockNumber>,
    /// The filesystem, not only this mount of it.
    read_only: bool,
}

impl Mount {
    fn is_of(&self, number: BlockNumber) -> bool {
        self.number == number || self.source == Some(number)
    }

    /// Reads a line as proc(5) has it: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3
    /// /dev/root rw`.
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(2);
        let number = parse_number(front.next()?)?;
        let point = unescape(front.nth(1)?);
        let mut back = back.split(' ');
        let is_btrfs = back.next()? == "btrfs";
        let source = match FileId::of(&unescape(back.next()?)) {
            Some(FileId::Block(number)) => Some(number),
            _ => None,
        };
        let read_only = back.next()?.split(',').any(|option| option == "ro");
        Some(Self { number, point, is_btrfs, source, read_only })
    }
}

fn read_mounts() -> Vec<Mount> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    String::from_utf8_lossy(&table).lines().filter_map(Mount::parse).collect()
}

/// The kernel writes space, tab, newline and backslash as `\` and three octal digits.
fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let byte = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

fn swaps() -> impl Iterator<Item = FileId> {
    let table = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let paths: Vec<PathBuf> =
        table.lines().skip(1).filter_map(|line| Some(unescape(line.split(' ').next()?))).collect();
    paths.into_iter().filter_map(|path| FileId::of(&path))
}

fn read_dir(path: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn block_number(path: &Path) -> Option<BlockNumber> {
    parse_number(fs::read_to_string(path).ok()?.trim())
}

fn parse_number(text: &str) -> Option<BlockNumber> {
    let (major, minor) = text.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn dev_name(dir: &Path) -> String {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    format!("/dev/{}", name.replace('!', "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_a_mount_line_finds_its_parts() {
        let line = r"40 27 0:35 /@ /mnt/a\040b\134c rw,noatime shared:1 - btrfs /dev/null ro,ssd";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.point, Path::new(r"/mnt/a b\c"));
        assert!(mount.is_btrfs && mount.read_only);
        assert_eq!(mount.number, rustix::fs::makedev(0, 35));
    }

    #[test]
    fn parse_of_a_broken_mount_line_is_nothing() {
        for line in ["", " - ", "1 2 3 4 - 5", "1 2 a:b / / rw - btrfs x rw"] {
            assert!(Mount::parse(line).is_none(), "{line}");
        }
        assert_eq!(unescape(r"\04").as_os_str(), r"\04");
        assert_eq!(unescape(r"\999").as_os_str(), r"\999");
    }
}
