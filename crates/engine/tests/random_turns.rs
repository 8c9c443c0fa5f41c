//! The kernel and the engine take turns on one image: each makes random operations, snapshots and
//! deletions, and then finds all that the other did. Both checkers judge after each turn.
//!
//! UBTRFS_TURNS says how many rounds; `make soak` runs a hundred.

mod common;

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::open_for_writing;
use ubtrfs_engine::{
    Error, Filesystem, InodeId, NewInode, RenameMode, Reservation, SetAttributes, SnapshotOptions,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::Executor;
use ubtrfs_testkit::{
    Compare, KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, assert_checks_clean, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// What either side can do to a path, relative to the top level.
#[derive(Clone, Debug)]
enum Operation {
    Write { path: String, offset: u64, bytes: Vec<u8> },
    Truncate { path: String, size: u64 },
    MakeDirectory { path: String },
    RemoveDirectory { path: String },
    Remove { path: String },
    Rename { from: String, to: String },
    Link { from: String, to: String },
    Symlink { path: String },
    Chmod { path: String, mode: u32 },
    Attribute { path: String, value: Option<Vec<u8>> },
    Clone { from: String, to: String },
    MakeSubvolume { path: String },
    Snapshot { from: String, to: String, read_only: bool },
    DeleteSubvolume { path: String },
    Commit,
}

/// A path of few names; what begins with `s` is a subvolume where it exists.
fn path(random: &mut Prng) -> String {
    let mut path = match random.below(3) {
        0 => format!("s{}/", random.below(6)),
        _ => String::new(),
    };
    if random.chance(1, 2) {
        path += &format!("d{}/", random.below(4));
    }
    path + &format!("f{}", random.below(12))
}

fn subvolume(random: &mut Prng) -> String {
    format!("s{}", random.below(6))
}

fn operation(random: &mut Prng) -> Operation {
    let directory = |random: &mut Prng| {
        let whole = path(random);
        let (above, _) = whole.rsplit_once('/').unwrap_or(("", ""));
        let above = if above.ends_with(|c: char| c.is_ascii_digit()) && above.starts_with('s') {
            format!("{}/", above.split('/').next().unwrap_or(""))
        } else {
            String::new()
        };
        format!("{above}d{}", random.below(4))
    };
    match random.below(32) {
        0..8 => {
            let len = match random.below(4) {
                0 => random.index(100_000),
                _ => random.index(3000),
            };
            let offset = if random.chance(1, 2) { 0 } else { random.below(200_000) };
            let bytes = if random.chance(1, 2) { random.bytes(len) } else { random.text(len) };
            Operation::Write { path: path(random), offset, bytes }
        }
        8..10 => Operation::Truncate { path: path(random), size: random.below(100_000) },
        10..13 => Operation::MakeDirectory { path: directory(random) },
        13 => Operation::RemoveDirectory { path: directory(random) },
        14..16 => Operation::Remove { path: path(random) },
        16..19 => Operation::Rename { from: path(random), to: path(random) },
        19 => Operation::Rename { from: directory(random), to: directory(random) },
        20 => Operation::Link { from: path(random), to: path(random) },
        21 => Operation::Symlink { path: path(random) },
        22 => Operation::Chmod { path: path(random), mode: 0o400 + 4 * random.index(60) as u32 },
        23..25 => {
            let value = random.chance(3, 4).then(|| {
                let len = random.index(300);
                random.bytes(len)
            });
            Operation::Attribute { path: path(random), value }
        }
        25..27 => Operation::Clone { from: path(random), to: path(random) },
        27 => Operation::MakeSubvolume { path: subvolume(random) },
        28 => Operation::Snapshot {
            from: if random.chance(1, 2) { String::new() } else { subvolume(random) },
            to: subvolume(random),
            read_only: random.chance(1, 3),
        },
        29..31 => Operation::DeleteSubvolume { path: subvolume(random) },
        _ => Operation::Commit,
    }
}

/// What the engine does; what cannot be done is no failure, as on the other side.
fn by_engine(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    let top = fs.top_level();
    let find = |path: &str| fs.resolve(top, path.as_bytes());
    let place = |path: &str| -> Result<(InodeId, Vec<u8>), Error> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((find(&format!("{dir}/"))?, name.as_bytes().to_vec()))
    };
    let new = |mode| NewInode::new(mode, fs.runtime().clock.now());
    match operation {
        Operation::Write { path, offset, bytes } => {
            let id = match find(path) {
                Ok(id) => id,
                Err(Error::NotFound { .. }) => {
                    let (dir, name) = place(path)?;
                    fs.begin(Reservation::create(0))?.create(dir, &name, &new(0o100_644))?
                }
                Err(error) => return Err(error),
            };
            fs.write(id, FileOffset(*offset), bytes)
        }
        Operation::Truncate { path, size } => fs.truncate(find(path)?, *size),
        Operation::MakeDirectory { path } => {
            let (dir, name) = place(path)?;
            fs.begin(Reservation::create(0))?.create(dir, &name, &new(0o040_755)).map(drop)
        }
        Operation::RemoveDirectory { path } => {
            let (dir, name) = place(path)?;
            fs.rmdir(dir, &name)
        }
        Operation::Remove { path } => {
            let (dir, name) = place(path)?;
            fs.unlink(dir, &name)
        }
        Operation::Rename { from, to } => {
            let ((dir, name), (to_dir, to_name)) = (place(from)?, place(to)?);
            fs.rename(dir, &name, to_dir, &to_name, RenameMode::Replace)
        }
        Operation::Link { from, to } => {
            let id = find(from)?;
            let (dir, name) = place(to)?;
            fs.begin(Reservation::create(0))?.link(dir, &name, id)
        }
        Operation::Symlink { path } => {
            let (dir, name) = place(path)?;
            let mut handle = fs.begin(Reservation::create(0))?;
            handle.symlink(dir, &name, b"some/where", &new(0o777)).map(drop)
        }
        Operation::Chmod { path, mode } => {
            let attributes = SetAttributes { mode: Some(*mode), ..SetAttributes::default() };
            fs.begin(Reservation::items(1))?.set_attributes(find(path)?, &attributes)
        }
        Operation::Attribute { path, value } => {
            let id = find(path)?;
            let mut handle = fs.begin(Reservation::items(4))?;
            match value {
                Some(value) => handle.set_xattr(id, b"trusted.one", value),
                None => handle.remove_xattr(id, b"trusted.one"),
            }
        }
        Operation::Clone { from, to } => {
            let (from, to) = (find(from)?, find(to)?);
            let size = fs.inode(from)?.size_bytes;
            fs.clone_range(from, FileOffset(0)..FileOffset(size), to, FileOffset(0))
        }
        Operation::MakeSubvolume { path } => {
            let mut handle = fs.begin(Reservation::create_subvolume())?;
            handle.create_subvolume(top, path.as_bytes(), &new(0o755)).map(drop)
        }
        Operation::Snapshot { from, to, read_only } => {
            let options = SnapshotOptions { read_only: *read_only };
            let source = find(from)?;
            if source.is_stand_in() {
                return Err(Error::InvalidArgument { what: from.clone() });
            }
            fs.snapshot(source.root, top, to.as_bytes(), &options).map(drop)
        }
        Operation::DeleteSubvolume { path } => {
            fs.delete_subvolume(top, path.as_bytes())?;
            if path.ends_with('1') { fs.clean_deleted_subvolumes().map(drop) } else { Ok(()) }
        }
        Operation::Commit => fs.commit(),
    }
}

fn by_kernel(top: &Path, operation: &Operation) -> io::Result<()> {
    use rustix::fs::{XattrFlags, lremovexattr, lsetxattr};
    let btrfs = |words: &[&str], paths: &[PathBuf]| {
        let output = std::process::Command::new("btrfs").args(words).args(paths).output()?;
        output.status.success().then_some(()).ok_or_else(|| io::Error::other("btrfs failed"))
    };
    let at = |path: &str| top.join(path);
    // No operation follows a symbolic link: the engine leaves that to its callers.
    let open = |path: &str, create: bool| {
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = fs::File::options();
        let flags = rustix::fs::OFlags::NOFOLLOW.bits();
        options.write(true).read(true).create(create).custom_flags(flags as i32).open(at(path))
    };
    match operation {
        Operation::Write { path, offset, bytes } => open(path, true)?.write_all_at(bytes, *offset),
        Operation::Truncate { path, size } => open(path, false)?.set_len(*size),
        Operation::MakeDirectory { path } => fs::create_dir(at(path)),
        Operation::RemoveDirectory { path } => fs::remove_dir(at(path)),
        Operation::Remove { path } => fs::remove_file(at(path)),
        Operation::Rename { from, to } => fs::rename(at(from), at(to)),
        Operation::Link { from, to } => fs::hard_link(at(from), at(to)),
        Operation::Symlink { path } => symlink("some/where", at(path)),
        Operation::Chmod { path, mode } => {
            let file = open(path, false)?;
            rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(*mode))?;
            Ok(())
        }
        Operation::Attribute { path, value: Some(value) } => {
            Ok(lsetxattr(at(path), "trusted.one", value, XattrFlags::empty())?)
        }
        Operation::Attribute { path, value: None } => Ok(lremovexattr(at(path), "trusted.one")?),
        Operation::Clone { from, to } => {
            let (from, to) = (open(from, false)?, open(to, false)?);
            Ok(rustix::fs::ioctl_ficlone(&to, &from)?)
        }
        Operation::MakeSubvolume { path } => btrfs(&["subvolume", "create"], &[at(path)]),
        Operation::Snapshot { from, to, read_only: true } => {
            let free = !at(to).exists();
            if !free {
                return Ok(());
            }
            btrfs(&["subvolume", "snapshot", "-r"], &[at(from), at(to)])
        }
        Operation::Snapshot { from, to, read_only: false } => {
            if at(to).exists() {
                return Ok(());
            }
            btrfs(&["subvolume", "snapshot"], &[at(from), at(to)])
        }
        Operation::DeleteSubvolume { path } => btrfs(&["subvolume", "delete"], &[at(path)]),
        Operation::Commit => btrfs(&["filesystem", "sync"], &[top.to_owned()]),
    }
}

