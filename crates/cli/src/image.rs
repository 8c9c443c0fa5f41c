//! IMAGE on the command line: which bytes, how they are opened, and questions about what is there.

use std::path::{Path, PathBuf};

use ubtrfs_engine::{Filesystem, Inode, InodeId, Notice, OpenOptions, Reservation};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::{InodeNo, PhysicalAddr, RootId, Uuid};
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use crate::epoch;
use crate::failure::{self, Exit, Failure, Result};
use crate::live::{self, Live};
use crate::mounts::{self, Holder};
use crate::output::quote;
use crate::walk::Child;

/// Symbolic links followed for one path, as Linux limits it.
const SYMLINKS_MAX: usize = 40;

/// Cache of a filesystem that is changed in one transaction, which holds at most three quarters of
/// that. The help of the command says it, too.
const CACHE_BYTES_OF_ONE_TRANSACTION: u64 = 2 << 30;

/// What these options stand under in help texts.
const HEADING: &str = "Image options";

/// Where in a file or device the filesystem lies.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct WindowArgs {
    /// Open partition N of the image, as its GPT or MBR numbers it
    #[arg(long, help_heading = HEADING, value_name = "N", conflicts_with = "offset", value_parser = clap::value_parser!(u32).range(1..))]
    partition: Option<u32>,
    /// The filesystem begins BYTES into the image, and ends with its partition
    #[arg(long, help_heading = HEADING, value_name = "BYTES", value_parser = crate::size::parse)]
    offset: Option<u64>,
}

/// How the devices of a filesystem are opened.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct VolumeArgs {
    #[command(flatten)]
    window: WindowArgs,
    /// Another device of the same filesystem; repeat for each
    #[arg(long, help_heading = HEADING, value_name = "FILE")]
    device: Vec<PathBuf>,
    /// Open although devices are missing, where copies allow
    #[arg(long, help_heading = HEADING)]
    degraded: bool,
    /// Open with copy N of the superblock: 0 the main one, 1 at 64M, 2 at 256G
    #[arg(long, help_heading = HEADING, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=2))]
    super_copy: Option<u8>,
}

/// What the options of a mount say of how an image is opened, beside the flags.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeWords {
    /// As `--device`.
    pub devices: Vec<PathBuf>,
    /// As `--partition`.
    pub partition: Option<u32>,
    /// As `--offset`.
    pub offset: Option<u64>,
    /// As `--degraded`.
    pub degraded: bool,
}

/// How a filesystem is opened.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct OpenArgs {
    #[command(flatten)]
    volume: VolumeArgs,
    /// Memory for tree blocks and file data [default: 256M]
    #[arg(long, help_heading = HEADING, value_name = "SIZE", value_parser = crate::size::parse)]
    cache: Option<u64>,
}

/// Where paths begin.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct StartArgs {
    /// Start paths at subvolume ID, not at the default one; 5 is the top level
    #[arg(long, help_heading = HEADING, value_name = "ID")]
    subvolid: Option<u64>,
}

/// IMAGE, and where paths in it begin.
#[derive(clap::Args, Clone, Debug)]
pub struct ImageArgs {
    /// The image or device
    #[arg(id = "image", value_name = "IMAGE")]
    path: PathBuf,
    #[command(flatten)]
    start: StartArgs,
    #[command(flatten)]
    open: OpenArgs,
}

impl ImageArgs {
    /// The image's own path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it for reading.
    pub fn read(&self) -> Result<Image> {
        self.open.image(&self.path, &self.start)
    }

    /// The same, opened as the options of a mount say, too.
    ///
    /// # Errors
    /// Both a partition and an offset are said.
    pub fn with_words(&self, words: &VolumeWords) -> Result<Self> {
        let mut image = self.clone();
        let volume = &mut image.open.volume;
        volume.degraded |= words.degraded;
        volume.device.extend_from_slice(&words.devices);
        let window = &mut volume.window;
        window.partition = words.partition.or(window.partition);
        window.offset = words.offset.or(window.offset);
        if window.partition.is_some() && window.offset.is_some() {
            let why = "a partition begins where it does: the offset is one too many";
            return Err(Failure::usage("-o", why).at("offset"));
        }
        Ok(image)
    }

