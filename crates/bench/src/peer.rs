//! Who competes for a mounted directory: ours, the kernel's btrfs, and what other FUSE servers offer.
//!
//! Servers other than ours run in the foreground, as children of this process: they may still write after the kernel has
//! unmounted their directory, and what they write to may be opened anew, or removed, only when they have ended.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use ubtrfs_testkit::{Oracle, command, oracle};

use crate::child;
use crate::error::{Error, Result};
use crate::mount::{Kernel, Mount, Room};
use crate::scratch::Scratch;
use crate::workload::Options;

/// Length of each image, most of it a hole.
const IMAGE_BYTES: u64 = 8 << 30;
/// The image, or the directory that bindfs shows.
const IMAGE: &str = "image";
const BOUND: &str = "bound";
/// Whether requests may come by io_uring.
const RINGS_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// Names the file in which our server, when its mount ends, writes how often each operation was asked for: a line each, the operation's
/// number in `linux/fuse.h` and the count.
const REQUEST_COUNTS: &str = "UBTRFS_REQUEST_COUNTS";
const PAUSE: Duration = Duration::from_millis(20);
/// Half a minute to be there, and to be let go.
const TRIES_MAX: usize = 1500;
/// Three minutes to write what is left.
const END_TRIES_MAX: usize = 9000;

/// A filesystem and who serves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Peer {
    Ubtrfs,
    /// Ours by io_uring, where root has switched that on.
    UbtrfsRings,
    /// Ours with a descriptor for each thread.
    UbtrfsClones,
    /// Ours where a user asks for `-o writeback`: what is written stays with the kernel first.
    UbtrfsWriteback,
    /// Ours without what spares it requests. It takes no part in the timing.
    UbtrfsNaive,
    KernelBtrfs,
    /// Another directory, shown through FUSE.
    Bindfs,
    /// The same where the kernel remembers nothing of attributes, so that it has to be asked. For what is answered without it else.
    BindfsAsked,
    Fuse2fs,
    Ntfs3g,
    /// The server that does nothing.
    Floor,
}

impl Peer {
    pub(crate) const ALL: [Self; 10] = [
        Self::Ubtrfs,
        Self::UbtrfsRings,
        Self::UbtrfsClones,
        Self::UbtrfsWriteback,
        Self::KernelBtrfs,
        Self::Bindfs,
        Self::BindfsAsked,
        Self::Fuse2fs,
        Self::Ntfs3g,
        Self::Floor,
    ];

