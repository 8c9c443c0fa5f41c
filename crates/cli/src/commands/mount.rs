//! `ubtrfs mount`: a filesystem as a directory.

use std::io::{BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::ArgAction;
use signal_hook::iterator::Signals;
use ubtrfs_engine::{BackgroundOptions, Filesystem, InodeId, OpenOptions};
use ubtrfs_fuse::{
    ControlSocket, FuseDevice, MountOptions, RINGS_SWITCH, Remount, Restriction, ServeOptions,
    Server, Syncs, Transport, offers_rings,
};
use ubtrfs_iomap::CacheOptions;
use ubtrfs_ondisk::InodeNo;
use ubtrfs_ondisk::RootId;
use ubtrfs_rt::{Arc, Mutex};
use ubtrfs_volume::OpenMode;

use crate::call::Call;
use crate::compress::{self, Compress};
use crate::failure::{self, Exit, Failure, Result};
use crate::image::{Image, ImageArgs, VolumeWords};
use crate::live::{self, Live, Synced};
use crate::mount_helper;
use crate::mount_words;
use crate::mounts::{self, Mounted};
use crate::output::quote;
use crate::outside::Outside;
use crate::signals;

/// Set for the process that serves; it says on its standard output when it does.
const SERVES: &str = "UBTRFS_MOUNT_SERVES";
const READY: &str = "ready";
/// Names the socket at which a service manager waits for the word of a process in the foreground: sd_notify(3).
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// Of mount(8): an image that is not there is no failure.
const NO_FAIL: &str = "nofail";
/// Names the file into which the process that serves writes at its end how often each operation of `linux/fuse.h` was asked for, a line
/// each of its number and the count. For the benchmarks.
const REQUEST_COUNTS: &str = "UBTRFS_REQUEST_COUNTS";

/// Mount the filesystem in an image on a directory
///
/// Returns when the directory shows it; a process in the background serves it until it is
/// unmounted. What a program syncs (fsync) is durable then; all else in about a minute, and when it
/// is unmounted. sync(1) reaches it where root mounts a block device; `sync DIR` does anywhere.
/// With -f it stays in the foreground, and tells a service manager when the directory can be used
/// (sd_notify(3): READY=1 to NOTIFY_SOCKET, as for Type=notify of systemd). SOURCE_DATE_EPOCH is
/// not heeded: time goes by in a mount.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Options for -o, as of mount(8):
  ro, rw               nothing can be written; or it can (the default)
  subvol=PATH          mount this subvolume, not the default one
  subvolid=ID          likewise, by its number
  compress[=METHOD[:LEVEL]], compress-force[=...]
                       compress what is written: zlib, lzo or zstd [zlib]
  commit=SECONDS       what is changed is durable after so long; the bytes of files, which wait
                       as long before they are stored, or 30 seconds, after both [30];
                       what the kernel holds back (maps, writeback) is changed when it comes
  max_inline=BYTES     keep files of up to so many bytes beside their inode [2048]
  cache=SIZE           memory for tree blocks and file data
  busy_poll=MICROSECONDS
                       look so long for the next request before sleeping; 0 saves that
                       of the processor and makes each request wait for it [100]
  io_uring             have requests come by io_uring where root has switched that on in the
                       kernel: faster where several programs ask at once, slower for a
                       single one
  clone_fd             each thread that takes requests has a descriptor of /dev/fuse of its
                       own, as with libfuse; not with io_uring, which needs none
  discard[=async|sync] give freed space back to the image file or device, behind a commit
  degraded             mount although devices are missing
  device=FILE, partition=N, offset=BYTES
                       as --device (one a word), --partition and --offset, for lines of fstab
  allow_other          other users see it, too (as they do in any case where root mounts)
  fakeroot             be root in it, without being so: owners and permissions are recorded
                       as they are set, what is made is root's, and nobody else sees it
                       (device nodes: ubtrfs mknod DIR PATH). Of files recorded as another's
                       the kernel refuses ACLs, which install and cp -p set: mount without
                       this word inside of `unshare -Urm` for these, or run them by fakeroot(1)
  writeback            what is written stays with the kernel first: many small writes become few;
                       an error (no space) shows when it is synced or closed, holes are not told,
                       commands that change files are refused at the directory, chattr does not
                       move the time of change that is shown, and what a map stored behind a
                       file's end is part of the file when it grows
  sync, dirsync        each change is durable when it returns; with dirsync those of names and
                       attributes. chattr +S and +D ask the same of a file or directory
  noatime              the time of access of what is read stays (the default)
  relatime             it is noted after a change, and once a day; not of what the kernel has
                       in its memory, which is read without this process
  nodiratime           not that of directories, with relatime
  nodev, nosuid, noexec, nosymfollow, user, users, owner, group
                       as of mount(8); nosymfollow for root alone. What is mounted by users
                       only the one who mounted it can unmount, and root
  remount              what is mounted on DIR becomes ro or rw, nodev and so on, as is said
                       beside it; other options stay as it was mounted, and another word
                       for the time of access is refused. With ro all is
                       durable when it returns (with mount -i, which does without this
                       command, after a while)
Words that ask for nothing here, or for what is so in any case, are taken as well: of mount(8)
  auto, noauto, nofail, _netdev, x-*, defaults, default_permissions, lazytime, loop,
  silent; of Linux's btrfs ssd, nossd, ssd_spread, space_cache[=v1|v2], autodefrag,
  noautodefrag, nodiscard, datacow, datasum, barrier, treelog, notreelog, acl, nossd_spread,
  noflushoncommit, enospc_debug, rescan_uuid_tree, thread_pool=N, metadata_ratio=N. Words that
  would change what is stored, or when it is durable, are not: nodatacow, nodatasum, nobarrier,
  flushoncommit, noacl, strictatime.

An image is mounted once, and of a disk image one partition. What of the mount is to be seen in
another place, too, another subvolume say, mount --bind shows there; commands take that place as
well, and begin paths at what it shows.

What the kernel does with its own btrfs, and hands to no FUSE server or does otherwise here:
  FICLONE, FIEMAP      cp --reflink=always fails, filefrag finds no extents. Plain cp (coreutils 9)
                       shares what it copies; ubtrfs reflink and inspect fiemap take the directory
  btrfs(8)             the command of btrfs-progs refuses the directory; ubtrfs takes it
  one device           find -xdev, du -x, rsync -x and tar --one-file-system go into subvolumes and
                       snapshots: exclude them by name, or mount a subvolume that has none in it
  read-ahead           the kernel's 128 KiB where others than root mount, who may not set it; else 512

Examples:
  ubtrfs mount disk.img /mnt
  ubtrfs mount -o ro,subvol=snapshots/monday disk.img /mnt
  ubtrfs mount -o subvolid=5 disk.img /mnt && mount --bind /mnt/home /home
  ubtrfs mount -o remount,ro disk.img /mnt
  ubtrfs umount /mnt"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Where to mount it
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Options, separated by commas
    #[arg(short, long, value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,
    /// Serve it in this process, until it is unmounted or interrupted
    #[arg(short, long)]
    foreground: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// What `-o` says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Wanted {
    read_only: bool,
    allow_other: bool,
    discard: bool,
    subvol: Option<String>,
    subvolid: Option<u64>,
    compress: Option<Compress>,
    force_compression: bool,
    commit_seconds: Option<u64>,
    max_inline_bytes: Option<usize>,
    cache_bytes: Option<usize>,
    looking: Option<Duration>,
    notes_access: bool,
    fake_root: bool,
    writeback: bool,
    syncs: Syncs,
    uses_rings: bool,
    clones_device: bool,
    naive: bool,
    /// What words say of what is not allowed, in their order: whether that becomes so, or is no longer.
    said: Vec<(Restriction, bool)>,
    /// Whether it can be written is said, one way or the other.
    says_writable: bool,
    /// The access times of directories are not noted.
    leaves_directories: bool,
    volume: VolumeWords,
}