fn judge(image: &Path, when: &str) {
    println!("{when}");
    assert_checks_clean(image);
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
    let device: Arc<dyn Device> = Arc::new(device);
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![device], &options).unwrap();
    let options = ubtrfs_check::CheckOptions {
        data: true,
        executor: Executor::Threads(2),
        ..ubtrfs_check::CheckOptions::default()
    };
    let report = ubtrfs_check::check(&volume, &options).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{when}: {errors:#?}");
}

#[test]
fn kernel_and_engine_find_what_the_other_did() {
    if !oracle::require_all(&[
        Oracle::KernelBtrfs,
        Oracle::Root,
        Oracle::MkfsBtrfs,
        Oracle::BtrfsProgs,
    ]) {
        return;
    }
    let rounds = std::env::var("UBTRFS_TURNS").map_or(16, |turns| turns.parse().unwrap());
    let mut random = Prng::of_test(91);
    println!("seed {}", random.seed());
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().size_bytes(600 << 20).make(&image);
    let (mut tried, mut done) = ([0; 2], [0; 2]);
    for round in 0..rounds {
        let fs = open_for_writing(&image);
        for _ in 0..200 {
            let operation = operation(&mut random);
            let result = by_engine(&fs, &operation);
            tried[0] += 1;
            done[0] += u32::from(result.is_ok());
            if let Err(
                error @ (Error::Corrupt(_)
                | Error::Aborted { .. }
                | Error::NoSpace { .. }
                | Error::Volume(_)),
            ) = result
            {
                panic!("{operation:?}: {error}");
            }
        }
        fs.commit().unwrap();
        let ours = common::snapshot(&fs, fs.top_level());
        drop(fs);
        judge(&image, &format!("round {round}, after the engine"));

        let mount = KernelMount::read_write(&image, "subvolid=5,noatime");
        TreeSnapshot::of_directory(mount.path()).assert_same(&ours, &Compare::same_filesystem());
        for _ in 0..200 {
            let operation = operation(&mut random);
            tried[1] += 1;
            done[1] += u32::from(by_kernel(mount.path(), &operation).is_ok());
        }
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
        let theirs = TreeSnapshot::of_directory(mount.path());
        mount.unmount();
        judge(&image, &format!("round {round}, after the kernel"));
        let fs = common::open(&[&image]);
        theirs.assert_same(&common::snapshot(&fs, fs.top_level()), &Compare::same_filesystem());
    }
    println!(
        "done of tried: engine {} of {}, kernel {} of {}",
        done[0], tried[0], done[1], tried[1]
    );
    assert!(done.iter().zip(tried).all(|(done, tried)| *done > tried / 4));
}