    /// Whether it is a part of IMAGE.
    pub fn is_part(&self) -> bool {
        self.open.window().window() != Window::Whole
    }

    /// The descriptors of this process by which files are named: `/dev/fd/N`.
    pub fn named_descriptors(&self) -> Vec<u32> {
        let paths = self.open.volume.device.iter().chain([&self.path]);
        let number_in = |path: &PathBuf| {
            let places = ["/dev/fd", "/proc/self/fd"];
            let name = places.iter().find_map(|place| path.strip_prefix(place).ok())?;
            name.to_str()?.parse().ok()
        };
        paths.filter_map(number_in).collect()
    }

    /// Opens it with options of the engine as `change` has them.
    pub fn open_with(
        &self,
        mode: OpenMode,
        change: impl FnOnce(&mut OpenOptions),
    ) -> Result<Image> {
        self.open_in(epoch::runtime, mode, change)
    }

    /// The same, for who keeps it open while time goes by: with the real time, whatever `SOURCE_DATE_EPOCH` says.
    pub fn open_to_serve(
        &self,
        mode: OpenMode,
        change: impl FnOnce(&mut OpenOptions),
    ) -> Result<Image> {
        self.open_in(|_| Ok(Arc::new(Runtime::system())), mode, change)
    }

    fn open_in(
        &self,
        runtime: impl FnOnce(&str) -> Result<Arc<Runtime>>,
        mode: OpenMode,
        change: impl FnOnce(&mut OpenOptions),
    ) -> Result<Image> {
        let filesystem = self.open.filesystem_with(&self.path, mode, runtime, change)?;
        Image::new(filesystem, &self.path, &self.start)
    }
}

/// IMAGE, of a command that changes it.
#[derive(clap::Args, Clone, Debug)]
pub struct ChangedImageArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// Give freed space back to the image file or device
    #[arg(long, help_heading = HEADING)]
    discard: bool,
}

impl ChangedImageArgs {
    /// Opens it for reading.
    pub fn read(&self) -> Result<Image> {
        self.image.read()
    }

    /// Opens it for changes.
    pub fn write(&self) -> Result<Image> {
        self.write_with(&self.image)
    }

    /// As [`ChangedImageArgs::write`], for one transaction that is to hold all changes: where no
    /// other bound is given, it may grow large.
    pub fn write_at_once(&self) -> Result<Image> {
        let mut image = self.image.clone();
        image.open.cache.get_or_insert(CACHE_BYTES_OF_ONE_TRANSACTION);
        self.write_with(&image)
    }

    fn write_with(&self, image: &ImageArgs) -> Result<Image> {
        if let (true, Some(live)) = (self.discard, live::served()) {
            let why = "freed space is given back where it is mounted with -o discard";
            return Err(live::refused("--discard", &live.directory, why));
        }
        image.open_with(OpenMode::ReadWrite, |options| options.discard = self.discard)
    }

    /// Whether this is an image of a command line, without options.
    pub fn has_options(&self) -> bool {
        let ImageArgs { start, open, .. } = &self.image;
        self.discard || start.subvolid.is_some() || open.is_given()
    }
}

/// IMAGE, of a command that has no paths.
#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    /// The image or device
    #[arg(id = "image", value_name = "IMAGE")]
    path: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
}

impl DeviceArgs {
    /// Opens it for reading, with the top level as the start.
    pub fn read(&self) -> Result<Image> {
        self.open.image(&self.path, &StartArgs::top_level())
    }
}

impl StartArgs {
    /// The top level, whatever the default subvolume is.
    pub fn top_level() -> Self {
        Self { subvolid: Some(RootId::FS_TREE.0) }
    }
}

impl WindowArgs {
    /// The window of the volume's devices.
    pub fn window(&self) -> Window {
        match (self.partition, self.offset) {
            (Some(number), _) => Window::Partition(number),
            (None, Some(start_bytes)) => Window::Offset { start_bytes, len_bytes: None },
            (None, None) => Window::Whole,
        }
    }
}

