//! What the kernel does, on a mount of its own.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, IFlags, Mode, OFlags, RenameFlags, Timespec,
    Timestamps, XattrFlags,
};
use rustix::io::Errno;
use ubtrfs_testkit::command;

use crate::by_engine::{COMPRESSION, DEVICE, UMASK};
use crate::operation::{Flag, Node, Operation, Ranges, Rename, Space, Way, split};

/// How often it is looked whether deleted subvolumes are gone.
const CLEAN_WAITS_MAX: usize = 6000;
const CLEAN_WAITS_A_WAKING: usize = 200;
/// What direct I/O wants memory to be aligned to.
const SECTOR_BYTES: usize = 4096;
/// Of the compression property, which `chattr` knows and rustix does not.
const NO_COMPRESSION_FLAG: u32 = 0x400;

/// Requests that rustix has no safe call for. The arguments are the files, the offsets and the length;
/// it ends with the error's number, or 255 where data differs.
const RANGE_IOCTLS: &str = r#"
    my ($what, $from, $to, $offset, $len, $to_offset) = @ARGV;
    use Errno;
    my ($rdwr, $nofollow) = (2, 0x20000);
    sysopen(my $source, $from, $rdwr | $nofollow) or exit($! + 0);
    sysopen(my $target, $to, $rdwr | $nofollow) or exit($! + 0);
    if ($what eq "clone") {
        my $range = pack("q Q Q Q", fileno $source, $offset, $len, $to_offset);
        ioctl($target, 0x4020940D, $range) or exit($! + 0);
        exit 0;
    }
    my $range = pack("Q Q S S L q Q Q l L", $offset, $len, 1, 0, 0, fileno $target, $to_offset, 0, 0, 0);
    ioctl($source, 0xC0189436, $range) or exit($! + 0);
    my ($done, $status) = unpack("x40 Q l", $range);
    exit($status < 0 ? -$status : $status > 0 || $done < $len ? 255 : 0);
"#;

/// A mount, and what is open there.
pub struct Kernel<'a> {
    top: &'a Path,
    /// Files that lost the name by which they were opened, and the subvolumes that hold them.
    open: Vec<(File, String)>,
}

impl<'a> Kernel<'a> {
    pub fn new(top: &'a Path) -> Self {
        Self { top, open: Vec::new() }
    }

