//! Operations on names, done to the engine's image and to a mount of the kernel's: both answer the
//! same, error by error, and in the end hold the same tree.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::open_for_writing;
use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use ubtrfs_engine::{
    Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, RenameMode, Reservation, mkfs,
};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    Compare, KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, assert_checks_clean, command,
    oracle,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

type Outcome = Result<(), Errno>;

/// The engine and a directory of the kernel's, side by side.
struct Both {
    fs: Filesystem,
    directory: PathBuf,
}

fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound { .. } => Errno::NOENT,
        Error::Exists { .. } => Errno::EXIST,
        Error::NotDirectory { .. } => Errno::NOTDIR,
        Error::IsDirectory { .. } => Errno::ISDIR,
        Error::NotEmpty { .. } => Errno::NOTEMPTY,
        Error::TooLong { .. } => Errno::NAMETOOLONG,
        Error::InvalidArgument { .. } => Errno::INVAL,
        Error::OtherSubvolume { .. } => Errno::XDEV,
        Error::NotPermitted { .. } => Errno::PERM,
        Error::TooManyLinks { .. } => Errno::MLINK,
        other => panic!("{other}"),
    }
}

fn simple(result: Result<(), Error>) -> Outcome {
    result.map_err(|error| errno(&error))
}

/// A path's directory and last name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl Both {
    fn find(&self, path: &str) -> Result<InodeId, Error> {
        let top = self.fs.top_level();
        // The engine leaves it to its caller to follow symbolic links; here all lead nowhere.
        for (end, _) in path.match_indices('/') {
            let here = self.fs.resolve(top, &path.as_bytes()[..end])?;
            if self.fs.inode(here)?.file_type() == ubtrfs_ondisk::dir::FileType::Symlink {
                return Err(Error::not_found(path));
            }
        }
        self.fs.resolve(top, path.as_bytes())
    }

    /// A directory: anything else is refused here, as the kernel does before it looks further.
    fn dir(&self, path: &str) -> Result<InodeId, Error> {
        self.find(&format!("{path}/"))
    }

    fn there(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    fn same(&self, what: &str, ours: Outcome, theirs: Outcome) {
        assert_eq!(ours, theirs, "{what}: engine, kernel");
    }

    fn make(&self, path: &str, mode: u32) {
        let (dir, name) = split(path);
        let new = NewInode::new(mode, Time::default());
        let ours = self.dir(dir).and_then(|dir| {
            let mut handle = self.fs.begin(Reservation::create(0)).unwrap();
            handle.create(dir, name.as_bytes(), &new).map(drop)
        });
        let there = self.there(path);
        let theirs = if mode & 0o170_000 == 0o040_000 {
            fs::mkdir(&there, Mode::from_raw_mode(mode & 0o7777))
        } else {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            fs::mknodat(CWD, &there, FileType::RegularFile, mode, 0)
        };
        self.same(&format!("make {path}"), simple(ours), theirs);
    }

    fn symlink(&self, target: &str, path: &str) {
        let (dir, name) = split(path);
        let ours = self.dir(dir).and_then(|dir| {
            let mut handle = self.fs.begin(Reservation::create(0)).unwrap();
            let new = NewInode::new(0o777, Time::default());
            handle.symlink(dir, name.as_bytes(), target.as_bytes(), &new).map(drop)
        });
        self.same(&format!("symlink {path}"), simple(ours), fs::symlink(target, self.there(path)));
    }

    fn link(&self, old: &str, new: &str) {
        let (dir, name) = split(new);
        let ours = self.find(old).and_then(|id| {
            let dir = self.dir(dir)?;
            let mut handle = self.fs.begin(Reservation::create(0)).unwrap();
            handle.link(dir, name.as_bytes(), id)
        });
        let theirs = fs::linkat(CWD, self.there(old), CWD, self.there(new), AtFlags::empty());
        if matches!(ours, Err(Error::IsDirectory { .. })) {
            // Linux says that it is not permitted, where the new name is not taken.
            assert!(matches!(
                theirs,
                Err(Errno::PERM | Errno::EXIST | Errno::NOENT | Errno::NOTDIR)
            ));
            return;
        }
        let ours = simple(ours);
        self.same(&format!("link {old} {new}"), ours, theirs);
    }

    fn remove(&self, path: &str, is_directory: bool) {
        let (dir, name) = split(path);
        let ours = self.dir(dir).and_then(|dir| match is_directory {
            true => self.fs.rmdir(dir, name.as_bytes()),
            false => self.fs.unlink(dir, name.as_bytes()),
        });
        let theirs = match is_directory {
            true => fs::rmdir(self.there(path)),
            false => fs::unlink(self.there(path)),
        };
        self.same(&format!("remove {path}, directory {is_directory}"), simple(ours), theirs);
    }

    fn rename(&self, old: &str, new: &str, mode: RenameMode) {
        let ((from, from_name), (to, to_name)) = (split(old), split(new));
        let ours = self.dir(from).and_then(|from| {
            let to = self.dir(to)?;
            self.fs.rename(from, from_name.as_bytes(), to, to_name.as_bytes(), mode)
        });
        let flags = match mode {
            RenameMode::Replace => RenameFlags::empty(),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
            RenameMode::Exchange => RenameFlags::EXCHANGE,
            RenameMode::Whiteout => RenameFlags::WHITEOUT,
        };
        let theirs = fs::renameat_with(CWD, self.there(old), CWD, self.there(new), flags);
        self.same(&format!("rename {old} {new} {mode:?}"), simple(ours), theirs);
    }

    fn tmpfile(&self, dir: &str, path: Option<&str>) {
        let new = NewInode::new(0o100_600, Time::default());
        let ours = self.dir(dir).and_then(|dir| {
            let mut handle = self.fs.begin(Reservation::create(0)).unwrap();
            let id = handle.create_unlinked(dir, &new)?;
            let Some(path) = path else { return Ok(()) };
            let (to, name) = split(path);
            let linked = self.dir(to).and_then(|to| handle.link(to, name.as_bytes(), id));
            drop(handle);
            if linked.is_err() {
                self.fs.evict(id).unwrap();
            }
            linked
        });
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        let theirs = fs::open(self.there(dir), flags, Mode::from_raw_mode(0o600));
        let theirs = theirs.and_then(|file| match path {
            Some(path) => fs::linkat(&file, "", CWD, self.there(path), AtFlags::EMPTY_PATH),
            None => Ok(()),
        });
        self.same(&format!("tmpfile {dir} {path:?}"), simple(ours), theirs);
    }

    fn xattr(&self, path: &str, name: &str, value: Option<&[u8]>) {
        let ours = self.find(path).and_then(|id| {
            let mut handle = self.fs.begin(Reservation::items(4)).unwrap();
            match value {
                Some(value) => handle.set_xattr(id, name.as_bytes(), value),
                None => handle.remove_xattr(id, name.as_bytes()),
            }
        });
        let theirs = match value {
            Some(value) => fs::lsetxattr(self.there(path), name, value, XattrFlags::empty()),
            None => fs::lremovexattr(self.there(path), name),
        };
        // Linux has an errno of its own for an attribute that is not there.
        let theirs = theirs.map_err(|e| if e == Errno::NODATA { Errno::NOENT } else { e });
        self.same(&format!("xattr {path} {name}"), simple(ours), theirs);
    }

    fn step(&self, random: &mut Prng) {
        let (a, b) = (path(random), path(random));
        match random.below(20) {
            0..4 => self.make(&a, 0o100_644),
            4..7 => self.make(&a, 0o040_755),
            // Not on the way to others: the engine leaves following to who knows the path's start.
            7 => self.symlink("nowhere", &a.replace("n3", "link").replace("link/", "n3/")),
            8 => self.link(&a, &b),
            9 => self.remove(&a, random.chance(1, 2)),
            10 => self.remove(&a, false),
            11 => self.tmpfile(split(&a).0, random.chance(2, 3).then_some(&*b)),
            12 => {
                let value = random.bytes(20);
                self.xattr(&a, "trusted.a", Some(&value));
            }
            13 => self.xattr(&a, "trusted.a", None),
            _ => {
                let mode = match random.below(6) {
                    0..3 => RenameMode::Replace,
                    3 => RenameMode::NoReplace,
                    4 => RenameMode::Exchange,
                    _ => RenameMode::Whiteout,
                };
                self.rename(&a, &b, mode);
            }
        }
    }
}

