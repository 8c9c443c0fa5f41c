//! What the kernel does with an image or device: its mounts and swap areas, loop devices included.
//!
//! A loop device that backs a mount takes no lock on the image that we could see, and the devices
//! of a btrfs mount do not show in the mount table except for one. So both are followed through
//! sysfs: image to loop devices and their partitions, btrfs filesystem to its devices.
//!
//! This is a look at one moment, at open and then now and again while it is written: the kernel may mount an image that is open here. A
//! mount that has come and gone between is told by the superblock that it leaves, which is compared after each look and before each
//! commit.
//!
//! 1. No filesystem is asked for anything: a loop device or a mount may be of a file on one that does not answer, or on one that this
//!    process serves, whose threads all wait for the commit that looks here. So what is told of others is compared by the name that the
//!    kernel has for it, and by what the kernel has in memory behind that name ([`cached`]).

use std::cell::LazyCell;
use std::ffi::OsString;
use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};

use crate::error::{Error, Result};

/// Sysfs counts in sectors of this many bytes, whatever the device's are.
const SYSFS_SECTOR_BYTES: u64 = 512;

/// How often a path is looked up in memory.
const CACHED_TRIES: u32 = 3;

/// Whose use of the bytes is a conflict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Any use by the kernel.
    Write,
    /// A btrfs mount that the kernel may write through: what it has on the medium is in motion.
    Read,
}

/// Refuses bytes of a file that the kernel has mounted or swaps to.
///
/// # Errors
/// `MountedByKernel` with the place. Where `/sys` or `/proc` cannot be read nothing is known, and
/// nothing is refused.
pub(crate) fn check_unused(
    file: &fs::File,
    path: &Path,
    range: Range<u64>,
    purpose: Purpose,
) -> Result<()> {
    let Some(file) = Target::of_file(file) else { return Ok(()) };
    check(&file, path, range, purpose)
}

/// As [`check_unused`], to write to a device that cannot be opened.
///
/// # Errors
/// As there.
pub(crate) fn check_device_unused(path: &Path) -> Result<()> {
    let Some(device) = Target::of_device(path) else { return Ok(()) };
    check(&device, path, 0..u64::MAX, Purpose::Write)
}

fn check(file: &Target, path: &Path, range: Range<u64>, purpose: Purpose) -> Result<()> {
    let mounts = LazyCell::new(read_mounts);
    let refuse =
        |place: String| Err(Error::MountedByKernel { device: path.display().to_string(), place });
    for device in block_devices_of(file) {
        if device.range.start >= range.end || range.start >= device.range.end {
            continue;
        }
        let through = match file.id {
            FileId::Block(number) if number == device.number => String::new(),
            _ => format!(" through {}", device.name),
        };
        let target = Target::of_number(device.number);
        if let Some(members) = btrfs_members_with(device.number) {
            let mount = mounts.iter().find(|mount| {
                mount.is_btrfs && members.iter().any(|member| member.is_at(&mount.source))
            });
            match mount {
                Some(mount) if purpose == Purpose::Read && mount.read_only => {}
                Some(mount) => return refuse(format!("on {}{through}", mount.point.display())),
                None => return refuse(format!("where this process does not see it{through}")),
            }
        } else if purpose == Purpose::Write {
            let is_of =
                |mount: &&Mount| mount.number == device.number || target.is_at(&mount.source);
            if let Some(mount) = mounts.iter().find(is_of) {
                return refuse(format!("on {}{through}", mount.point.display()));
            }
            if swaps().any(|swap| target.is_at(&swap)) {
                return refuse(format!("as swap{through}"));
            }
        }
    }
    if purpose == Purpose::Write && swaps().any(|swap| file.is_at(&swap)) {
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
    /// Of an open file, as far as the kernel has it in memory.
    fn of_open(file: impl AsFd) -> Option<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(file, c"", flags, StatxFlags::TYPE | StatxFlags::INO).ok()?;
        Some(match FileType::from_raw_mode(about.stx_mode.into()) {
            FileType::BlockDevice => {
                Self::Block(rustix::fs::makedev(about.stx_rdev_major, about.stx_rdev_minor))
            }
            _ => Self::Regular {
                filesystem: rustix::fs::makedev(about.stx_dev_major, about.stx_dev_minor),
                inode: about.stx_ino,
            },
        })
    }
}

/// What a path leads to, where the kernel has all of the way in memory. So it has of what is open; not where the filesystem, as one of a network,
/// would have to be asked whether that is still so.
///
/// Source: RESOLVE_CACHED of openat2(2), from Linux 5.12 on. Before, nothing is found, and names alone are compared.
fn cached(path: &Path) -> Option<FileId> {
    let look = || {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED)
    };
    // What changes beside it at the moment makes it end in the same way.
    let file = (0..CACHED_TRIES).find_map(|_| look().ok())?;
    FileId::of_open(file)
}

/// An image or a device, as others may name it.
#[derive(Debug)]
struct Target {
    id: FileId,
    names: Vec<PathBuf>,
}

impl Target {
    fn of_file(file: &fs::File) -> Option<Self> {
        let id = match FileId::of_open(file) {
            Some(id) => id,
            // It is kept from this process.
            None => Self::id_of_metadata(&file.metadata().ok()?),
        };
        let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
        // Of files that were removed several may have had one name.
        let name = name.filter(|name| !name.as_os_str().as_bytes().ends_with(b" (deleted)"));
        Some(Self { id, names: name.into_iter().collect() })
    }