    /// Does one thing.
    pub fn perform(&mut self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::Make { path, node } => self.make(path, *node),
            Operation::Write { path, offset, data, way } => {
                self.write(path, *offset, &data.0, *way)
            }
            Operation::Truncate { path, size, .. } => self.open(path)?.set_len(*size),
            Operation::Reserve { path, offset, len_bytes, space } => {
                let flags = match space {
                    Space::Allocate => FallocateFlags::empty(),
                    Space::AllocateBehind => FallocateFlags::KEEP_SIZE,
                    Space::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    Space::Zero => FallocateFlags::ZERO_RANGE,
                    Space::ZeroBehind => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                };
                Ok(rustix::fs::fallocate(self.open(path)?, flags, *offset, *len_bytes)?)
            }
            Operation::Clone(ranges) => self.range_ioctl("clone", ranges),
            Operation::Dedupe(ranges) => self.dedupe(ranges),
            Operation::Copy(ranges) => self.copy(ranges),
            Operation::Fsync { path } => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
                let file = rustix::fs::open(self.at(path), flags, Mode::empty())?;
                Ok(rustix::fs::fsync(file)?)
            }
            // It begins to free what was deleted behind a commit.
            Operation::Commit | Operation::Clean { part: Some(_) } => {
                btrfs(&["filesystem", "sync"], &[self.top]).map(drop)
            }
            Operation::Clean { part: None } => {
                self.close_deleted();
                clean(self.top)
            }
            _ => self.change_names(operation),
        }
    }

    /// Closes what lies in deleted subvolumes, which the kernel keeps as long as a file of theirs is open.
    fn close_deleted(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let said = btrfs(&["subvolume", "list", "-d"], &[self.top]).unwrap();
        let id = |line: &str| line.split_whitespace().nth(1).unwrap().to_owned();
        let deleted: BTreeSet<String> = said.lines().map(id).collect();
        self.open.retain(|(_, subvolume)| !deleted.contains(subvolume));
    }

    fn change_names(&mut self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::RemoveDirectory { path } => fs::remove_dir(self.at(path)),
            Operation::Remove { path } => fs::remove_file(self.at(path)),
            Operation::RemoveOpen { path } => {
                let file = self.open(path)?;
                let directory = self.at(split(path).0);
                let subvolume = btrfs(&["inspect-internal", "rootid"], &[&directory])?;
                fs::remove_file(self.at(path))?;
                self.open.push((file, subvolume.trim().to_owned()));
                Ok(())
            }
            Operation::RemoveMany { paths } => {
                paths.iter().try_for_each(|path| fs::remove_file(self.at(path)))
            }
            Operation::Rename { from, to, mode } => {
                let flags = match mode {
                    Rename::Replace => RenameFlags::empty(),
                    Rename::NoReplace => RenameFlags::NOREPLACE,
                    Rename::Exchange => RenameFlags::EXCHANGE,
                    Rename::Whiteout => RenameFlags::WHITEOUT,
                };
                let (from, to) = (self.at(from), self.at(to));
                Ok(rustix::fs::renameat_with(CWD, from, CWD, to, flags)?)
            }
            Operation::Link { from, to } => fs::hard_link(self.at(from), self.at(to)),
            Operation::LinkMany { from, to } => {
                to.iter().try_for_each(|to| fs::hard_link(self.at(from), self.at(to)))
            }
            _ => self.change_attributes(operation),
        }
    }

    fn change_attributes(&self, operation: &Operation) -> io::Result<()> {
        let put = |path: &str, name: &str, value: &[u8]| {
            Ok(rustix::fs::lsetxattr(self.at(path), name, value, XattrFlags::empty())?)
        };
        match operation {
            Operation::Chmod { path, mode } => {
                let mode = Mode::from_raw_mode(*mode);
                Ok(rustix::fs::chmodat(CWD, self.at(path), mode, AtFlags::empty())?)
            }
            Operation::Chown { path, uid, gid } => {
                std::os::unix::fs::lchown(self.at(path), Some(*uid), Some(*gid))
            }
            Operation::Times { path, atime, mtime } => {
                let time = |(sec, nsec): (i64, u32)| Timespec { tv_sec: sec, tv_nsec: nsec.into() };
                let times =
                    Timestamps { last_access: time(*atime), last_modification: time(*mtime) };
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                Ok(rustix::fs::utimensat(CWD, self.at(path), &times, flags)?)
            }
            Operation::SetXattr { path, name, value } | Operation::Acl { path, name, value } => {
                put(path, name, &value.0)
            }
            Operation::RemoveXattr { path, name } => {
                Ok(rustix::fs::lremovexattr(self.at(path), *name)?)
            }
            Operation::Compression { path, value } => put(path, COMPRESSION, value.as_bytes()),
            Operation::Flag { path, flag, on } => self.set_flag(path, *flag, *on),
            _ => self.change_subvolumes(operation),
        }
    }

    fn change_subvolumes(&self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::MakeSubvolume { path } => {
                btrfs(&["subvolume", "create"], &[&self.at(path)]).map(drop)
            }
            Operation::Snapshot { from, to, read_only } => {
                let to = self.at(to);
                // It would be made inside.
                if to.symlink_metadata().is_ok() {
                    return Err(Errno::EXIST.into());
                }
                let words: &[&str] = match read_only {
                    true => &["subvolume", "snapshot", "-r"],
                    false => &["subvolume", "snapshot"],
                };
                btrfs(words, &[&self.at(from), &to]).map(drop)
            }
            Operation::DeleteSubvolume { path } => {
                btrfs(&["subvolume", "delete"], &[&self.at(path)]).map(drop)
            }
            Operation::ReadOnly { path, read_only } => {
                let value = if *read_only { "true" } else { "false" };
                let path = self.at(path);
                let words = [Path::new("ro"), Path::new(value)];
                btrfs(&["property", "set", "-t", "subvol"], &[&path, words[0], words[1]]).map(drop)
            }
            Operation::SetDefault { path } => {
                btrfs(&["subvolume", "set-default"], &[&self.at(path)]).map(drop)
            }
            other => unreachable!("{other:?}"),
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.top.join(path)
    }

    /// No operation follows a symbolic link: the engine leaves that to its callers.
    fn options(flags: OFlags) -> fs::OpenOptions {
        let mut options = File::options();
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        options.read(true).write(true).mode(0o644);
        options.custom_flags(i32::try_from(flags.bits()).unwrap());
        options
    }

    fn open(&self, path: &str) -> io::Result<File> {
        Self::options(OFlags::empty()).open(self.at(path))
    }

    fn make(&self, path: &str, node: Node) -> io::Result<()> {
        let at = self.at(path);
        let name = at.file_name().unwrap().as_encoded_bytes();
        let mknod = |ty, mode: u32| {
            let device = rustix::fs::makedev(DEVICE.0, DEVICE.1);
            let mode = Mode::from_raw_mode(mode & !UMASK);
            Ok(rustix::fs::mknodat(CWD, &at, ty, mode, device)?)
        };
        match node {
            Node::File | Node::FileInPlace => {
                let file = Self::options(OFlags::empty()).create_new(true).open(&at)?;
                match node {
                    Node::FileInPlace => set_flag(&file, IFlags::NOCOW, true),
                    _ => Ok(()),
                }
            }
            Node::Unnamed => {
                let flags = OFlags::TMPFILE | OFlags::RDWR;
                let mode = Mode::from_raw_mode(0o600);
                let file = File::from(rustix::fs::open(at.parent().unwrap(), flags, mode)?);
                file.write_all_at(&vec![name[0]; 7 + 3000 * name.len()], 0)?;
                let open = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
                Ok(rustix::fs::linkat(CWD, open, CWD, &at, AtFlags::SYMLINK_FOLLOW)?)
            }
            Node::Directory => fs::create_dir(&at),
            Node::Symlink => symlink("x".repeat(1 + name.len() * 5), &at),
            Node::Fifo => mknod(FileType::Fifo, 0o640),
            Node::Socket => mknod(FileType::Socket, 0o600),
            Node::CharDevice => mknod(FileType::CharacterDevice, 0o600),
            Node::BlockDevice => mknod(FileType::BlockDevice, 0o600),
        }
    }

    fn write(&self, path: &str, offset: u64, bytes: &[u8], way: Way) -> io::Result<()> {
        let open = |flags: OFlags| {
            let at = self.at(path);
            // Of a file that can only be appended to.
            match Self::options(flags).create(true).truncate(false).open(&at) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    Self::options(flags).append(true).open(&at)
                }
                opened => opened,
            }
        };
        if way != Way::Direct {
            return open(OFlags::empty())?.write_all_at(bytes, offset);
        }
        let mut aligned = vec![0; bytes.len() + SECTOR_BYTES];
        let skip = aligned.as_ptr().align_offset(SECTOR_BYTES);
        let aligned = &mut aligned[skip..skip + bytes.len()];
        aligned.copy_from_slice(bytes);
        open(OFlags::DIRECT)?.write_all_at(aligned, offset)
    }

    fn len_of(&self, ranges: &Ranges) -> io::Result<u64> {
        Ok(match ranges.len_bytes {
            0 => self.at(&ranges.from).symlink_metadata()?.len().saturating_sub(ranges.offset),
            len => len,
        })
    }

    fn range_ioctl(&self, what: &str, ranges: &Ranges) -> io::Result<()> {
        let numbers = [ranges.offset, self.len_of(ranges)?, ranges.to_offset];
        let mut perl = command("perl");
        perl.args(["-e", RANGE_IOCTLS, what]);
        perl.arg(self.at(&ranges.from)).arg(self.at(&ranges.to));
        let output = perl.args(numbers.map(|number| number.to_string())).output()?;
        match output.status.code() {
            Some(0) => Ok(()),
            Some(255) | None => Err(io::Error::other(said(&output))),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn dedupe(&self, ranges: &Ranges) -> io::Result<()> {
        let len = self.len_of(ranges)?;
        let (from, to) = (self.open(&ranges.from)?, self.open(&ranges.to)?);
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        let read = from.read_at(&mut bytes, ranges.offset)?;
        to.write_all_at(&bytes[..read], ranges.to_offset)?;
        drop((from, to));
        self.range_ioctl("dedupe", ranges)
    }

    fn copy(&self, ranges: &Ranges) -> io::Result<()> {
        let (from, to) = (self.open(&ranges.from)?, self.open(&ranges.to)?);
        let (mut offset, mut to_offset) = (ranges.offset, ranges.to_offset);
        let mut rest = usize::try_from(self.len_of(ranges)?).unwrap();
        while rest > 0 {
            let (at, to_at) = (Some(&mut offset), Some(&mut to_offset));
            match rustix::fs::copy_file_range(&from, at, &to, to_at, rest)? {
                0 => break,
                copied => rest -= copied,
            }
        }
        Ok(())
    }

    fn set_flag(&self, path: &str, flag: Flag, on: bool) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.at(path), flags, Mode::empty())?;
        set_flag(&file.into(), kernels(flag), on)
    }
}