/// A path of one to four names, the last sometimes a symbolic link's, of which there are few, so that what is named often exists.
fn path(random: &mut Prng) -> String {
    let depth = 1 + random.index(4);
    let mut names: Vec<String> = (0..depth).map(|_| format!("n{}", random.below(4))).collect();
    if random.chance(1, 8) {
        names[depth - 1] = "link".to_owned();
    }
    names.join("/")
}

fn make(image: &Path) -> Filesystem {
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap());
    let options = MkfsOptions::default();
    let volume = mkfs(vec![device], &options, &Arc::new(Runtime::system())).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

#[test]
fn random_operations_on_names_answer_as_the_kernels_do() {
    if !oracle::require_all(&[
        Oracle::KernelBtrfs,
        Oracle::Root,
        Oracle::MkfsBtrfs,
        Oracle::BtrfsProgs,
    ]) {
        return;
    }
    let mut random = Prng::of_test(31);
    println!("seed {}", random.seed());
    let dir = tempfile::tempdir().unwrap();
    let theirs = dir.path().join("theirs");
    MkfsBtrfs::new().size_bytes(256 << 20).make(&theirs);
    let mount = KernelMount::read_write(&theirs, "");
    std::fs::set_permissions(mount.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let image = dir.path().join("ours");
    let mut both = Both { fs: make(&image), directory: mount.path().to_owned() };
    for round in 0..6000 {
        both.step(&mut random);
        if random.chance(1, 400) {
            both.fs.commit().unwrap();
            assert_checks_clean(&image);
        }
        if round % 1500 == 1499 {
            both.fs.commit().unwrap();
            let Both { fs, directory } = both;
            drop(fs);
            both = Both { fs: open_for_writing(&image), directory };
        }
    }
    let kernels = TreeSnapshot::of_directory(mount.path());
    let ours = common::snapshot(&both.fs, both.fs.top_level());
    let compare =
        Compare { mtime: false, directory_numbers: true, root: false, ..Compare::copied() };
    kernels.assert_same(&ours, &compare);
    both.fs.commit().unwrap();
    drop(both);
    assert_checks_clean(&image);
    // What the kernel sees of ours, times and all.
    let ours = {
        let fs = common::open(&[&image]);
        common::snapshot(&fs, fs.top_level())
    };
    mount.unmount();
    let mount = KernelMount::read_only(&image, "");
    let seen = TreeSnapshot::of_directory(mount.path());
    mount.unmount();
    seen.assert_same(&ours, &Compare::same_filesystem());
}

/// Whoever holds a file open when the machine stops leaves an orphan.
#[test]
fn orphans_go_when_the_subvolume_is_changed_next_and_not_those_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0).and(Reservation::create(0))).unwrap();
    let kept = handle.create(top, b"unlinked", &new).unwrap();
    let unnamed = handle.create_unlinked(top, &new).unwrap();
    drop(handle);
    assert_eq!(fs.unlink_deferred(top, b"unlinked").unwrap(), Some(kept));
    // Others go on, and nobody cleans up what is in use.
    fs.begin(Reservation::create(0)).unwrap().create(top, b"other", &new).unwrap();
    assert_eq!(fs.clean_orphans(top.root).unwrap(), 0);
    assert_eq!(fs.inode(kept).unwrap().nlink, 0);
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }

    let fs = open_for_writing(&image);
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(top, b"first change", &new).unwrap();
    let unnamed_now = handle.create_unlinked(top, &new).unwrap();
    drop(handle);
    for gone in [kept, unnamed] {
        assert!(matches!(fs.inode(gone), Err(Error::NotFound { .. })), "{gone}");
    }
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.link(top, b"named", unnamed_now).unwrap();
    drop(handle);
    assert_eq!(fs.inode(unnamed_now).unwrap().nlink, 1);
    // One that has a name stays, whoever asks.
    fs.evict(unnamed_now).unwrap();
    assert_eq!(fs.lookup(top, b"named").unwrap(), unnamed_now);
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn flags_forbid_what_they_say_and_compression_is_inherited() {
    use ubtrfs_engine::SetAttributes;
    use ubtrfs_ondisk::inode::flags;
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    let create = |dir: InodeId, name: &[u8], mode: u32| {
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        handle.create(dir, name, &NewInode::new(mode, Time::default()))
    };
    let set_flags = |id: InodeId, bits: u64| {
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        let attributes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
        handle.set_attributes(id, &attributes).unwrap();
    };
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::NotPermitted { .. })), "{result:?}");
    };
    // Linux's checker takes a symbolic link with either for damaged.
    let link = {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.symlink(top, b"link", b"dir", &NewInode::new(0o120_777, Time::default())).unwrap()
    };
    for pinned in [flags::IMMUTABLE, flags::APPEND] {
        let attributes = SetAttributes { flags: Some(pinned), ..SetAttributes::default() };
        let result = fs.begin(Reservation::items(1)).unwrap().set_attributes(link, &attributes);
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
    }
    let sub = create(top, b"dir", 0o040_755).unwrap();
    let file = create(sub, b"file", 0o100_644).unwrap();
    for bits in [flags::IMMUTABLE, flags::APPEND] {
        set_flags(file, bits);
        refused(fs.unlink(sub, b"file"));
        refused(fs.rename(sub, b"file", top, b"file", RenameMode::Replace));
        refused(fs.begin(Reservation::create(0)).unwrap().link(top, b"link", file));
        refused(fs.begin(Reservation::items(4)).unwrap().set_xattr(file, b"user.a", b"b"));
        let mode = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        refused(fs.begin(Reservation::items(4)).unwrap().set_attributes(file, &mode));
        set_flags(file, 0);
        set_flags(sub, bits);
        refused(fs.unlink(sub, b"file"));
        refused(fs.rename(sub, b"file", sub, b"other", RenameMode::Replace));
        let made = create(sub, format!("new {bits}").as_bytes(), 0o100_644);
        assert_eq!(made.is_ok(), bits == flags::APPEND);
        set_flags(sub, 0);
    }
    set_flags(file, flags::IMMUTABLE);
    assert!(fs.appender(file, 0).is_err_and(|e| matches!(e, Error::NotPermitted { .. })));
    set_flags(file, flags::APPEND);
    assert!(fs.appender(file, 0).is_ok());
    set_flags(file, 0);
    for bits in [1 << 20, 1 << 40] {
        let attributes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        let refused = handle.set_attributes(file, &attributes);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    // Data that is there has checksums, or it has none: a flag does not change that.
    set_flags(file, flags::NODATASUM | flags::NODATACOW);
    set_flags(file, 0);
    fs.write(file, ubtrfs_ondisk::FileOffset(0), &[7; 5000]).unwrap();
    let no_csums = SetAttributes { flags: Some(flags::NODATASUM), ..SetAttributes::default() };
    let refused = fs.begin(Reservation::items(1)).unwrap().set_attributes(file, &no_csums);
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    // What an append-only file has is not replaced by a clone of something else either.
    let other = create(sub, b"other", 0o100_644).unwrap();
    fs.write(other, ubtrfs_ondisk::FileOffset(0), &[8; 8192]).unwrap();
    set_flags(file, flags::APPEND);
    let at = ubtrfs_ondisk::FileOffset;
    refused_clone(fs.clone_range(other, at(0)..at(8192), file, at(0)));
    refused_clone(fs.dedupe_range(other, at(0)..at(4096), file, at(0)).map(drop));
    let mut have = vec![0; 5000];
    fs.read(file, at(0), &mut have).unwrap();
    assert_eq!(have, [7; 5000]);

    set_flags(sub, flags::COMPRESS);
    fs.begin(Reservation::items(4))
        .unwrap()
        .set_xattr(sub, b"btrfs.compression", b"zstd:7")
        .unwrap();
    let child = create(sub, b"child", 0o040_755).unwrap();
    let grandchild = create(child, b"file", 0o100_644).unwrap();
    for id in [child, grandchild] {
        assert_eq!(fs.xattr(id, b"btrfs.compression").unwrap().as_deref(), Some(&b"zstd"[..]));
        assert_eq!(fs.inode(id).unwrap().flags, flags::COMPRESS);
    }
}

