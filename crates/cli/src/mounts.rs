//! What this command has mounted on the machine, as the system tells.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags};
use ubtrfs_fuse::{MountId, Restriction};

use crate::failure;
use crate::live;
use crate::mount_helper;
use crate::output::quote;

/// A mount of this command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mounted {
    /// Its number.
    pub id: MountId,
    /// Where.
    pub directory: PathBuf,
    /// What of it is to be seen there, from its top on: `/`, or less where that was bound to the place. Behind a name that is gone stands
    /// [`GONE`].
    pub root: PathBuf,
    /// The image that was named when it was mounted.
    pub source: PathBuf,
    /// Its device number, as `/proc/self/mountinfo` writes it.
    pub device: String,
    /// Who mounted it.
    pub uid: u32,
    /// Nothing can be written.
    pub is_read_only: bool,
    /// Be it in this place alone.
    pub is_read_only_here: bool,
    /// Wherever it is to be seen.
    pub is_read_only_everywhere: bool,
    /// What else is not allowed in this place.
    pub restrictions: Vec<Restriction>,
    /// The time of access of what is read is noted.
    pub notes_access: bool,
}

/// For so long it may take to find what a user named: that may lie in what nobody serves.
pub const LOOK_WAIT_MAX: Duration = Duration::from_secs(10);

/// Behind what has lost its name, in the system's table.
pub const GONE: &[u8] = b"//deleted";

impl Mounted {
    /// Whether only a part of it is to be seen there.
    pub fn is_part(&self) -> bool {
        self.root != Path::new("/")
    }

    /// Opens its image to be read, if that is still found by its name. Whoever mounted chose the name, and may have put there by now what is
    /// not to be opened: a FIFO, which waits for who writes to it, or a device.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for what is neither a file nor a block device.
    pub fn open_source(&self) -> io::Result<File> {
        // That opens nothing.
        let found = rustix::fs::open(&self.source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // What was looked at, whatever has the name by now.
        Ok(ubtrfs_fuse::open_again(&found)?.into())
    }

    /// Whether who serves it has its image open to be read only: he shares it then, and could not write to it. Not where that is not to be told.
    pub fn shares_its_image(&self) -> bool {
        let looked_at = self.clone();
        let image = live::within(LOOK_WAIT_MAX, move || looked_at.open_source());
        image.is_some_and(|image| image.is_ok_and(|file| file.try_lock_shared().is_ok()))
    }
}

/// What is mounted on a directory, if this command mounted it. Who serves it is not asked.
pub fn on(directory: &Path) -> Option<Mounted> {
    // With a slash behind it, it is a directory, or none: a file of a mount that is bound to a place is an image itself, if anything.
    at(&directory.join("")).ok().flatten()
}

/// As [`on`], be it on a file.
///
/// # Errors
/// The system's, where nothing is found by that name.
pub fn at(path: &Path) -> io::Result<Option<Mounted>> {
    let reached = ubtrfs_fuse::reached(path)?;
    let Some(table) = own_table() else { return Ok(None) };
    Ok(match reached {
        Some(reached) => by_id(&table, reached.mount).filter(|_| reached.is_top),
        None => on_in(&table, &resolved(&table, path)?),
    })
}

/// What a file or directory lies in, if this command mounted that.
pub fn around(path: &Path) -> Option<Mounted> {
    let reached = ubtrfs_fuse::reached(path).ok()?;
    let table = own_table()?;
    match reached {
        Some(reached) => by_id(&table, reached.mount),
        None => around_in(&table, &std::fs::canonicalize(path).ok()?),
    }
}

/// Where an image is mounted.
pub fn of_image(image: &Path) -> Option<Mounted> {
    let image = std::fs::canonicalize(image).ok()?;
    of_image_in(&own_table()?, &image)
}

/// A mount as it is by now: directories above it may have other names. Nothing where it has been taken off, or something else is mounted on it.
pub fn as_it_is_now(mounted: &Mounted) -> Option<Mounted> {
    as_it_is_in(&own_table()?, mounted)
}

/// Whether what was mounted is to be seen anywhere yet.
pub fn is_anywhere(mounted: &Mounted) -> bool {
    let table = own_table().unwrap_or_default();
    // The number alone may be another mount's by now.
    lines(&table)
        .filter_map(of_line)
        .any(|other| other.device == mounted.device && other.source == mounted.source)
}

/// Opens a directory in the filesystem with a device number, wherever it is mounted by now, if this process is let in.
pub fn open_by_device(device: &str) -> Option<File> {
    let table = own_table()?;
    let places = lines(&table).filter_map(of_line).filter(|mounted| mounted.device == device);
    // Not what lies below something else, which might be slow to answer.
    let mut places = places.filter(|mounted| as_it_is_in(&table, mounted).is_some());
    places.find_map(|mounted| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&mounted.directory, flags, Mode::empty()).ok()?;
        let found = rustix::fs::fstat(&opened).ok()?.st_dev;
        (format!("{}:{}", rustix::fs::major(found), rustix::fs::minor(found)) == device)
            .then(|| File::from(opened))
    })
}