impl Wanted {
    fn parse(options: &[String]) -> Result<Self> {
        let mut wanted = Self::default();
        for option in options {
            let (name, value) = match option.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (option.as_str(), None),
            };
            wanted.take(name, value).map_err(|why| Failure::usage("-o", why).at(option))?;
        }
        if wanted.syncs == Syncs::All && wanted.writeback {
            let why = "with writeback the kernel keeps what is written";
            return Err(Failure::usage("-o", why).at("sync"));
        }
        if wanted.uses_rings && wanted.clones_device {
            let why = "with io_uring requests come by the kernel's queues, and by no descriptors";
            return Err(Failure::usage("-o", why).at("clone_fd"));
        }
        if wanted.fake_root && wanted.allow_other {
            let why = "with fakeroot nobody's permissions are checked, so others cannot be let in";
            return Err(Failure::usage("-o", why).at("allow_other"));
        }
        Ok(wanted)
    }

    /// What is not allowed by what was said, where `before` was not.
    fn restrictions(&self, before: &[Restriction]) -> Vec<Restriction> {
        let is_on = |restriction: &Restriction| {
            let said = self.said.iter().rfind(|(other, _)| other == restriction);
            said.map_or(before.contains(restriction), |(_, is_on)| *is_on)
        };
        Restriction::ALL.into_iter().filter(is_on).collect()
    }

    fn restrict(&mut self, restriction: Restriction, is_on: bool) {
        self.said.push((restriction, is_on));
    }

    fn take(&mut self, name: &str, value: Option<&str>) -> std::result::Result<(), String> {
        let number =
            |value: &str| value.parse::<u64>().map_err(|_| "a number is wanted".to_owned());
        let size = |value: &str| {
            let bytes = crate::size::parse(value)?;
            usize::try_from(bytes).map_err(|_| "too large".to_owned())
        };
        match (name, value) {
            ("ro" | "rw", None) => {
                self.read_only = name == "ro";
                self.says_writable = true;
            }
            ("allow_other", None) => self.allow_other = true,
            ("degraded", None) => self.volume.degraded = true,
            ("discard", None) => self.discard = true,
            ("fakeroot", None) => self.fake_root = true,
            ("writeback", None) => self.writeback = true,
            ("sync", None) => self.syncs = Syncs::All,
            ("dirsync", None) => self.syncs = self.syncs.max(Syncs::Names),
            ("async", None) => self.syncs = Syncs::Asked,
            ("io_uring", None) => self.uses_rings = true,
            ("clone_fd", None) => self.clones_device = true,
            // Left out of the help: it makes all slower, for the benchmarks to compare with.
            ("naive", None) => self.naive = true,
            ("nodev" | "dev", None) => self.restrict(Restriction::NoDev, name == "nodev"),
            ("nosuid" | "suid", None) => self.restrict(Restriction::NoSuid, name == "nosuid"),
            ("noexec" | "exec", None) => self.restrict(Restriction::NoExec, name == "noexec"),
            ("nosymfollow" | "symfollow", None) => {
                self.restrict(Restriction::NoSymFollow, name == "nosymfollow");
            }
            // What mount(8) takes it for, which follows with `exec` and the like where it is not meant so.
            ("user" | "users", _) => {
                let implied = [Restriction::NoDev, Restriction::NoSuid, Restriction::NoExec];
                implied.into_iter().for_each(|restriction| self.restrict(restriction, true));
            }
            ("owner" | "group", None) => {
                let implied = [Restriction::NoDev, Restriction::NoSuid];
                implied.into_iter().for_each(|restriction| self.restrict(restriction, true));
            }
            ("noatime", None) => self.notes_access = false,
            ("relatime" | "atime", None) => self.notes_access = true,
            ("nodiratime", None) => self.leaves_directories = true,
            ("diratime", None) => self.leaves_directories = false,
            ("discard", Some("async" | "sync")) => self.discard = true,
            ("nodiscard", None) => self.discard = false,
            _ if mount_words::is_harmless(name, value) => {}
            ("device", Some(path)) => self.volume.devices.push(path.into()),
            ("partition", Some(value)) => {
                let number = value.parse().ok().filter(|number| *number != 0);
                self.volume.partition = Some(number.ok_or("a partition's number is wanted")?);
            }
            ("offset", Some(value)) => self.volume.offset = Some(crate::size::parse(value)?),
            ("subvol", Some(path)) => self.subvol = Some(path.to_owned()),
            ("subvolid", Some(value)) => self.subvolid = Some(number(value)?),
            ("compress" | "compress-force", _) => {
                self.compress = Some(compress::parse(value.unwrap_or("zlib"))?);
                self.force_compression = name == "compress-force";
            }
            ("commit", Some(value)) => {
                // As with Linux, none is the default.
                self.commit_seconds = Some(number(value)?).filter(|seconds| *seconds != 0);
            }
            ("max_inline", Some(value)) => self.max_inline_bytes = Some(size(value)?),
            ("busy_poll", Some(value)) => {
                self.looking = Some(Duration::from_micros(number(value)?));
            }
            ("cache", Some(value)) => self.cache_bytes = Some(size(value)?),
            _ => return Err("no such option, or not in this form".to_owned()),
        }
        Ok(())
    }

    fn apply(&self, options: &mut OpenOptions) {
        if let Some(bytes) = self.cache_bytes {
            options.cache_bytes = bytes;
        }
        if let Some(bytes) = self.max_inline_bytes {
            options.max_inline_bytes = bytes;
        }
        options.discard = self.discard;
        options.compression = self.compress.and_then(|compress| compress.0);
        options.force_compression = self.force_compression;
        // The kernel reads ahead, and copies what came meanwhile to who reads.
        options.shares_reads = false;
        // The kernel keeps what was read and written; here only what is dirty stays.
        let default = CacheOptions::default();
        let bytes = options.cache_bytes as u64;
        let commit_ms =
            self.commit_seconds.map_or(u64::MAX, |seconds| seconds.saturating_mul(1000));
        options.page_cache = Some(CacheOptions {
            // A commit has of a file's bytes what was written back before.
            dirty_age_max_ms: default.dirty_age_max_ms.min(commit_ms),
            cached_bytes_max: bytes / 2,
            dirty_bytes_max: default.dirty_bytes_max.min(bytes / 4),
            dirty_bytes_background: default.dirty_bytes_background.min(bytes / 8),
            keeps_clean: false,
            ..default
        });
    }

    fn serving(&self, holds_source: bool) -> ServeOptions {
        let default = ServeOptions::default();
        ServeOptions {
            looking: self.looking.unwrap_or(default.looking),
            notes_access: self.notes_access && !self.read_only,
            leaves_directories: self.leaves_directories,
            fake_root: self.fake_root.then(me),
            writeback: self.writeback,
            syncs: self.syncs,
            naive: self.naive,
            // The last answer of a mount that holds its device is sent when all else has ended, the rings too.
            uses_rings: self.uses_rings && !holds_source,
        }
    }

    fn background(&self) -> BackgroundOptions {
        let mut options = BackgroundOptions::default();
        if let Some(seconds) = self.commit_seconds {
            options.commit_every = Duration::from_secs(seconds);
        }
        options
    }
}