fn refused_clone(result: Result<(), Error>) {
    assert!(matches!(result, Err(Error::NotPermitted { .. })), "{result:?}");
}

/// Bits of a mode that Linux does not know made it refuse the whole leaf.
#[test]
fn mode_bits_that_nobody_knows_are_not_stored() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let new = NewInode::new(0o7_100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let file = handle.create(fs.top_level(), b"file", &new).unwrap();
    drop(handle);
    assert_eq!(fs.inode(file).unwrap().mode, 0o100_644);
    fs.commit().unwrap();
    drop(fs);
    common::judge(&image);
}

/// Directories deeper than 4096 had no path, and nothing could be renamed in them.
#[test]
fn directories_as_deep_as_linux_allows_have_paths_and_are_renamed() {
    const DEPTH: usize = 5000;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let new = NewInode::new(0o040_755, Time::default());
    let mut here = fs.top_level();
    for _ in 0..DEPTH {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        here = handle.create(here, b"d", &new).unwrap();
    }
    assert_eq!(fs.path_of(here).unwrap().len(), 2 * DEPTH - 1);
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(here, b"a", &new).unwrap();
    drop(handle);
    fs.rename(here, b"a", here, b"b", RenameMode::Replace).unwrap();
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn file_has_as_many_names_as_linux_gives_it_and_no_more() {
    const NAMES: u32 = 65_535;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let file = handle.create(top, b"0", &NewInode::new(0o100_644, Time::default())).unwrap();
    drop(handle);
    for number in 1..NAMES {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.link(top, format!("{number}").as_bytes(), file).unwrap();
    }
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let refused = handle.link(top, b"one more", file);
    assert!(matches!(refused, Err(Error::TooManyLinks { .. })), "{refused:?}");
    drop(handle);
    assert_eq!(fs.inode(file).unwrap().nlink, NAMES);
    fs.commit().unwrap();
    drop(fs);
    // `btrfs check` takes minutes for so many names of one inode: of fewer it judges in other tests.
    // The checker that shares no code with the engine does not.
    let device = FileDevice::open(&image, OpenMode::ReadOnly, Window::Whole).unwrap();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device)], &options).unwrap();
    let report = ubtrfs_check::check(&volume, &ubtrfs_check::CheckOptions::default()).unwrap();
    assert!(report.is_clean(), "{:#?}", report.findings);
    assert!(report.statistics.entry_count >= u64::from(NAMES), "{:?}", report.statistics);
    drop(volume);
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let mount = KernelMount::read_write(&image, "");
    let (first, more) = (mount.path().join("0"), mount.path().join("one more"));
    assert_eq!(std::fs::hard_link(&first, &more).unwrap_err().raw_os_error(), Some(31), "EMLINK");
    std::fs::remove_file(mount.path().join("40000")).unwrap();
    std::fs::hard_link(&first, &more).unwrap();
    mount.unmount();
    let fs = open_for_writing(&image);
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    assert!(matches!(handle.link(top, b"40000", file), Err(Error::TooManyLinks { .. })));
    drop(handle);
    fs.unlink(top, b"one more").unwrap();
    fs.begin(Reservation::create(0)).unwrap().link(top, b"40000", file).unwrap();
    fs.commit().unwrap();
    drop(fs);
    let mount = KernelMount::read_write(&image, "");
    for number in 0..NAMES {
        std::fs::remove_file(mount.path().join(format!("{number}"))).unwrap();
    }
    mount.unmount();
    common::judge(&image);
}