/// For so long a process that served a mount may take to make all durable.
const LEAVING_MAX: Duration = Duration::from_secs(120);
/// Who waits longer is told for whom.
const SILENT_MAX: Duration = Duration::from_secs(1);
/// So often it is tried again where nobody is seen to have the image open.
const UNSEEN_MAX: u32 = 3;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Who has an image open that somebody else wants.
pub enum Holder {
    /// He served a mount that was taken away, and is about to let go: it can be tried again.
    Leaves,
    /// It is mounted here.
    Serves(Mounted),
    /// Somebody who is not waited for, or was for too long.
    Stays,
}

/// Waiting for who serves a mount that has ended.
#[derive(Default)]
pub struct Leaving {
    begun: Option<Instant>,
    has_told: bool,
    unseen_count: u32,
}

impl Leaving {
    /// Waits a little where the process that has `image` open served a mount, which has been taken away by now, or waits itself for who did.
    pub fn wait(&mut self, image: &Path) -> Holder {
        let Ok(image) = std::fs::canonicalize(image) else { return Holder::Stays };
        let Some(pid) = ubtrfs_volume::lock_holder(&image) else {
            // It has let go meanwhile, or is not to be seen.
            self.unseen_count += 1;
            let is_seldom = self.unseen_count <= UNSEEN_MAX;
            return if is_seldom { Holder::Leaves } else { Holder::Stays };
        };
        self.unseen_count = 0;
        // Who names an image twice has it open himself.
        if pid == std::process::id() {
            return Holder::Stays;
        }
        let served = match role_of(pid) {
            Role::Serves => mount_of(pid, &image),
            Role::Unmounts => Served::Nothing,
            Role::Other => return Holder::Stays,
        };
        match served {
            Served::Nothing => {}
            Served::Here(mounted) => return Holder::Serves(mounted),
            // Nor may be asked who has ended, be it since the lock was looked for.
            Served::Unknown if has_ended(pid) => {}
            Served::Unknown if ubtrfs_volume::lock_holder(&image) != Some(pid) => {}
            Served::Unknown => return Holder::Stays,
        }
        let waited = self.begun.get_or_insert_with(Instant::now).elapsed();
        if waited > SILENT_MAX && !self.has_told {
            self.has_told = true;
            let name = quote::path(&image);
            failure::say(&format!(
                "ubtrfs: note: {name}: waiting for process {pid}, which had it mounted"
            ));
        }
        std::thread::sleep(LOOK_EVERY);
        if waited < LEAVING_MAX { Holder::Leaves } else { Holder::Stays }
    }
}

/// What a process has an image open for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// It serves a mount, or is about to be gone.
    Serves,
    /// It takes a mount off, and locks the image to see that nobody else does, for a moment.
    Unmounts,
    /// It is none of this command's that has to do with mounts.
    Other,
}

fn role_of(pid: u32) -> Role {
    role_in(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default())
}

/// By a command line; who is about to be gone has none.
fn role_in(line: &[u8]) -> Role {
    if line.is_empty() {
        return Role::Serves;
    }
    let mut words = line.split(|byte| *byte == 0);
    let name = words.next().and_then(|path| path.rsplit(|byte| *byte == b'/').next());
    let name = name.unwrap_or_default();
    let is_one_of = |names: &[&str]| names.iter().any(|own| own.as_bytes() == name);
    match words.next() {
        Some(b"mount") if name == b"ubtrfs" => Role::Serves,
        Some(b"umount") if name == b"ubtrfs" => Role::Unmounts,
        _ if is_one_of(&mount_helper::NAMES) => Role::Serves,
        _ if is_one_of(&mount_helper::UMOUNT_NAMES) => Role::Unmounts,
        _ => Role::Other,
    }
}