impl VolumeArgs {
    fn is_given(&self) -> bool {
        self.window.partition.is_some()
            || self.window.offset.is_some()
            || !self.device.is_empty()
            || self.degraded
            || self.super_copy.is_some()
    }

    /// Opens the devices and matches them to one volume.
    pub fn open(&self, path: &Path, mode: OpenMode) -> Result<Volume> {
        refuse_at_mount()?;
        let mut devices: Vec<Arc<dyn Device>> = Vec::with_capacity(1 + self.device.len());
        devices.push(Arc::new(open_device(path, mode, self.window.window())?));
        for other in &self.device {
            devices.push(Arc::new(open_device(other, mode, Window::Whole)?));
        }
        let options = VolumeOptions {
            read_only: mode == OpenMode::ReadOnly,
            degraded: self.degraded,
            super_copy: self.super_copy.map(usize::from),
        };
        Volume::open(devices, &options)
            .map_err(|error| Failure::volume("opening", &error).at_path(path))
    }
}

impl OpenArgs {
    /// Where in IMAGE the filesystem lies.
    pub fn window(&self) -> &WindowArgs {
        &self.volume.window
    }

    fn is_given(&self) -> bool {
        self.volume.is_given() || self.cache.is_some()
    }

    /// Whether there are devices beside IMAGE.
    pub fn names_other_devices(&self) -> bool {
        !self.volume.device.is_empty()
    }

    /// How the engine opens the volume.
    pub fn engine_options(&self, read_only: bool, runtime: Arc<Runtime>) -> Result<OpenOptions> {
        let mut options = OpenOptions { read_only, runtime, ..OpenOptions::default() };
        if let Some(bytes) = self.cache {
            options.cache_bytes =
                usize::try_from(bytes).map_err(|_| Failure::usage("--cache", "too large"))?;
        }
        Ok(options)
    }

    /// Opens the filesystem for reading.
    fn image(&self, path: &Path, start: &StartArgs) -> Result<Image> {
        let filesystem = self.filesystem(path, OpenMode::ReadOnly)?;
        Image::new(filesystem, path, start)
    }

    /// Opens the filesystem and passes on what its user should know.
    pub fn filesystem(&self, path: &Path, mode: OpenMode) -> Result<Filesystem> {
        self.filesystem_with(path, mode, epoch::runtime, |_| ())
    }

    fn filesystem_with(
        &self,
        path: &Path,
        mode: OpenMode,
        runtime: impl FnOnce(&str) -> Result<Arc<Runtime>>,
        change: impl FnOnce(&mut OpenOptions),
    ) -> Result<Filesystem> {
        if let Some(live) = live::served() {
            return self.of_mount(&live, mode);
        }
        let volume = self.volume.open(path, mode)?;
        let superblock = volume.superblock();
        // No two runs on one filesystem draw the same identifiers.
        let seed = format!("{} {}", Uuid(superblock.fsid), superblock.generation);
        let runtime = runtime(&seed)?;
        let mut options = self.engine_options(mode == OpenMode::ReadOnly, runtime)?;
        change(&mut options);
        let filesystem = Filesystem::open(volume, options)
            .map_err(|error| Failure::engine("opening", error).at_path(path))?;
        for notice in filesystem.notices() {
            if mode != OpenMode::ReadOnly && notice.forbids_writing() {
                return Err(not_writable(notice).at_path(path));
            }
            failure::say(&format!("ubtrfs: note: {}: {notice}", quote::path(path)));
        }
        if mode != OpenMode::ReadOnly {
            check_writable(&filesystem).map_err(|failure| failure.at_path(path))?;
        }
        Ok(filesystem)
    }
}

impl OpenArgs {
    /// The filesystem that is served: it is open already, as who mounted it wanted.
    fn of_mount(&self, live: &Live, mode: OpenMode) -> Result<Filesystem> {
        if self.is_given() {
            let why = "how an image is opened was said when it was mounted";
            return Err(Failure::usage("options", why).at_path(&live.directory));
        }
        if mode != OpenMode::ReadOnly {
            check_writable(&live.filesystem).map_err(|failure| failure.at_path(&live.directory))?;
        }
        Ok(live.filesystem.clone())
    }
}