    fn of_device(path: &Path) -> Option<Self> {
        match Self::id_of_metadata(&fs::metadata(path).ok()?) {
            FileId::Block(number) => Some(Self::of_number(number)),
            FileId::Regular { .. } => None,
        }
    }

    fn id_of_metadata(metadata: &fs::Metadata) -> FileId {
        match metadata.file_type().is_block_device() {
            true => FileId::Block(metadata.rdev()),
            false => FileId::Regular { filesystem: metadata.dev(), inode: metadata.ino() },
        }
    }

    /// A device with the names that the kernel and the device mapper give it.
    fn of_number(number: BlockNumber) -> Self {
        let dir = sysfs_dir(number);
        let mapped = dir.as_ref().and_then(|dir| read_name(&dir.join("dm/name")));
        let mapped = mapped.map(|name| Path::new("/dev/mapper").join(name));
        let name = dir.map(|dir| PathBuf::from(dev_name(&dir)));
        Self { id: FileId::Block(number), names: name.into_iter().chain(mapped).collect() }
    }

    fn is_at(&self, path: &Path) -> bool {
        self.names.iter().any(|name| name == path) || cached(path) == Some(self.id)
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
fn block_devices_of(file: &Target) -> Vec<BlockDevice> {
    let mut found = Vec::new();
    if let FileId::Block(number) = file.id {
        if let Some(dir) = sysfs_dir(number) {
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
        let Some(backing) = read_name(&disk.join("loop/backing_file")) else { continue };
        if !file.is_at(Path::new(&backing)) {
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
fn btrfs_members_with(number: BlockNumber) -> Option<Vec<Target>> {
    read_dir("/sys/fs/btrfs").find_map(|filesystem| {
        let members: Vec<BlockNumber> = read_dir(filesystem.join("devices"))
            .filter_map(|device| block_number(&device.join("dev")))
            .collect();
        let has_it = members.contains(&number);
        has_it.then(|| members.into_iter().map(Target::of_number).collect())
    })
}

/// A line of the mount table.
#[derive(Debug)]
struct Mount {
    /// The device number that files on it have; not a block device's for btrfs.
    number: BlockNumber,
    point: PathBuf,
    is_btrfs: bool,
    /// What it names as its source, a path or not.
    source: PathBuf,
    /// The filesystem, not only this mount of it.
    read_only: bool,
}

impl Mount {
    /// Reads a line as proc(5) has it: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3
    /// /dev/root rw`.
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(2);
        let number = parse_number(front.next()?)?;
        let point = unescape(front.nth(1)?.as_bytes());
        let mut back = back.split(' ');
        let is_btrfs = back.next()? == "btrfs";
        let source = unescape(back.next()?.as_bytes());
        let read_only = back.next()?.split(',').any(|option| option == "ro");
        Some(Self { number, point, is_btrfs, source, read_only })
    }
}

fn read_mounts() -> Vec<Mount> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    String::from_utf8_lossy(&table).lines().filter_map(Mount::parse).collect()
}

/// The kernel writes space, tab, newline and backslash as `\` and three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let byte = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

fn swaps() -> impl Iterator<Item = PathBuf> {
    let table = fs::read("/proc/swaps").unwrap_or_default();
    let names: Vec<PathBuf> = table
        .split(|byte| *byte == b'\n')
        .skip(1)
        .filter_map(|line| line.split(u8::is_ascii_whitespace).next())
        .filter(|name| !name.is_empty())
        .map(unescape)
        .collect();
    names.into_iter()
}

fn sysfs_dir(number: BlockNumber) -> Option<PathBuf> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()
}

fn read_dir(path: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

/// A line of sysfs that is a name.
fn read_name(path: &Path) -> Option<OsString> {
    let mut line = fs::read(path).ok()?;
    line.pop_if(|byte| *byte == b'\n');
    Some(OsString::from_vec(line))
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
        let line = r"40 27 0:35 /@ /mnt/a\040b\134c rw,noatime shared:1 - btrfs /dev/a\040b ro,ssd";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.point, Path::new(r"/mnt/a b\c"));
        assert_eq!(mount.source, Path::new("/dev/a b"));
        assert!(mount.is_btrfs && mount.read_only);
        assert_eq!(mount.number, rustix::fs::makedev(0, 35));
    }

    #[test]
    fn parse_of_a_broken_mount_line_is_nothing() {
        for line in ["", " - ", "1 2 3 4 - 5", "1 2 a:b / / rw - btrfs x rw"] {
            assert!(Mount::parse(line).is_none(), "{line}");
        }
        assert_eq!(unescape(br"\04").as_os_str(), r"\04");
        assert_eq!(unescape(br"\999").as_os_str(), r"\999");
    }

    #[test]
    fn file_is_known_by_its_name_and_by_what_the_kernel_has_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let [path, link, other] = ["file", "link", "other"].map(|name| dir.join(name));
        let file = fs::File::create(&path).unwrap();
        fs::hard_link(&path, &link).unwrap();
        fs::write(&other, b"").unwrap();
        let id = Target::id_of_metadata(&file.metadata().unwrap());
        assert_eq!(FileId::of_open(&file), Some(id));
        let target = Target::of_file(&file).unwrap();
        assert_eq!((target.id, &target.names), (id, &vec![path.clone()]));
        assert!(target.is_at(&path) && target.is_at(&link));
        assert!(!target.is_at(&other) && !target.is_at(&dir.join("nothing")));
        fs::remove_file(&path).unwrap();
        fs::rename(&other, &path).unwrap();
        let target = Target::of_file(&file).unwrap();
        assert!(target.names.is_empty() && !target.is_at(&path) && target.is_at(&link));
    }
}