/// What a process serves.
enum Served {
    Nothing,
    Here(Mounted),
    /// It may not be asked.
    Unknown,
}

/// The mount that a process serves, be it where only its own namespace shows it. The image may have been mounted by another name than `image`.
fn mount_of(pid: u32, image: &Path) -> Served {
    let Ok(table) = std::fs::read(format!("/proc/{pid}/mountinfo")) else { return Served::Unknown };
    let connections = connections_of(pid);
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let file = file_of(image);
    let is_his = |mounted: &Mounted| match &connections {
        // The number of a mount that has ended is soon another's, be it before the process has closed its end.
        Some(connections) => {
            connections.contains(&mounted.device) && may_have_open(pid, &mounted.source)
        }
        // Not all kernels tell of connections, and one is gone a little before the image is free.
        None => match file_of(&mounted.source) {
            Some(source) => Some(source) == file,
            None => mounted.source == image || names_directory(&words, &mounted.directory),
        },
    };
    let found = all_of_it_first(lines(&table).filter_map(of_line).filter(is_his));
    found.map_or(Served::Nothing, Served::Here)
}

/// Whether a process has ended, be it that it has files open yet: the kernel takes its memory and its namespaces from it before it closes the
/// last of them.
fn has_ended(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
}

/// The device numbers of the mounts whose `/dev/fuse` a process has open, as the system's table has them; `None` where the kernel does
/// not tell.
fn connections_of(pid: u32) -> Option<Vec<String>> {
    /// Bits of the minor number in the kernel's device number.
    const MINOR_BITS: u32 = 20;
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?;
    let texts = files.flatten().filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let found: Vec<String> = texts
        .filter_map(|text| {
            let value = text.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?;
            let number: u64 = value.trim().parse().ok()?;
            Some(format!("{}:{}", number >> MINOR_BITS, number & ((1 << MINOR_BITS) - 1)))
        })
        .collect();
    (!found.is_empty()).then_some(found)
}

/// Whether a process has a file open, as far as can be seen.
fn may_have_open(pid: u32, path: &Path) -> bool {
    let Some(file) = file_of(path) else { return true };
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return true };
    open.flatten().any(|one| file_of(&one.path()) == Some(file))
}

/// A file, whatever it is called.
fn file_of(path: &Path) -> Option<(u64, u64)> {
    let about = std::fs::metadata(path).ok()?;
    Some(match about.file_type().is_block_device() {
        true => (0, about.rdev()),
        false => (about.dev(), about.ino()),
    })
}

/// Whether a command line names a directory, from the root on.
fn names_directory(line: &[u8], directory: &Path) -> bool {
    line.split(|byte| *byte == 0).any(|word| Path::new(OsStr::from_bytes(word)) == directory)
}

/// The mounts that this process sees. A place's name may be any bytes.
fn own_table() -> Option<Vec<u8>> {
    let mut table = Vec::new();
    ubtrfs_fuse::open_own_proc("mountinfo")
        .and_then(|mut file| file.read_to_end(&mut table))
        .ok()?;
    Some(table)
}

fn as_it_is_in(table: &[u8], mounted: &Mounted) -> Option<Mounted> {
    let is_it = |other: &Mounted| other.id == mounted.id && other.device == mounted.device;
    let found = lines(table).filter_map(of_line).find(is_it)?;
    on_in(table, &found.directory).filter(is_it)
}

fn of_image_in(table: &[u8], image: &Path) -> Option<Mounted> {
    all_of_it_first(lines(table).filter_map(of_line).filter(|mounted| mounted.source == image))
}

/// One where all of it is to be seen, or else a part.
fn all_of_it_first(found: impl Iterator<Item = Mounted>) -> Option<Mounted> {
    found.min_by_key(Mounted::is_part)
}

fn lines(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    table.split(|byte| *byte == b'\n')
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| *byte == b' ')
}