/// The user and the group of this process.
fn me() -> (u32, u32) {
    (ubtrfs_fuse::user().as_raw(), ubtrfs_fuse::group().as_raw())
}

/// Mounts it.
pub fn run(args: &Args) -> Result<Exit> {
    let is_said = |word: &str| args.options.iter().any(|option| option == word);
    let serves = args.foreground || std::env::var_os(SERVES).is_some();
    // Who serves in another namespace goes there himself, with all that he needs of programs and libraries: those that are there are not
    // to be trusted.
    if !serves && !is_said("remount") && mount_helper::goes_elsewhere() {
        let image = args.image.with_words(&Wanted::parse(&args.options)?.volume)?;
        return start_server(args, &image);
    }
    let outside = Outside::here();
    mount_helper::enter_namespace()?;
    if is_said("remount") {
        return remount(args);
    }
    let wanted = Wanted::parse(&args.options)?;
    if is_said(NO_FAIL) && mount_helper::is_called_by_mount() && is_missing(args.image.path()) {
        return Ok(Exit::Done);
    }
    check_directory(&args.directory)?;
    if wanted.restrictions(&[]).contains(&Restriction::NoSymFollow)
        && !ubtrfs_fuse::user().is_root()
    {
        let why = "root alone can mount so: fusermount3, which mounts for others, cannot";
        return Err(Failure::new(Exit::Io, "-o", why).at("nosymfollow"));
    }
    let image = args.image.with_words(&wanted.volume)?;
    if serves { serve(args, &image, &wanted, &outside) } else { start_server(args, &image) }
}

