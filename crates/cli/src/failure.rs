//! What the command says when it cannot do what was asked, and the exit code that goes with it.
//!
//! This is the only place that turns an error of a library into an exit code.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use crate::mounts::Mounted;
use crate::output::quote;

/// The exit codes, worst last where several paths of one call fail differently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Done, and the answer is no.
    No = 1,
    /// The command line cannot be meant so.
    Usage = 2,
    /// Damage in the filesystem stopped the command.
    Damage = 3,
    /// Input or output failed, or what was named is not there or in use.
    Io = 4,
    /// No space.
    NoSpace = 5,
    /// Not supported.
    Unsupported = 6,
}

impl Exit {
    /// Each code with its meaning, for help texts and man pages.
    pub const MEANINGS: [(Self, &str); 7] = [
        (Self::Done, "done"),
        (Self::No, "done, and the answer is no (a check found damage, a comparison a difference)"),
        (Self::Usage, "the command line was not understood; nothing was done"),
        (Self::Damage, "damage in the filesystem, or an image cut short, stopped the command"),
        (
            Self::Io,
            "input or output failed: not found, not permitted, locked or mounted elsewhere, \
             refused because something is there already, or a device error",
        ),
        (
            Self::NoSpace,
            "no space left, in the image or where an export goes; the message says how much",
        ),
        (Self::Unsupported, "not supported: a feature, profile or kind of file"),
    ];

    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// One failure: `ubtrfs: what: where: why`, and what to do about it.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    what: String,
    place: String,
    why: String,
    advice: Option<String>,
    quiet: bool,
    is_not_found: bool,
    is_invalid: bool,
    mounted: Option<Box<Mounted>>,
}

thread_local! {
    /// What is heard on this thread instead of being printed.
    static HEARD: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `work`, and returns what it reported meanwhile instead of printing it.
pub fn overhear<T>(work: impl FnOnce() -> T) -> (T, String) {
    HEARD.set(Some(String::new()));
    let result = work();
    (result, HEARD.take().unwrap_or_default())
}

/// Prints a line on stderr, unless somebody listens here.
pub fn say(line: &str) {
    HEARD.with_borrow_mut(|heard| match heard {
        Some(heard) => {
            heard.push_str(line);
            heard.push('\n');
        }
        None => eprintln!("{line}"),
    });
}

/// The result of a command or a part of one.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure of the step `what`, for the reason `why`.
    pub fn new(exit: Exit, what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self {
            exit,
            what: what.into(),
            place: String::new(),
            why: why.to_string(),
            advice: None,
            quiet: false,
            is_not_found: false,
            is_invalid: false,
            mounted: None,
        }
    }

    /// IMAGE is a directory where a filesystem is mounted: its own process is to be asked.
    pub fn at_mount(mounted: Mounted) -> Self {
        let mut failure = Self::new(Exit::Unsupported, "opening", "it is mounted")
            .at_path(&mounted.directory)
            .advice("This takes an image that is not mounted.");
        failure.mounted = Some(Box::new(mounted));
        failure
    }

    /// The mount that is to be asked.
    pub fn mounted(&self) -> Option<&Mounted> {
        self.mounted.as_deref()
    }

    /// A command line that cannot be meant so.
    pub fn usage(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, what, why)
    }

    /// A failed call of the system.
    pub fn io(what: impl Into<String>, error: &io::Error) -> Self {
        Self::new(io_exit(error), what, reason(error))
    }

    /// A failed write of the command's own output. That nobody reads on (`| head`) is no fault to
    /// report.
    pub fn stdout(error: &io::Error) -> Self {
        let mut failure = Self::io("writing", error).at("standard output");
        failure.quiet = error.kind() == io::ErrorKind::BrokenPipe;
        if failure.quiet {
            failure.exit = Exit::Done;
        }
        failure
    }

    /// Names the image or file in which it happened.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        let place = place.to_string();
        let is_said = self.place.strip_prefix(&place);
        if is_said.is_some_and(|rest| rest.is_empty() || rest.starts_with(": ")) {
            return self;
        }
        if self.place.is_empty() {
            self.place = place;
        } else {
            self.place = format!("{place}: {}", self.place);
        }
        self
    }

    /// Names a file of the host.
    pub fn at_path(mut self, path: &Path) -> Self {
        // Libraries name a device by text, which loses what is no text.
        if self.place == quote::for_message(path.display().to_string().as_bytes()) {
            self.place.clear();
        }
        self.at(quote::path(path))
    }

    /// Names a path inside the image.
    pub fn at_name(self, name: &[u8]) -> Self {
        self.at(quote::for_message(name))
    }

    /// Says what the user can do.
    pub fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice.get_or_insert(advice.into());
        self
    }

    /// Says more that the user should know, below what was said already.
    pub fn advice_also(mut self, advice: &str) -> Self {
        self.advice = Some(match self.advice {
            Some(before) => format!("{before}\n  {advice}"),
            None => advice.to_owned(),
        });
        self
    }

    /// Names the line of a batch in which it happened.
    pub fn in_line(mut self, number: usize) -> Self {
        self.what = format!("line {number}: {}", self.what);
        self
    }

    /// Prints it on stderr, unless there is nobody to tell.
    pub fn report(&self) {
        if !self.quiet {
            say(&self.to_string());
        }
    }

    /// Whether what was named in the image is not there.
    pub fn is_not_found(&self) -> bool {
        self.is_not_found
    }

    /// Whether the engine took an argument of a change for wrong.
    pub fn is_invalid(&self) -> bool {
        self.is_invalid
    }

    /// Whether the rest of the command is pointless, too: the reader of the output is gone.
    pub fn is_final(&self) -> bool {
        self.quiet
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ubtrfs: {}", self.what)?;
        if !self.place.is_empty() {
            write!(f, ": {}", self.place)?;
        }
        write!(f, ": {}", self.why)?;
        if let Some(advice) = &self.advice {
            write!(f, "\n  {advice}")?;
        }
        Ok(())
    }
}