/// Why nothing can be written.
fn not_writable(notice: &Notice) -> Failure {
    Failure::new(Exit::Unsupported, "opening for writing", notice)
}

/// What keeps a filesystem that was opened for changes from taking any is a feature of it.
fn check_writable(filesystem: &Filesystem) -> Result<()> {
    match filesystem.begin(Reservation::items(0)) {
        Err(ubtrfs_engine::Error::ReadOnly { why }) => {
            Err(Failure::new(Exit::Unsupported, "opening for writing", why)
                .advice("Linux can change it; reading works here."))
        }
        // What else is wrong is told by the change itself.
        _ => Ok(()),
    }
}

/// Refuses what is shown of the bytes of an image, where a command is done for a mount: a path would be looked for from where this process
/// is, not who called.
fn refuse_at_mount() -> Result<()> {
    let Some(live) = live::served() else { return Ok(()) };
    let why = "it is shown of an image that is not mounted";
    Err(live::refused("opening", &live.directory, why))
}

/// Opens one file or device. One that was unmounted a moment ago is waited for.
pub fn open_device(path: &Path, mode: OpenMode, window: Window) -> Result<FileDevice> {
    if let Some(mounted) = mounts::on(path) {
        return Err(Failure::at_mount(mounted));
    }
    let mut leaving = mounts::Leaving::default();
    let (opened, holders) = loop {
        let opened = FileDevice::open(path, mode, window);
        if !matches!(opened, Err(ubtrfs_volume::Error::Busy { .. })) {
            break (opened, None);
        }
        match leaving.wait(path) {
            Holder::Leaves => {}
            Holder::Serves(mounted) => break (opened, Some(mounted)),
            Holder::Stays => break (opened, None),
        }
    };
    opened.map_err(|error| {
        let failure = Failure::volume("opening", &error).at_path(path);
        let around = path.is_dir().then(|| mounts::around(path)).flatten();
        if let Some(mounted) = around {
            let place = quote::path(&mounted.directory);
            return failure.advice(format!(
                "It lies in what is mounted on {place}: name that directory, and paths inside it."
            ));
        }
        match holders.or_else(|| mounts::of_image(path)) {
            Some(mounted)
                if matches!(
                    error,
                    ubtrfs_volume::Error::Busy { .. }
                        | ubtrfs_volume::Error::MountedByKernel { .. }
                ) =>
            {
                let place = quote::path(&mounted.directory);
                failure.advice(if window == Window::Whole {
                    format!(
                        "It is mounted on {place}: name that in its place, or unmount it first."
                    )
                } else {
                    // Which of them only who serves it knows.
                    format!(
                        "It, or another partition of it, is mounted on {place}, and the file is \
                         locked as a whole: unmount it first, or name {place} if that is the one."
                    )
                })
            }
            _ => failure,
        }
    })
}

/// An open filesystem, and the place in it where paths begin.
pub struct Image {
    filesystem: Filesystem,
    path: PathBuf,
    start: InodeId,
}

impl Image {
    /// Takes an open filesystem.
    pub fn new(filesystem: Filesystem, path: &Path, start: &StartArgs) -> Result<Self> {
        let start = match (start.subvolid, live::served()) {
            (Some(id), _) => subvolume_root(&filesystem, path, RootId(id))?,
            (None, Some(live)) => live.start()?,
            (None, None) => filesystem.default_subvolume().map_err(|error| {
                Failure::engine("finding the default subvolume", error).at_path(path)
            })?,
        };
        Ok(Self { filesystem, path: path.into(), start })
    }

    /// The engine's side.
    pub fn filesystem(&self) -> &Filesystem {
        &self.filesystem
    }

    /// Where paths begin.
    pub fn start(&self) -> InodeId {
        self.start
    }

    /// The image's own path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of a sector.
    pub fn sectorsize_bytes(&self) -> u64 {
        self.filesystem.sectorsize_bytes()
    }

    /// A failure of the engine at a path inside.
    pub fn failure(&self, what: &str, path: &[u8], error: ubtrfs_engine::Error) -> Failure {
        Failure::engine(what, error).of_change().at_name(path).at_path(&self.path)
    }

