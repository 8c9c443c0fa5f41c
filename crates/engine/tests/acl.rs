//! Access control lists, what new inodes take over from their directory, and permissions: done to
//! the engine's image and to a mount of the kernel's, which answer the same and hold the same then.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::open_for_writing;
use rustix::fs::{self, AtFlags, CWD, FileType, Mode, XattrFlags};
use rustix::io::Errno;
use ubtrfs_engine::{
    Error, Filesystem, Inherit, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation,
    SetAttributes, mkfs,
};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    Compare, KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, assert_checks_clean, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

const UMASK: u32 = 0o027;
const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

struct Both {
    fs: Filesystem,
    directory: PathBuf,
}

fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound { .. } => Errno::NOENT,
        Error::Exists { .. } => Errno::EXIST,
        Error::NotDirectory { .. } => Errno::NOTDIR,
        Error::InvalidArgument { .. } => Errno::INVAL,
        other => panic!("{other}"),
    }
}

impl Both {
    fn find(&self, path: &str) -> Result<InodeId, Error> {
        self.fs.resolve(self.fs.top_level(), path.as_bytes())
    }

    fn split<'p>(&self, path: &'p str) -> Result<(InodeId, &'p [u8]), Error> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.find(&format!("{dir}/"))?, name.as_bytes()))
    }

    fn there(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    fn same(&self, what: &str, ours: Result<(), Error>, theirs: Result<(), Errno>) {
        let ours = ours.map_err(|error| errno(&error));
        // Linux says in several ways that such an inode has no such list.
        let theirs = theirs.map_err(|error| match error {
            Errno::OPNOTSUPP | Errno::ACCESS => Errno::INVAL,
            Errno::NODATA => Errno::NOENT,
            other => other,
        });
        assert_eq!(ours, theirs, "{what}: engine, kernel");
    }

    fn make(&self, path: &str, mode: u32) {
        let new = NewInode {
            inherit: Inherit::AsProcess { umask: UMASK },
            ..NewInode::new(mode, Time::default())
        };
        let ours = self.split(path).and_then(|(dir, name)| {
            let mut handle = self.fs.begin(Reservation::create(0)).unwrap();
            match mode & 0o170_000 {
                0o120_000 => handle.symlink(dir, name, b"nowhere", &new).map(drop),
                _ => handle.create(dir, name, &new).map(drop),
            }
        });
        let there = self.there(path);
        let permissions = Mode::from_raw_mode(mode & 0o7777);
        let theirs = match mode & 0o170_000 {
            0o040_000 => fs::mkdir(&there, permissions),
            0o120_000 => fs::symlink("nowhere", &there),
            0o010_000 => fs::mknodat(CWD, &there, FileType::Fifo, permissions, 0),
            _ => fs::mknodat(CWD, &there, FileType::RegularFile, permissions, 0),
        };
        self.same(&format!("make {path} {mode:o}"), ours, theirs);
    }

    fn subvolume(&self, path: &str) {
        let is_free = self.find(path).is_err();
        if !is_free || !self.there(path).parent().is_some_and(Path::is_dir) {
            return;
        }
        let new = NewInode {
            inherit: Inherit::AsProcess { umask: UMASK },
            ..NewInode::new(0o777, Time::default())
        };
        let (dir, name) = self.split(path).unwrap();
        let mut handle = self.fs.begin(Reservation::create_subvolume()).unwrap();
        handle.create_subvolume(dir, name, &new).unwrap();
        run("btrfs", ["subvolume".as_ref(), "create".as_ref(), self.there(path).as_os_str()]);
    }

    fn chmod(&self, path: &str, mode: u32) {
        let ours = self.find(path).and_then(|id| {
            let mut handle = self.fs.begin(Reservation::items(4)).unwrap();
            let attributes = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
            handle.set_attributes(id, &attributes)
        });
        let theirs = fs::chmod(self.there(path), Mode::from_raw_mode(mode));
        self.same(&format!("chmod {path} {mode:o}"), ours, theirs);
    }

    fn chown(&self, path: &str, id: u32) {
        let ours = self.find(path).and_then(|inode| {
            let mut handle = self.fs.begin(Reservation::items(4)).unwrap();
            let attributes = SetAttributes { gid: Some(id), ..SetAttributes::default() };
            handle.set_attributes(inode, &attributes)
        });
        let gid = Some(fs::Gid::from_raw(id));
        let theirs = fs::chownat(CWD, self.there(path), None, gid, AtFlags::SYMLINK_NOFOLLOW);
        self.same(&format!("chown {path}"), ours, theirs);
    }

    fn set_list(&self, path: &str, name: &str, value: Option<&[u8]>) {
        let ours = self.find(path).and_then(|id| {
            let mut handle = self.fs.begin(Reservation::items(4)).unwrap();
            match value {
                Some(value) => handle.set_xattr(id, name.as_bytes(), value),
                // As Linux: to take away a list that is not there is no error.
                None => handle.set_xattr(id, name.as_bytes(), &[2, 0, 0, 0]),
            }
        });
        let theirs = match value {
            Some(value) => fs::lsetxattr(self.there(path), name, value, XattrFlags::empty()),
            None => fs::lremovexattr(self.there(path), name),
        };
        self.same(&format!("{name} of {path} {value:?}"), ours, theirs);
    }

    fn step(&self, random: &mut Prng) {
        let path = path(random);
        let link = path.ends_with("link");
        let mode = u32::try_from(random.below(0o1000)).unwrap();
        let set_gid = if random.chance(1, 3) { 0o2000 } else { 0 };
        match random.below(16) {
            0..6 if link => self.make(&path, 0o120_777),
            0..2 => self.make(&path, 0o100_000 | mode),
            2..5 => self.make(&path, 0o040_000 | mode),
            5 => self.make(&path, 0o010_000 | mode),
            // Not on the way to others: the engine leaves it to its caller to follow them.
            6 | 7 if !link => self.subvolume(&path),
            // A symbolic link's own permissions cannot be changed in Linux.
            8..10 if !link => self.chmod(&path, mode | set_gid),
            // Of others it takes set-id bits away, which is not the filesystem's doing in Linux.
            10 if self.there(&path).is_dir() => self.chown(&path, 1000),
            11 => self.set_list(&path, ACCESS, None),
            12 => self.set_list(&path, DEFAULT, None),
            13 => self.set_list(&path, ACCESS, Some(&list(random))),
            _ => self.set_list(&path, DEFAULT, Some(&list(random))),
        }
    }
}