/// A reader that goes on from the offset of the last entry it got meets each name once that is there
/// throughout, whatever comes and goes meanwhile.
#[test]
fn directory_read_while_it_changes_shows_what_stays_once() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"));
    let top = fs.top_level();
    let new = NewInode::new(0o100_644, Time::default());
    let create = |name: &str| {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(top, name.as_bytes(), &new).unwrap();
    };
    for number in 0..500 {
        create(&format!("stays {number}"));
        create(&format!("goes {number}"));
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..500 {
                fs.unlink(top, format!("goes {round}").as_bytes()).unwrap();
                create(&format!("comes {round}"));
                let other = format!("renamed {round}");
                let name = format!("comes {}", round / 2);
                let _ = fs.rename(top, name.as_bytes(), top, other.as_bytes(), RenameMode::Replace);
                if round % 50 == 0 {
                    fs.commit().unwrap();
                }
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let mut passes = 0;
        while passes == 0 || !done.load(std::sync::atomic::Ordering::Relaxed) {
            let (mut seen, mut offset) = (Vec::new(), 0);
            loop {
                // A few at a time, as a caller with a small buffer does.
                let some: Vec<_> =
                    fs.read_dir(top, offset).unwrap().take(7).map(Result::unwrap).collect();
                let Some(last) = some.last() else { break };
                offset = last.index;
                seen.extend(some.into_iter().map(|entry| entry.name));
            }
            let stays = seen.iter().filter(|name| name.starts_with(b"stays")).count();
            assert_eq!(stays, 500);
            let count = seen.len();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), count, "a name twice");
            passes += 1;
        }
    });
}