    /// As a table names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ubtrfs => "ubtrfs",
            Self::UbtrfsRings => "ubtrfs, io_uring",
            Self::UbtrfsClones => "ubtrfs, clone_fd",
            Self::UbtrfsWriteback => "ubtrfs, writeback",
            Self::UbtrfsNaive => "ubtrfs, naive",
            Self::KernelBtrfs => Kernel::Btrfs.name(),
            Self::Bindfs => "bindfs",
            Self::BindfsAsked => "bindfs, attr_timeout=0",
            Self::Fuse2fs => "fuse2fs",
            Self::Ntfs3g => "ntfs-3g",
            Self::Floor => "floor",
        }
    }

    /// Whether what was written is there after it was mounted anew.
    pub(crate) fn keeps_data(self) -> bool {
        self != Self::Floor
    }

    /// Why it cannot compete, if it cannot.
    pub(crate) fn available(self) -> std::result::Result<(), String> {
        if self == Self::KernelBtrfs {
            return Kernel::Btrfs.available();
        }
        oracle::available(Oracle::Fuse)?;
        let switch = || std::fs::read_to_string(RINGS_SWITCH).unwrap_or_default();
        if self == Self::UbtrfsRings && switch().trim() != "Y" {
            return Err(format!("{RINGS_SWITCH} is not Y"));
        }
        let (programs, package): (&[&str], _) = match self {
            Self::Bindfs | Self::BindfsAsked => (&["bindfs"], "bindfs"),
            Self::Fuse2fs => (&["fuse2fs", "mkfs.ext4"], "fuse2fs"),
            Self::Ntfs3g => (&["ntfs-3g", "mkntfs"], "ntfs-3g"),
            _ => (&[], ""),
        };
        match programs.iter().find(|program| !is_installed(program)) {
            Some(program) => Err(format!("{program} is missing (Debian's {package})")),
            None => Ok(()),
        }
    }

    /// Makes an empty filesystem.
    ///
    /// # Errors
    /// What its mkfs said.
    pub(crate) fn make(self, options: &Options, scratch: &Scratch) -> Result<()> {
        self.clear(scratch)?;
        match self {
            Self::Ubtrfs
            | Self::UbtrfsRings
            | Self::UbtrfsClones
            | Self::UbtrfsWriteback
            | Self::UbtrfsNaive => {
                let mut mkfs = Command::new(&options.ubtrfs);
                mkfs.args(["mkfs", "--quiet", "--size", &IMAGE_BYTES.to_string()]);
                child::run(mkfs.arg(scratch.path(IMAGE))).map(drop)
            }
            Self::KernelBtrfs => Kernel::Btrfs.make(&scratch.path(IMAGE), Room::Plain),
            Self::Bindfs | Self::BindfsAsked => {
                std::fs::create_dir(scratch.path(BOUND)).map_err(Error::io("make a directory"))
            }
            Self::Fuse2fs => {
                let image = scratch.blank(IMAGE, IMAGE_BYTES)?;
                child::run(command("mkfs.ext4").args(["-q", "-F"]).arg(image)).map(drop)
            }
            Self::Ntfs3g => {
                let image = scratch.blank(IMAGE, IMAGE_BYTES)?;
                // Forced, as it is a file; quick, or all of the image is written.
                child::run(command("mkntfs").args(["-F", "-Q", "-q"]).arg(image)).map(drop)
            }
            Self::Floor => Ok(()),
        }
    }

    /// Mounts what was made, with the options that a user gets who gives none.
    ///
    /// # Errors
    /// If it is not there after a while.
    pub(crate) fn mount(self, options: &Options, scratch: &Scratch) -> Result<Mounted> {
        let image = scratch.path(IMAGE);
        if self == Self::KernelBtrfs {
            return Ok(Mounted::Kernel(Mount::new(Kernel::Btrfs, &image, "")?));
        }
        if let Some(our_options) = self.our_options() {
            return mount_ours(our_options, options, &image, None);
        }
        let directory = mount_point()?;
        let mut server = match self {
            Self::Floor => {
                let mut floor = Command::new(&options.floor[0]);
                floor.args(&options.floor[1..]);
                floor
            }
            Self::Bindfs | Self::BindfsAsked => {
                let mut bindfs = command("bindfs");
                bindfs.arg("-f");
                if self == Self::BindfsAsked {
                    bindfs.args(["-o", "attr_timeout=0"]);
                }
                bindfs.arg(scratch.path(BOUND));
                bindfs
            }
            Self::Fuse2fs => {
                let mut fuse2fs = command("fuse2fs");
                fuse2fs.arg("-f").arg(&image);
                fuse2fs
            }
            _ => {
                let mut ntfs = command("ntfs-3g");
                ntfs.args(["-o", "no_detach"]).arg(&image);
                ntfs
            }
        };
        Ok(Mounted::Peer(Served::start(server.arg(directory.path()), directory)?))
    }

    /// As [`Peer::mount`], of ours only: `counts` tells, after the mount's end, how often each operation was asked for.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn mount_counted(
        self,
        options: &Options,
        scratch: &Scratch,
        counts: &Path,
    ) -> Result<Mounted> {
        let Some(our_options) = self.our_options() else {
            return Err(Error::Input { what: format!("{} counts no requests", self.name()) });
        };
        mount_ours(our_options, options, &scratch.path(IMAGE), Some(counts))
    }

    /// Whether it is ours, however mounted.
    pub(crate) fn is_ours(self) -> bool {
        self.our_options().is_some()
    }

    /// What follows `-o`, if it is ours.
    fn our_options(self) -> Option<&'static str> {
        match self {
            Self::Ubtrfs => Some("defaults"),
            Self::UbtrfsRings => Some("io_uring"),
            Self::UbtrfsClones => Some("clone_fd"),
            Self::UbtrfsWriteback => Some("writeback"),
            Self::UbtrfsNaive => Some("naive"),
            _ => None,
        }
    }

    /// Removes what was made.
    ///
    /// # Errors
    /// If that is not possible.
    pub(crate) fn clear(self, scratch: &Scratch) -> Result<()> {
        scratch.absent(IMAGE)?;
        match std::fs::remove_dir_all(scratch.path(BOUND)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove a directory")(error))
            }
            _ => Ok(()),
        }
    }
}

fn mount_point() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("ubtrfs-bench-mount-")
        .tempdir()
        .map_err(Error::io("make a directory to mount at"))
}

fn mount_ours(
    our_options: &str,
    options: &Options,
    image: &Path,
    counts: Option<&Path>,
) -> Result<Mounted> {
    let directory = mount_point()?;
    let mut mount = Command::new(&options.ubtrfs);
    if let Some(counts) = counts {
        mount.env(REQUEST_COUNTS, counts);
    }
    child::run(mount.args(["mount", "-o", our_options]).arg(image).arg(directory.path()))?;
    let served = Served { directory: Some(directory), server: None };
    Ok(Mounted::Ours { ubtrfs: options.ubtrfs.clone(), served })
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let places = format!("{path}:/usr/sbin:/sbin");
    places.split(':').any(|place| Path::new(place).join(program).is_file())
}