fn is_missing(image: &Path) -> bool {
    std::fs::metadata(image).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Refuses to mount on anything but a directory: the kernel would take the filesystem's top for a file.
fn check_directory(directory: &Path) -> Result<()> {
    let failed = |error: &std::io::Error| Failure::io("mounting", error).at_path(directory);
    let about = std::fs::metadata(directory).map_err(|error| failed(&error))?;
    match about.is_dir() {
        true => Ok(()),
        false => {
            Err(Failure::new(Exit::Io, "mounting", "it is not a directory").at_path(directory))
        }
    }
}

/// Changes what is allowed in a mount. What else its line of fstab says mount(8) says again.
fn remount(args: &Args) -> Result<Exit> {
    const WHAT: &str = "mounting again";
    let failed =
        |why: &dyn std::fmt::Display| Failure::new(Exit::Io, WHAT, why).at_path(&args.directory);
    let options: Vec<String> =
        args.options.iter().filter(|word| !mount_words::is_of_remount(word)).cloned().collect();
    let wanted = Wanted::parse(&options)?;
    let mounted =
        mounts::on(&args.directory).ok_or_else(|| failed(&"ubtrfs has nothing mounted there"))?;
    let becomes_writable = wanted.says_writable && !wanted.read_only;
    if becomes_writable && mounted.is_read_only && mounted.shares_its_image() {
        let why = "it was mounted to be read only: unmount it, and mount it to be written";
        return Err(failed(&why));
    }
    // Who serves notes it, or does not, from the beginning.
    let says_access =
        options.iter().any(|word| matches!(word.as_str(), "noatime" | "relatime" | "atime"));
    if says_access && wanted.notes_access != mounted.notes_access {
        let word = if mounted.notes_access { "relatime" } else { "noatime" };
        let why = format!("it stays {word}, as it was mounted: unmount it, and mount it otherwise");
        return Err(failed(&why));
    }
    // What else is said is of the place in any case.
    let only_here = !wanted.says_writable || args.options.iter().any(|option| option == "bind");
    let allowed = Remount {
        read_only: if wanted.says_writable { wanted.read_only } else { mounted.is_read_only_here },
        restrictions: wanted.restrictions(&mounted.restrictions),
        only_here,
    };
    ubtrfs_fuse::remount(&mounted.directory, mounted.id, &allowed)
        .map_err(|error| failed(&error))?;
    let kept: Vec<&str> = options
        .iter()
        .filter(|word| !mount_words::is_changed_by_remount(word))
        .map(String::as_str)
        .collect();
    if !kept.is_empty() {
        let place = quote::path(&mounted.directory);
        let kept = kept.join(",");
        failure::say(&format!("ubtrfs: note: {place}: stays as it was mounted: {kept}"));
    }
    if wanted.read_only && !only_here {
        // The kernel has brought what it held back, and says nothing to who serves.
        let not_durable =
            |error| Failure::io("making all durable", &error).at_path(&args.directory);
        return Ok(match live::make_durable(&mounted).map_err(not_durable)? {
            Synced::Durable => Exit::Done,
            Synced::Lost(exit) | Synced::Stopped(exit) => exit,
        });
    }
    Ok(Exit::Done)
}

/// Starts the same command in the background, and waits until it serves.
fn start_server(args: &Args, image: &ImageArgs) -> Result<Exit> {
    const WHAT: &str = "starting the process that serves";
    let program = std::env::current_exe().map_err(|error| Failure::io(WHAT, &error))?;
    // Not what the caller has open: whoever waits for its end, or for a lock that goes with it, would do so as long as it is mounted.
    // Where the kernel is too old for that (before Linux 5.11) it stays open.
    let _ = ubtrfs_fuse::keep_from_programs_but(&image.named_descriptors());
    // The words as they came, and the name by which it is known what they mean.
    let mut child = Command::new(program)
        .arg0(mount_helper::name())
        .args(std::env::args_os().skip(1))
        .env(SERVES, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| Failure::io(WHAT, &error))?;
    let mut line = String::new();
    if let Some(said) = child.stdout.take() {
        // It ends without a word where it fails; it has said why on the standard error then.
        let _ = BufReader::new(said).read_line(&mut line);
    }
    if line.trim_end() == READY {
        return Ok(Exit::Done);
    }
    let status = child.wait().map_err(|error| Failure::io(WHAT, &error))?;
    let is_excused =
        mount_helper::is_called_by_mount() && args.options.iter().any(|option| option == NO_FAIL);
    match Ended::by(status, is_excused) {
        Ended::Failed(code) => std::process::exit(code),
        Ended::Excused => Ok(Exit::Done),
        Ended::Silent => {
            let why = format!("it ended: {status}");
            Err(Failure::new(Exit::Io, WHAT, why).at_path(&args.directory))
        }
    }
}

/// How a process that was to serve ended before it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ended {
    /// It has said why, and goes by this code.
    Failed(i32),
    /// The image was not there where it looked, which is no failure.
    Excused,
    /// It has said nothing.
    Silent,
}