/// Where a path leads, by its directory and, where it is a symbolic link, its target: what is mounted there may not answer.
fn resolved(table: &[u8], path: &Path) -> io::Result<PathBuf> {
    /// As of Linux.
    const LINK_COUNT_MAX: usize = 40;
    let mut path = std::path::absolute(path)?;
    for _ in 0..LINK_COUNT_MAX {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { break };
        let parent = std::fs::canonicalize(parent)?;
        let whole = parent.join(name);
        if places_in(table).iter().any(|place| place.directory == whole) {
            return Ok(whole);
        }
        let Ok(target) = std::fs::read_link(&whole) else { break };
        path = parent.join(target);
    }
    std::fs::canonicalize(path)
}

fn by_id(table: &[u8], id: MountId) -> Option<Mounted> {
    lines(table).filter_map(of_line).find(|mounted| mounted.id == id)
}

fn around_in(table: &[u8], path: &Path) -> Option<Mounted> {
    of_line(leading_to(&places_in(table), path)?.line)
}

fn on_in(table: &[u8], directory: &Path) -> Option<Mounted> {
    let places = places_in(table);
    let found = leading_to(&places, directory)?;
    of_line(found.line).filter(|mounted| mounted.directory == directory)
}

/// A mount, whoever made it.
struct Place<'a> {
    id: u64,
    /// The mount on which it lies.
    parent: u64,
    directory: PathBuf,
    line: &'a [u8],
}

fn places_in(table: &[u8]) -> Vec<Place<'_>> {
    let place = |line| {
        let mut words = words(line);
        let mut number = || str::from_utf8(words.next()?).ok()?.parse().ok();
        let (id, parent) = (number()?, number()?);
        let directory = PathBuf::from(unescape(words.nth(2)?));
        Some(Place { id, parent, directory, line })
    };
    lines(table).filter_map(place).collect()
}

/// The mount that a path without symbolic links leads to. The table is not ordered by what lies on what, and has what cannot be reached, too:
/// each mount in it names the one on which it lies.
fn leading_to<'a, 'b>(places: &'b [Place<'a>], path: &Path) -> Option<&'b Place<'a>> {
    let is_first = |place: &Place<'_>| {
        place.parent == place.id || places.iter().all(|other| other.id != place.parent)
    };
    let on = |below: Option<&Place<'_>>, directory: &Path| {
        places.iter().filter(|place| place.directory == directory).find(|place| match below {
            Some(below) => place.parent == below.id && place.id != below.id,
            None => is_first(place),
        })
    };
    let directories: Vec<&Path> = path.ancestors().collect();
    let mut at = None;
    for directory in directories.into_iter().rev() {
        // No more than there are: the table may have changed while it was read.
        for _ in 0..places.len() {
            let Some(over) = on(at, directory) else { break };
            at = Some(over);
            // What lies over the root is not met by a path that begins there.
            if directory.parent().is_none() {
                break;
            }
        }
    }
    at
}

/// `ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS FIELD… - TYPE SOURCE OPTIONS`.
fn of_line(line: &[u8]) -> Option<Mounted> {
    let mut front = words(line);
    let id = MountId(str::from_utf8(front.next()?).ok()?.parse().ok()?);
    let mut front = front.skip(1);
    let device = str::from_utf8(front.next()?).ok()?.to_owned();
    let root = PathBuf::from(unescape(front.next()?));
    let directory = PathBuf::from(unescape(front.next()?));
    let says =
        |options: &[u8], what: &[u8]| options.split(|byte| *byte == b',').any(|word| word == what);
    let here = front.next()?;
    let mut back = front.skip_while(|word| *word != b"-").skip(1);
    if !matches!(back.next()?, b"fuse.ubtrfs" | b"fuseblk.ubtrfs") {
        return None;
    }
    let source = PathBuf::from(unescape(back.next().unwrap_or_default()));
    let options = str::from_utf8(back.next().unwrap_or_default()).ok()?;
    // Here, or wherever it is mounted.
    let is_read_only_here = says(here, b"ro");
    let is_read_only_everywhere = says(options.as_bytes(), b"ro");
    let is_read_only = is_read_only_here || is_read_only_everywhere;
    let is_restricted = |restriction: &Restriction| says(here, restriction.name().as_bytes());
    let restrictions = Restriction::ALL.into_iter().filter(is_restricted).collect();
    let notes_access = !says(here, b"noatime");
    let uid = options.split(',').find_map(|option| option.strip_prefix("user_id="));
    let uid = uid?.parse().ok()?;
    Some(Mounted {
        id,
        directory,
        root,
        source,
        device,
        uid,
        is_read_only,
        is_read_only_here,
        is_read_only_everywhere,
        restrictions,
        notes_access,
    })
}