/// An appender, and an eviction, held the lock of a file's data and began a handle, which first
/// cleaned up orphans of the subvolume and waited for the same lock, for ever.
#[test]
fn first_change_of_a_subvolume_with_orphans_may_be_an_append_or_an_eviction() {
    for first_is_append in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let fs = make(&image);
        let top = fs.top_level();
        let new = NewInode::new(0o100_644, Time::default());
        let mut handle = fs.begin(Reservation::create(0).and(Reservation::create(0))).unwrap();
        let file = handle.create(top, b"file", &new).unwrap();
        let orphans: Vec<InodeId> =
            (0..100).map(|_| handle.create_unlinked(top, &new).unwrap()).collect();
        drop(handle);
        fs.commit().unwrap();
        drop(fs);
        let fs = open_for_writing(&image);
        if first_is_append {
            let mut appender = fs.appender(file, 0).unwrap();
            let data = ubtrfs_engine::PreparedData::new(vec![1; 5000], &fs.write_options(None));
            appender.push(ubtrfs_ondisk::FileOffset(0), data).unwrap();
            appender.finish().unwrap();
        } else {
            fs.unlink(top, b"file").unwrap();
        }
        drop(fs.begin(Reservation::items(1)).unwrap());
        for orphan in orphans {
            assert!(matches!(fs.inode(orphan), Err(Error::NotFound { .. })), "{orphan}");
        }
    }
}