/// A mounted filesystem; unmounted when dropped.
pub(crate) enum Mounted {
    Kernel(Mount),
    Ours { ubtrfs: PathBuf, served: Served },
    Peer(Served),
}

impl Mounted {
    pub(crate) fn path(&self) -> PathBuf {
        match self {
            Self::Kernel(mount) => mount.path(),
            Self::Ours { served, .. } | Self::Peer(served) => served.path(),
        }
    }

    /// Unmounts it, and waits until everything is on the image.
    ///
    /// # Errors
    /// If it cannot be unmounted, or its server does not end.
    pub(crate) fn end(self) -> Result<()> {
        match self {
            Self::Kernel(mount) => mount.end(),
            Self::Ours { ubtrfs, mut served } => {
                child::run(Command::new(ubtrfs).arg("umount").arg(served.path()))?;
                served.close()
            }
            Self::Peer(mut served) => served.unmount(),
        }
    }
}

/// A directory and the process that serves it, where that is a child of this one.
pub(crate) struct Served {
    directory: Option<TempDir>,
    server: Option<Server>,
}

struct Server {
    process: Child,
    shown: String,
    said: File,
}

impl Served {
    fn start(server: &mut Command, directory: TempDir) -> Result<Self> {
        let said = tempfile::tempfile().map_err(Error::io("make a temporary file"))?;
        let output = || said.try_clone().map_err(Error::io("make a temporary file"));
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output()?);
        let shown = format!("{server:?}");
        let before = device(directory.path());
        let process = server.spawn().map_err(Error::io(format!("start {shown}")))?;
        let server = Some(Server { process, shown, said });
        let mut served = Self { directory: Some(directory), server };
        for _ in 0..TRIES_MAX {
            // The question waits for the server's first answer, once it has mounted.
            let now = device(&served.path());
            if now.is_some() && now != before {
                return Ok(served);
            }
            if served.has_ended()? {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Err(served.failure("did not mount"))
    }

    fn path(&self) -> PathBuf {
        self.directory.as_ref().map_or_else(PathBuf::new, |directory| directory.path().to_owned())
    }

    fn has_ended(&mut self) -> Result<bool> {
        let Some(server) = &mut self.server else { return Ok(true) };
        let status = server.process.try_wait();
        Ok(status.map_err(Error::io(format!("wait for {}", server.shown)))?.is_some())
    }

    fn failure(&mut self, status: &str) -> Error {
        let mut text = String::new();
        let Some(server) = &mut self.server else {
            return Error::Input { what: format!("{}: {status}", self.path().display()) };
        };
        let _ = server.said.rewind().and_then(|()| server.said.read_to_string(&mut text));
        Error::Command { command: server.shown.clone(), status: status.to_owned(), said: text }
    }

    fn unmount(&mut self) -> Result<()> {
        if self.directory.is_none() {
            return Ok(());
        }
        let mut last = Ok(());
        for _ in 0..TRIES_MAX {
            // Who is not root has mounted it by fusermount3.
            last = child::run(command("umount").arg(self.path()))
                .or_else(|_| child::run(command("fusermount3").arg("-u").arg(self.path())))
                .map(drop);
            if last.is_ok() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        if last.is_err() {
            // What could not be unmounted must not be deleted by name.
            let _ = self.directory.take().map(TempDir::keep);
            return last;
        }
        self.wait()?;
        self.close()
    }

    fn wait(&mut self) -> Result<()> {
        for _ in 0..END_TRIES_MAX {
            if self.has_ended()? {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
        let failure = self.failure("did not end after its directory was unmounted");
        if let Some(server) = &mut self.server {
            let _ = server.process.kill().and_then(|()| server.process.wait());
        }
        Err(failure)
    }

    /// The directory is an empty one again.
    fn close(&mut self) -> Result<()> {
        self.server = None;
        let Some(directory) = self.directory.take() else { return Ok(()) };
        let path = directory.path().to_owned();
        directory.close().map_err(Error::io(format!("remove {}", path.display())))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let Some(directory) = &self.directory else { return };
        let above = directory.path().parent().and_then(device);
        if device(directory.path()) != above {
            // After an error of the work itself, that one is told.
            let _ = self.unmount();
        }
        if let Some(server) = &mut self.server {
            let _ = server.process.kill().and_then(|()| server.process.wait());
        }
    }
}

fn device(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.dev())
}