impl Failure {
    /// An error of the engine in the step `what`.
    pub fn engine(what: impl Into<String>, error: ubtrfs_engine::Error) -> Self {
        use ubtrfs_engine::Error;
        match error {
            Error::Volume(error) => Self::volume(what, &error),
            // The failure says where; the engine's own words name inodes.
            Error::NotFound { .. } => {
                let mut failure = Self::new(Exit::Io, what, "no such file or directory");
                failure.is_not_found = true;
                failure
            }
            Error::NotDirectory { .. } => Self::new(Exit::Io, what, "not a directory"),
            Error::IsDirectory { .. } => Self::new(Exit::Io, what, "it is a directory"),
            Error::Exists { .. } => Self::new(Exit::Io, what, "exists already"),
            Error::NotEmpty { .. } => Self::new(Exit::Io, what, "the directory is not empty"),
            Error::NotPermitted { flag, .. } => Self::new(Exit::Io, what, format!("it {flag}")),
            Error::OtherSubvolume { .. } => {
                Self::new(Exit::Io, what, "source and destination lie in different subvolumes")
            }
            error => {
                let advice = engine_advice(&error);
                let mut failure = Self::new(engine_exit(&error), what, error);
                failure.advice = advice.map(Into::into);
                failure
            }
        }
    }

    /// What the engine takes for a wrong argument is no misuse of the command line where a path of an
    /// open image was tried: others may have been changed by then.
    pub fn of_change(mut self) -> Self {
        if self.exit == Exit::Usage {
            self.exit = Exit::Io;
            self.is_invalid = true;
        }
        self
    }

    /// An error of the volume, which names the device itself.
    pub fn volume(what: impl Into<String>, error: &ubtrfs_volume::Error) -> Self {
        use ubtrfs_volume::{Error, Op};
        if let Error::Io { device, op, offset, source } = error {
            let mut why = reason(source);
            if *op != Op::Open {
                why = format!("{op} failed at byte {offset}: {why}");
            }
            let device = quote::for_message(device.as_bytes());
            return Self::new(volume_exit(error), what, why).at(device);
        }
        let text = error.to_string();
        let device = device_of(error).unwrap_or_default();
        match text.strip_prefix(device).and_then(|rest| rest.strip_prefix(": ")) {
            Some(why) if !device.is_empty() => {
                Self::new(volume_exit(error), what, why).at(quote::for_message(device.as_bytes()))
            }
            _ => Self::new(volume_exit(error), what, text),
        }
    }
}