/// A library's user set the property, and nothing was compressed: the flags were the command's doing.
#[test]
fn compression_set_by_name_sets_the_flags_as_linux_does() {
    use ubtrfs_ondisk::inode::flags;
    const PROPERTY: &[u8] = b"btrfs.compression";
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let create = |name: &[u8], mode| {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(fs.top_level(), name, &NewInode::new(mode, Time::default())).unwrap()
    };
    let file = create(b"file", 0o100_644);
    let set =
        |id, value: &[u8]| fs.begin(Reservation::items(4)).unwrap().set_xattr(id, PROPERTY, value);
    let cases: [(&[u8], u64); 5] = [
        (b"zstd", flags::COMPRESS),
        (b"none", flags::NOCOMPRESS),
        (b"lzo", flags::COMPRESS),
        (b"no", flags::NOCOMPRESS),
        (b"zstd:3", flags::COMPRESS),
    ];
    for (value, expected) in cases {
        set(file, value).unwrap();
        assert_eq!(fs.inode(file).unwrap().flags, expected);
    }
    assert!(matches!(set(file, b"lz4"), Err(Error::InvalidArgument { .. })));
    // One without a value was kept, and said that nothing is to be compressed; in Linux it is none.
    for _ in 0..2 {
        set(file, b"").unwrap();
        assert_eq!(fs.xattr(file, PROPERTY).unwrap(), None);
        assert_eq!(fs.inode(file).unwrap().flags, 0);
    }
    set(file, b"zlib").unwrap();
    assert!(matches!(set(create(b"fifo", 0o010_644), b"zstd"), Err(Error::InvalidArgument { .. })));
    fs.begin(Reservation::items(4)).unwrap().remove_xattr(file, PROPERTY).unwrap();
    assert_eq!(fs.inode(file).unwrap().flags, 0);
    fs.commit().unwrap();
    drop(fs);
    common::judge(&image);
}