    /// What `path` names; a symbolic link at its end is not followed, those on the way are.
    pub fn resolve(&self, path: &[u8]) -> Result<InodeId> {
        check_named(path, &self.path)?;
        self.find(path, LastLink::Keep)
    }

    /// What `path` names when symbolic links at its end are followed, too.
    pub fn resolve_following(&self, path: &[u8]) -> Result<InodeId> {
        check_named(path, &self.path)?;
        self.find(path, LastLink::Follow)
    }

    /// What `path` names, symbolic links at its end followed; `None` where nothing is there.
    pub fn find_following(&self, path: &[u8]) -> Result<Option<InodeId>> {
        match self.resolve_following(path) {
            Ok(id) => Ok(Some(id)),
            Err(failure) if failure.is_not_found() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The directory in which the last name of `path` stands or would stand, and that name.
    pub fn place(&self, path: &[u8]) -> Result<Place> {
        check_named(path, &self.path)?;
        let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
        let trimmed = &path[..end];
        let start = trimmed.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let name = &trimmed[start..];
        if matches!(name, b"" | b"." | b"..") {
            return Err(Failure::new(
                Exit::Io,
                "finding",
                "a name is needed, not a directory as such",
            )
            .at_name(path)
            .at_path(&self.path));
        }
        let dir = self.find(&trimmed[..start], LastLink::Follow)?;
        Ok(Place { dir, name: name.to_vec() })
    }

    /// As [`Image::place`], for what is to be made there: `name/` is only a directory's.
    pub fn place_of(&self, path: &[u8], kind: FileType) -> Result<Place> {
        if path.ends_with(b"/") && kind != FileType::Directory {
            return Err(Failure::new(Exit::Io, "finding", "there is no such directory")
                .at_name(path)
                .at_path(&self.path));
        }
        self.place(path)
    }

    /// What `name` in a directory names, if anything.
    pub fn entry(&self, place: &Place, path: &[u8]) -> Result<Option<InodeId>> {
        match self.filesystem.lookup(place.dir, &place.name) {
            Ok(id) => Ok(Some(id)),
            Err(ubtrfs_engine::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failure("finding", path, error)),
        }
    }

    /// Goes along `path`. The start is its root: absolute links begin there, and `..` does not
    /// lead out of it.
    fn find(&self, path: &[u8], last_link: LastLink) -> Result<InodeId> {
        let failed = |error| self.failure("finding", path, error);
        let mut here = self.start;
        let mut rest: Vec<Vec<u8>> = components_reversed(path);
        let mut links = 0;
        while let Some(name) = rest.pop() {
            if name == b".." {
                if here != self.start {
                    here = self.filesystem.parent(here).map_err(failed)?;
                }
                continue;
            }
            let found = self.filesystem.lookup(here, &name).map_err(failed)?;
            let inode = self.filesystem.inode(found).map_err(|error| match error {
                // Not that nothing has the name, which is no damage.
                ubtrfs_engine::Error::NotFound { .. } => {
                    let why = "the name is there, and what it names is not";
                    Failure::new(Exit::Damage, "finding", why).at_name(path).at_path(&self.path)
                }
                error => failed(error),
            })?;
            let is_link = inode.file_type() == FileType::Symlink;
            if !is_link || (rest.is_empty() && last_link == LastLink::Keep) {
                here = found;
                continue;
            }
            links += 1;
            if links > SYMLINKS_MAX {
                return Err(Failure::new(Exit::Io, "finding", "too many levels of symbolic links")
                    .at_name(path)
                    .at_path(&self.path));
            }
            let target = self.filesystem.read_link(found).map_err(failed)?;
            if target.starts_with(b"/") {
                here = self.start;
            }
            rest.extend(components_reversed(&target));
        }
        if path.ends_with(b"/") && !self.inode(here, path)?.is_dir() {
            return Err(self.failure(
                "finding",
                path,
                ubtrfs_engine::Error::NotDirectory { what: quote::for_message(path) },
            ));
        }
        Ok(here)
    }

    /// The directory above `id`.
    pub fn parent(&self, id: InodeId, path: &[u8]) -> Result<InodeId> {
        if id == self.start {
            return Ok(id);
        }
        self.filesystem
            .parent(id)
            .map_err(|error| self.failure("finding", &[path, b"/.."].concat(), error))
    }

    /// What an inode says; `path` is for messages.
    pub fn inode(&self, id: InodeId, path: &[u8]) -> Result<Inode> {
        self.filesystem.inode(id).map_err(|error| self.failure("reading", path, error))
    }

    /// A symbolic link's target.
    pub fn read_link(&self, id: InodeId, path: &[u8]) -> Result<Vec<u8>> {
        self.filesystem
            .read_link(id)
            .map_err(|error| self.failure("reading the symbolic link", path, error))
    }

    /// Whether an access control list says more than the permissions do.
    pub fn has_acl(&self, id: InodeId, path: &[u8]) -> Result<bool> {
        for name in [&b"system.posix_acl_access"[..], b"system.posix_acl_default"] {
            let value = self
                .filesystem
                .xattr(id, name)
                .map_err(|error| self.failure("reading the access control list", path, error))?;
            if value.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The entries of a directory, as they come.
    pub fn entries(&self, id: InodeId, path: &[u8]) -> Result<Vec<Child>> {
        let failed = |error| self.failure("reading the directory", path, error);
        let mut children = Vec::new();
        for entry in self.filesystem.read_dir(id, 0).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            children.push(Child {
                is_directory: entry.file_type == FileType::Directory,
                is_symlink: entry.file_type == FileType::Symlink,
                name: entry.name,
                id: entry.target,
            });
        }
        Ok(children)
    }
}

/// An empty path names nothing, as to Linux: it is what a variable that was never set leaves, and is
/// not taken for the root.
///
/// # Errors
/// `path`, of a command on the image at `image`, is empty.
pub fn check_named(path: &[u8], image: &Path) -> Result<()> {
    if path.is_empty() {
        let nothing = ubtrfs_engine::Error::NotFound { what: String::new() };
        return Err(Failure::engine("finding", nothing).at_name(path).at_path(image));
    }
    Ok(())
}

/// A name, and the directory that holds it or is to.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory.
    pub dir: InodeId,
    /// The name in it.
    pub name: Vec<u8>,
}

/// What to do with a symbolic link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastLink {
    Keep,
    Follow,
}

/// The names in a path, last first; empty ones and `.` say nothing.
fn components_reversed(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.split(|byte| *byte == b'/');
    names.filter(|name| !matches!(*name, b"" | b".")).map(<[u8]>::to_vec).rev().collect()
}

fn subvolume_root(filesystem: &Filesystem, path: &Path, root: RootId) -> Result<InodeId> {
    let id = InodeId { root, inode: InodeNo::SUBVOLUME_ROOT };
    if !root.is_subvolume() {
        return Err(Failure::usage("--subvolid", format!("{root} is no subvolume's number")));
    }
    match filesystem.inode(id) {
        Ok(_) => Ok(id),
        Err(ubtrfs_engine::Error::NotFound { .. }) => {
            let why = format!("there is no subvolume {root}");
            Err(Failure::new(Exit::Io, "--subvolid", why)
                .at_path(path)
                .advice("`ubtrfs subvolume list` lists those there are."))
        }
        Err(error) => Err(Failure::engine("--subvolid", error).at_path(path)),
    }
}

/// The bytes of an image, without opening the filesystem in it.
pub struct Raw {
    device: FileDevice,
    path: PathBuf,
}

impl Raw {
    /// Opens the window of `path` for reading.
    pub fn open(path: &Path, window: &WindowArgs) -> Result<Self> {
        refuse_at_mount()?;
        let device = open_device(path, OpenMode::ReadOnly, window.window())?;
        Ok(Self { device, path: path.into() })
    }

    /// Bytes of the window.
    pub fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    /// Fills `buf` from `at` in the window.
    pub fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> Result<()> {
        self.device
            .read_at(at, buf)
            .map_err(|error| Failure::io("reading", &error).at_path(&self.path))
    }
}