impl Failure {
    /// An error while a tree was moved into or out of `image`. It names the path itself: one in the
    /// image, or one of the host.
    pub fn archive(
        what: impl Into<String>,
        image: &Path,
        error: ubtrfs_archive::error::Error,
    ) -> Self {
        use ubtrfs_archive::error::{ArchiveProblem, Error};
        let what = what.into();
        match error {
            Error::Io { op, path, source } => {
                Self::io(format!("{what}: {op}"), &source).at_archive_path(&path.0)
            }
            Error::Engine { op, path, source } => Self::engine(format!("{what}: {op}"), source)
                .of_change()
                .at_archive_path(&path.0)
                .at_path(image),
            Error::Archive { problem: ArchiveProblem::Unsupported { .. }, .. } => {
                Self::new(Exit::Unsupported, what, error)
            }
            Error::Refused { path, why } => Self::new(Exit::Io, what, why).at_archive_path(&path.0),
            Error::Damaged { path, why } => {
                Self::new(Exit::Damage, what, format!("{why}: the image is damaged"))
                    .at_archive_path(&path.0)
                    .at_path(image)
            }
            Error::NotEmpty { path } => {
                Self::new(Exit::Io, what, "the target directory is not empty")
                    .at_archive_path(&path.0)
            }
            other => Self::new(Exit::Io, what, other),
        }
    }

    /// Paths there are relative: the whole tree has none.
    fn at_archive_path(self, path: &[u8]) -> Self {
        if path.is_empty() { self } else { self.at_name(path) }
    }
}

impl From<ubtrfs_volume::Error> for Failure {
    fn from(error: ubtrfs_volume::Error) -> Self {
        Self::volume("opening", &error)
    }
}

fn engine_exit(error: &ubtrfs_engine::Error) -> Exit {
    use ubtrfs_engine::Error;
    match error {
        Error::InvalidArgument { .. } => Exit::Usage,
        Error::Corrupt(_) => Exit::Damage,
        Error::NoSpace { .. } => Exit::NoSpace,
        Error::Unsupported { .. } => Exit::Unsupported,
        Error::Volume(error) => volume_exit(error),
        Error::Aborted { first_cause, .. } => engine_exit(first_cause),
        _ => Exit::Io,
    }
}

fn engine_advice(error: &ubtrfs_engine::Error) -> Option<&'static str> {
    use ubtrfs_engine::Error;
    match error {
        Error::NoSpace { .. } => Some("Make the image larger (--size), or leave something out."),
        _ => None,
    }
}

fn volume_exit(error: &ubtrfs_volume::Error) -> Exit {
    use ubtrfs_volume::Error;
    match error {
        Error::Io { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof => Exit::Damage,
        Error::Io { source, .. } => io_exit(source),
        Error::Corrupt(_)
        | Error::NoWholeCopy { .. }
        | Error::BadSuperblock { .. }
        | Error::TooShort { .. }
        | Error::NoChunk { .. } => Exit::Damage,
        Error::Unsupported { .. } => Exit::Unsupported,
        _ => Exit::Io,
    }
}

/// The device that an error's text begins with.
fn device_of(error: &ubtrfs_volume::Error) -> Option<&str> {
    use ubtrfs_volume::Error;
    match error {
        Error::NotBtrfs { device, .. }
        | Error::BadSuperblock { device, .. }
        | Error::StaleDevice { device, .. }
        | Error::OtherHistory { device, .. }
        | Error::OtherFilesystem { device, .. }
        | Error::TooShort { device, .. }
        | Error::SuperblockChanged { device, .. }
        | Error::Busy { device, .. }
        | Error::MountedByKernel { device, .. }
        | Error::ReadOnly { device }
        | Error::Partition { device, .. } => Some(device),
        _ => None,
    }
}

fn io_exit(error: &io::Error) -> Exit {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::NoSpace,
        io::ErrorKind::Unsupported => Exit::Unsupported,
        _ => Exit::Io,
    }
}

/// The system's words, without Rust's "(os error 2)".
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_display_names_what_where_why_and_advice() {
        let failure = Failure::io("opening", &io::Error::from_raw_os_error(2))
            .at_path(Path::new("disk.img"))
            .advice("Check the name.");
        assert_eq!(
            failure.to_string(),
            "ubtrfs: opening: disk.img: No such file or directory\n  Check the name."
        );
        assert_eq!(failure.exit, Exit::Io);
    }

    #[test]
    fn failure_places_nest_outermost_first() {
        let failure = Failure::usage("reading", "why").at_name(b"/a\n").at("disk.img");
        assert_eq!(failure.to_string(), "ubtrfs: reading: disk.img: '/a'$'\\n': why");
    }

    #[test]
    fn exit_codes_are_those_documented() {
        let codes: Vec<u8> = Exit::MEANINGS.iter().map(|(exit, _)| exit.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6]);
    }
}