/// An immutable directory took subvolumes, snapshots and nameless files from the engine, where
/// Linux refuses them.
#[test]
fn new_in_an_immutable_directory_is_refused_as_by_the_kernel() {
    use ubtrfs_engine::{SetAttributes, SnapshotOptions};
    use ubtrfs_ondisk::inode::flags;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image);
    let top = fs.top_level();
    let new = NewInode::new(0o040_755, Time::default());
    let file = NewInode::new(0o100_644, Time::default());
    let begin = |reservation| fs.begin(reservation).unwrap();
    let sub = begin(Reservation::create(0)).create(top, b"dir", &new).unwrap();
    begin(Reservation::create(0)).create(sub, b"taken", &new).unwrap();
    let bits = SetAttributes { flags: Some(flags::IMMUTABLE), ..SetAttributes::default() };
    begin(Reservation::items(1)).set_attributes(sub, &bits).unwrap();
    let subvolume = |name: &[u8]| {
        let made = begin(Reservation::create_subvolume()).create_subvolume(sub, name, &new);
        made.map(drop).map_err(|error| errno(&error))
    };
    let snapshot = |name: &[u8]| {
        let made = fs.snapshot(top.root, sub, name, &SnapshotOptions::default());
        made.map(drop).map_err(|error| errno(&error))
    };
    let nameless = begin(Reservation::create(0)).create_unlinked(sub, &file);
    let ours = [
        subvolume(b"new"),
        subvolume(b"taken"),
        snapshot(b"new"),
        snapshot(b"taken"),
        nameless.map(drop).map_err(|error| errno(&error)),
    ];
    fs.commit().unwrap();
    drop(fs);

    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let mount = KernelMount::read_write(&image, "");
    let path = |name: &str| mount.path().join("dir").join(name);
    let btrfs = |arguments: &[&std::ffi::OsStr]| {
        let output = command("btrfs").args(arguments).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(()),
            false if message.contains("Operation not permitted") => Err(Errno::PERM),
            false if message.contains("exists") => Err(Errno::EXIST),
            false => panic!("{message}"),
        }
    };
    let words = |action: &'static str| ["subvolume".as_ref(), action.as_ref()];
    let subvolume = |name: &str| btrfs(&[&words("create")[..], &[path(name).as_os_str()]].concat());
    // Given a directory that is there, the command would make the snapshot in it; the order of
    // the two refusals is seen by the other.
    let snapshot = |name: &str| {
        let from = mount.path().as_os_str();
        btrfs(&[&words("snapshot")[..], &[from, path(name).as_os_str()]].concat())
    };
    let nameless = fs::open(path("."), OFlags::TMPFILE | OFlags::WRONLY, Mode::RUSR).map(drop);
    let theirs =
        [subvolume("new"), subvolume("taken"), snapshot("new"), Err(Errno::EXIST), nameless];
    mount.unmount();
    assert_eq!(ours, theirs);
}