fn kernels(flag: Flag) -> IFlags {
    match flag {
        Flag::Immutable => IFlags::IMMUTABLE,
        Flag::Append => IFlags::APPEND,
        Flag::InPlace => IFlags::NOCOW,
        Flag::NoAtime => IFlags::NOATIME,
        Flag::NoDump => IFlags::NODUMP,
        Flag::Compress => IFlags::COMPRESSED,
        Flag::NoCompress => IFlags::from_bits_retain(NO_COMPRESSION_FLAG),
    }
}

fn set_flag(file: &File, flag: IFlags, on: bool) -> io::Result<()> {
    let old = rustix::fs::ioctl_getflags(file)?;
    let new = if on { old | flag } else { old - flag };
    Ok(rustix::fs::ioctl_setflags(file, new)?)
}

/// Runs `btrfs` and returns what it wrote. Why it fails is in its words only.
pub fn btrfs(words: &[&str], paths: &[&Path]) -> io::Result<String> {
    let output = command("btrfs").args(words).args(paths).output()?;
    let said = said(&output);
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = [
        ("No space left", Errno::NOSPC),
        ("Input/output error", Errno::IO),
        ("needs cleaning", Errno::UCLEAN),
    ];
    let known = errors.iter().find(|(words, _)| said.contains(words));
    Err(known.map_or_else(|| io::Error::other(said.clone()), |(_, errno)| (*errno).into()))
}

/// Waits until deleted subvolumes are gone. Their freeing begins after a commit.
fn clean(top: &Path) -> io::Result<()> {
    for wait in 0..CLEAN_WAITS_MAX {
        // Who frees them is woken, and may be asleep again without having looked, until the next commit.
        if wait % CLEAN_WAITS_A_WAKING == 0 {
            btrfs(&["filesystem", "sync"], &[top])?;
        }
        if btrfs(&["subvolume", "list", "-d"], &[top])?.trim().is_empty() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the kernel does not free deleted subvolumes");
}

fn said(output: &Output) -> String {
    let said = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&said).trim().to_owned()
}