/// Undoes the octal escapes of `/proc`.
fn unescape(text: &[u8]) -> OsString {
    let mut plain = Vec::new();
    let mut rest = text;
    while let [byte, behind @ ..] = rest {
        let digits = behind.get(..3).filter(|_| *byte == b'\\');
        let digits = digits.and_then(|digits| str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                plain.push(escaped);
                rest = &behind[3..];
            }
            None => {
                plain.push(*byte);
                rest = behind;
            }
        }
    }
    OsString::from_vec(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_tells_what_an_image_is_open_for() {
        let said = |text: &str| role_in(text.replace(' ', "\0").as_bytes());
        for text in ["", "ubtrfs mount i d", "/sbin/mount.fuse.ubtrfs i d", "mount.ubtrfs i d"] {
            assert_eq!(said(text), Role::Serves, "{text}");
        }
        for text in ["/usr/bin/ubtrfs umount d", "/sbin/umount.fuse d", "umount.ubtrfs d -l"] {
            assert_eq!(said(text), Role::Unmounts, "{text}");
        }
        for text in ["ubtrfs ls i", "ubtrfs", "umount d", "mount i d", "sh -c umount.fuse"] {
            assert_eq!(said(text), Role::Other, "{text}");
        }
    }

    #[test]
    fn names_of_proc_are_read() {
        assert_eq!(unescape(br"/a\040b\134c\x\04"), OsString::from(r"/a b\c\x\04"));
        assert_eq!(unescape(b"/plain"), OsString::from("/plain"));
        assert_eq!(unescape(b"/\xff\\011"), OsString::from_vec(b"/\xff\t".to_vec()));
    }

    #[test]
    fn mounts_of_this_command_are_found_and_no_others() {
        let table = b"\
            21 22 8:2 / /caf\xe9 rw - ext4 /dev/root rw\n\
            22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
            40 22 0:51 / /mnt/a\\040b rw,noatime shared:9 - fuse.ubtrfs /disk\\0401.img rw,user_id=7,group_id=8\n\
            41 22 0:52 / /mnt/c rw - fuse.ubtrfs /d.img rw,user_id=0\n\
            42 41 0:53 / /mnt/c rw - tmpfs none rw\n";
        let found = on_in(table, Path::new("/mnt/a b")).unwrap();
        assert_eq!((found.device.as_str(), found.uid), ("0:51", 7));
        assert!(!found.is_read_only && !found.notes_access);
        assert!(of_line(b"9 1 0:5 / /m rw - fuse.ubtrfs /i rw,user_id=1").unwrap().notes_access);
        assert!(
            of_line(b"9 1 0:5 / /m ro,noatime - fuse.ubtrfs /i ro,user_id=1").unwrap().is_read_only
        );
        assert_eq!(found.source, Path::new("/disk 1.img"));
        assert!(
            of_line(b"9 1 0:5 / /m rw,noatime - fuse.ubtrfs /i ro,user_id=1").unwrap().is_read_only
        );
        let line = b"9 1 7:0 / /m rw,noatime - fuseblk.ubtrfs /dev/loop0 rw,user_id=0,blksize=4096";
        assert_eq!(of_line(line).unwrap().source, Path::new("/dev/loop0"));
        let bound = of_line(b"9 1 0:5 /a\\040b//deleted /m rw - fuse.ubtrfs /i rw,user_id=1");
        assert_eq!(bound.unwrap().root, Path::new("/a b//deleted"));
        assert!(!found.is_part());
        let table_now = b"\
            40 22 0:51 / /mnt/moved rw - fuse.ubtrfs /disk\\0401.img rw,user_id=7\n\
            41 22 0:53 / /mnt/b rw - fuse.ubtrfs /e.img rw,user_id=7\n";
        let now = as_it_is_in(table_now, &found).map(|mounted| mounted.directory);
        assert_eq!(now, Some("/mnt/moved".into()));
        assert_eq!(as_it_is_in(&table_now[..10], &found), None);
        let covered = [table_now, &b"60 40 0:60 / /mnt/moved rw - tmpfs none rw\n"[..]].concat();
        assert_eq!(as_it_is_in(&covered, &found), None);
        let twice = b"\
            8 1 0:5 /part /here rw - fuse.ubtrfs /i rw,user_id=1\n\
            9 1 0:5 / /there rw - fuse.ubtrfs /i rw,user_id=1\n";
        assert_eq!(of_image_in(twice, Path::new("/i")).unwrap().directory, Path::new("/there"));
        let inside = |path| around_in(table, Path::new(path)).map(|mounted| mounted.directory);
        assert_eq!(inside("/mnt/a b/c/d"), Some("/mnt/a b".into()));
        assert_eq!([inside("/mnt/c/d"), inside("/mnt/a"), inside("/mnt")], [None, None, None]);
        for other in ["/", "/mnt/c", "/mnt"] {
            assert_eq!(on_in(table, Path::new(other)), None, "{other}");
        }
    }
    #[test]
    fn mount_on_top_is_found_whatever_the_order_of_the_table_is() {
        // What was mounted first was moved on the other; a directory above has been covered; another root lies over the root.
        let table = b"\
            22 1 8:1 / / rw - ext4 /dev/root rw\n\
            23 22 0:9 / / rw - tmpfs none rw\n\
            30 41 0:51 / /m rw - fuse.ubtrfs /above rw,user_id=0\n\
            41 22 0:52 / /m rw - fuse.ubtrfs /below rw,user_id=0\n\
            42 41 0:53 / /m/in rw - fuse.ubtrfs /covered rw,user_id=0\n\
            43 30 0:54 / /m/deep/in rw,nosuid,noexec - fuse.ubtrfs /deep rw,user_id=0\n\
            44 44 0:55 / /loop rw - fuse.ubtrfs /loop rw,user_id=0\n";
        let source = |found: Option<Mounted>| found.map(|mounted| mounted.source);
        let on = |path| source(on_in(table, Path::new(path)));
        let around = |path| source(around_in(table, Path::new(path)));
        assert_eq!(on("/m"), Some("/above".into()));
        assert_eq!([on("/m/in"), on("/m/deep"), on("/"), on("/m2")], [None, None, None, None]);
        assert_eq!(on("/m/deep/in"), Some("/deep".into()));
        assert_eq!(around("/m/in/file"), Some("/above".into()));
        assert_eq!(around("/m/deep/in/file"), Some("/deep".into()));
        let deep = by_id(table, MountId(43)).unwrap();
        assert_eq!(deep.restrictions, [Restriction::NoSuid, Restriction::NoExec]);
        let is_there = |id| as_it_is_in(table, &by_id(table, MountId(id)).unwrap()).is_some();
        assert_eq!([30, 41, 42, 43].map(is_there), [true, false, false, true]);
        // In a directory that was made the root what lies above is not in the table.
        let partial = b"41 22 0:52 / /m rw - fuse.ubtrfs /i rw,user_id=0\n";
        assert_eq!(source(around_in(partial, Path::new("/m/x"))), Some("/i".into()));
    }

    #[test]
    fn links_are_followed_without_looking_at_what_they_lead_to() {
        let scratch = tempfile::tempdir().unwrap();
        let top = std::fs::canonicalize(scratch.path()).unwrap();
        for (link, target) in [("one", "two"), ("two", "./place"), ("round", "round")] {
            std::os::unix::fs::symlink(target, top.join(link)).unwrap();
        }
        let place = top.join("place");
        // It need not be there to be found.
        let table = format!("9 1 0:5 / {} rw - fuse.ubtrfs /i rw,user_id=1", place.display());
        for name in ["one", "two", "place", "./one", "place/"] {
            assert_eq!(resolved(table.as_bytes(), &top.join(name)).unwrap(), place, "{name}");
        }
        assert!(resolved(b"", &top.join("one")).is_err());
        assert!(resolved(table.as_bytes(), &top.join("round")).is_err());
        assert_eq!(resolved(b"", Path::new("/")).unwrap(), Path::new("/"));
    }
}