fn path(random: &mut Prng) -> String {
    let depth = 1 + random.index(4);
    let mut names: Vec<String> = (0..depth).map(|_| format!("n{}", random.below(4))).collect();
    if random.chance(1, 8) {
        names[depth - 1] = "link".to_owned();
    }
    names.join("/")
}

/// A list, mostly whole.
fn list(random: &mut Prng) -> Vec<u8> {
    let mut entries = vec![(0x01_u16, u32::MAX), (0x04, u32::MAX), (0x20, u32::MAX)];
    let named = random.below(3);
    for id in 0..named {
        let tag = if random.chance(1, 2) { 0x02 } else { 0x08 };
        entries.push((tag, 1000 + u32::try_from(id).unwrap()));
    }
    if named > 0 || random.chance(1, 3) {
        entries.push((0x10, u32::MAX));
    }
    entries.sort_unstable();
    if random.chance(1, 8) {
        entries.remove(random.index(entries.len()));
    }
    if random.chance(1, 12) {
        let (a, b) = (random.index(entries.len()), random.index(entries.len()));
        entries.swap(a, b);
    }
    let mut value = vec![2, 0, 0, 0];
    for (tag, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&u16::try_from(random.below(8)).unwrap().to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    if random.chance(1, 20) {
        value.pop();
    }
    value
}

#[test]
fn random_lists_and_permissions_are_as_the_kernels() {
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    let mut random = Prng::of_test(47);
    println!("seed {}", random.seed());
    let dir = tempfile::tempdir().unwrap();
    let theirs = dir.path().join("theirs");
    MkfsBtrfs::new().size_bytes(256 << 20).make(&theirs);
    let mount = KernelMount::read_write(&theirs, "");
    std::fs::set_permissions(mount.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let image = dir.path().join("ours");
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    // The only test of its process: the mask is the process's.
    rustix::process::umask(Mode::from_raw_mode(UMASK));
    let both = Both { fs, directory: mount.path().to_owned() };
    for _ in 0..4000 {
        both.step(&mut random);
    }
    let kernels = TreeSnapshot::of_directory(mount.path());
    let ours = common::snapshot(&both.fs, both.fs.top_level());
    let compare =
        Compare { mtime: false, directory_numbers: true, root: false, ..Compare::copied() };
    kernels.assert_same(&ours, &compare);
    mount.unmount();
    both.fs.commit().unwrap();
    drop(both);
    assert_checks_clean(&image);
    common::judge(&image);
    drop(open_for_writing(&image));
}