impl Ended {
    fn by(status: ExitStatus, is_excused: bool) -> Self {
        match status.code() {
            Some(0) if is_excused => Self::Excused,
            // Killed by a signal, it found nothing.
            Some(0) | None => Self::Silent,
            Some(code) => Self::Failed(code),
        }
    }
}

fn serve(args: &Args, asked: &ImageArgs, wanted: &Wanted, outside: &Outside) -> Result<Exit> {
    let directory = std::fs::canonicalize(&args.directory)
        .map_err(|error| Failure::io("mounting", &error).at_path(&args.directory))?;
    let source = std::fs::canonicalize(args.image.path())
        .map_err(|error| Failure::io("opening", &error).at_path(args.image.path()))?;
    let mode = if wanted.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let image = asked.open_to_serve(mode, |options| wanted.apply(options)).map_err(|failure| {
        match mounts::of_image(&source) {
            Some(mounted) if !asked.is_part() => {
                let place = quote::path(&mounted.directory);
                failure.advice_also(&format!(
                    "An image is mounted once. For a subvolume or directory of it in another place, \
                     too: mount --bind {place}/NAME DIR"
                ))
            }
            _ => failure,
        }
    })?;
    let root = root_of(&image, wanted)?;
    let fs = image.filesystem().clone();
    let background = (!wanted.read_only).then(|| fs.run_in_background(wanted.background()));
    let background = background.transpose().map_err(|error| Failure::io("starting", &error))?;
    // The kernel holds one device; others would be held by nobody.
    let holds_source = image.filesystem().volume().device_count() == 1
        && is_block_device(&source)
        && ubtrfs_fuse::may_hold_block_devices();
    let options = MountOptions {
        source: source.clone().into_os_string(),
        read_only: wanted.read_only,
        // Who is root mounts for all, as with any other filesystem: permissions are checked.
        allow_other: wanted.allow_other || ubtrfs_fuse::user().is_root(),
        fake_root: wanted.fake_root,
        notes_access: wanted.notes_access,
        leaves_directories: wanted.leaves_directories,
        restrictions: wanted.restrictions(&[]),
        holds_source,
    };
    // From before the mount on, so that no signal leaves one that nobody serves.
    let signals = signals::that_end();
    if holds_source {
        image.filesystem().volume().yield_claims();
    }
    let device = ubtrfs_fuse::mount(&directory, &options)
        .map_err(|error| Failure::new(Exit::Io, "mounting", error).at_path(&directory))?;
    let mounted = mounts::on(&directory);
    let open = Arc::new(Mutex::new(Some(fs.clone())));
    let told_by_signal = Arc::new(Mutex::new(Ok(())));
    if let Ok(signals) = signals {
        watch_signals(signals, mounted.clone(), Arc::clone(&open), Arc::clone(&told_by_signal));
    }
    let device = FuseDevice::new(device).map_err(|error| {
        leave(mounted.as_ref());
        Failure::new(Exit::Io, "serving", error).at_path(&directory)
    })?;
    if wanted.uses_rings && holds_source {
        eprintln!("ubtrfs: note: requests come by /dev/fuse: the kernel holds the device");
    } else if wanted.uses_rings && !offers_rings() {
        eprintln!("ubtrfs: note: requests come by /dev/fuse: {RINGS_SWITCH} is not Y");
    }
    let server = Server::new(fs.clone(), root, wanted.serving(holds_source));
    if wanted.clones_device
        && let Err(error) = device.clone_for_threads(server.further_threads())
    {
        eprintln!("ubtrfs: note: threads share one descriptor of /dev/fuse: {error}");
    }
    let transport: Arc<dyn Transport> = Arc::new(device);
    let is_background = !args.foreground;
    let is_naive = wanted.naive;
    let owner = if wanted.fake_root { (0, 0) } else { me() };
    let live = Live {
        directory: directory.clone(),
        device: mounted.as_ref().map(|mounted| mounted.device.clone()).unwrap_or_default(),
        filesystem: fs.clone(),
        root,
        owner,
        kernel_holds_writes: wanted.writeback && !wanted.read_only,
        call: Call::default(),
    };
    let control = take_commands(live, &server);
    if let Err(error) = &control {
        // The mount is of use without.
        let note = "ubtrfs: note: commands cannot reach this mount";
        eprintln!("{note}: {error}");
    }
    server.before_end(move |served| {
        if let Ok((socket, taking)) = control {
            socket.close();
            // A command may wait for the kernel, which waits for an answer: it ends with the process then.
            if served.is_ok() {
                // What panicked in a command is told of where the engine is asked next.
                live::wait_for_command(&taking);
            }
        }
        if let Some(background) = background {
            // What stopped it is met by the commit, too, or can wait for the next mount.
            let _ = background.stop();
        }
    });
    let served = server.run(&transport, || {
        if !is_naive && let Some(mounted) = &mounted {
            outside.read_ahead.set(mounted);
        }
        if is_background {
            leave_terminal(outside);
        } else if let Err(error) = tell_service_manager() {
            // The mount is of use to others.
            eprintln!("ubtrfs: note: {NOTIFY_SOCKET}: {error}");
        }
    });
    if let Some(file) = std::env::var_os(REQUEST_COUNTS) {
        let counts = server.request_counts();
        let lines: String =
            counts.iter().map(|(operation, count)| format!("{operation} {count}\n")).collect();
        // Who counts finds none where it cannot be written.
        let _ = std::fs::write(file, lines);
    }
    let farewell = server.take_farewell();
    drop(server);
    // Who unmounts would wait for an answer as long as one could come.
    drop(transport);
    if served.is_err() && farewell.is_none() {
        leave(mounted.as_ref());
    }
    *open.lock() = None;
    drop((fs, image));
    if let Some(farewell) = farewell {
        farewell.send();
    }
    let told_by_signal = std::mem::replace(&mut *told_by_signal.lock(), Ok(()));
    served
        .and_then(|()| told_by_signal.map_err(ubtrfs_fuse::ServeError::from))
        .map(|()| Exit::Done)
        .map_err(|error| Failure::new(Exit::Io, "serving", error).at_path(&directory))
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Takes commands for the mount from now on.
fn take_commands(
    live: Live,
    server: &Arc<Server>,
) -> std::io::Result<(Arc<ControlSocket>, JoinHandle<()>)> {
    if live.device.is_empty() {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    server.set_device(&live.device);
    let socket = Arc::new(ControlSocket::bind(&live.device)?);
    let server = Arc::clone(server);
    let run = move |words, caller| live::answer(&live, &server, words, caller);
    let taking = ubtrfs_fuse::serve_control(&socket, run)?;
    Ok((socket, taking))
}

/// Says that the directory can be used, and leaves the terminal to others.
fn leave_terminal(outside: &Outside) {
    let _ = rustix::process::setsid();
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
    outside.say_no_more();
    let _ = std::env::set_current_dir("/");
}

/// Says that the directory can be used to who asked for it when it started this process.
fn tell_service_manager() -> std::io::Result<()> {
    let Some(name) = std::env::var_os(NOTIFY_SOCKET) else { return Ok(()) };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

/// A signal that ends the process unmounts the filesystem; what is in use can be used until it is closed. Who sent it may not wait so long:
/// what there is by then is made durable. What of that was lost goes to `told`: it is told once, and who serves tells it in the end.
fn watch_signals(
    mut signals: Signals,
    mounted: Option<Mounted>,
    open: Arc<Mutex<Option<Filesystem>>>,
    told: Arc<Mutex<ubtrfs_engine::Result<()>>>,
) {
    let _ = std::thread::Builder::new().spawn(move || {
        for _ in signals.forever() {
            leave(mounted.as_ref());
            // Also where others had taken it off before, and who uses it goes on.
            if let Some(fs) = &*open.lock() {
                let synced = match fs.sync() {
                    Err(ubtrfs_engine::Error::ReadOnly { .. }) => Ok(()),
                    synced => synced,
                };
                let mut told = told.lock();
                *told = std::mem::replace(&mut *told, Ok(())).and(synced);
            }
        }
    });
}

/// Unmounts what was mounted, wherever that is by now, unless something else lies on it; it ends when nobody uses it any more.
fn leave(mounted: Option<&Mounted>) {
    let Some(now) = mounted.and_then(mounts::as_it_is_now) else { return };
    if ubtrfs_fuse::unmount(&now.directory, now.id).is_err() {
        let _ = ubtrfs_fuse::unmount_when_unused(&now.directory, now.id);
    }
}

/// The directory that is mounted.
fn root_of(image: &Image, wanted: &Wanted) -> Result<InodeId> {
    let fs = image.filesystem();
    let failure = |error| Failure::engine("finding the subvolume", error).at_path(image.path());
    let by_number = match wanted.subvolid {
        // As with Linux, none is the top level.
        Some(0) => Some(InodeId::root_of(RootId::FS_TREE)),
        Some(id) => {
            fs.subvolume(RootId(id)).map_err(failure)?;
            Some(InodeId::root_of(RootId(id)))
        }
        None => None,
    };
    let Some(path) = &wanted.subvol else {
        return Ok(by_number.unwrap_or_else(|| image.start()));
    };
    let id = fs
        .resolve(fs.top_level(), path.as_bytes())
        .map_err(|error| image.failure("finding the subvolume", path.as_bytes(), error))?;
    if let Some(number) = by_number.filter(|number| *number != id) {
        let why = format!("it is not the subvolume that subvolid={} names", number.root.0);
        return Err(Failure::usage("-o subvol", why)
            .at_name(path.as_bytes())
            .at_path(image.path()));
    }
    if id.inode == InodeNo::SUBVOLUME_ROOT {
        return Ok(id);
    }
    let why = "no subvolume, but a file or directory in one";
    Err(Failure::usage("-o subvol", why).at_name(path.as_bytes()).at_path(image.path()))
}

#[cfg(test)]
mod tests;
