//! Commands at a filesystem that is mounted: the process that serves the mount does them, with the filesystem that it has
//! open, and the command that was called prints what they say.
//!
//! In the serving process a thread does one command after the other. While it does one, whatever opens an image gets the
//! filesystem that is served, and failures are heard here instead of on the standard error.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_engine::{Error, Filesystem, InodeId};
use ubtrfs_fuse::{Changed, ControlAnswer, Server};
use ubtrfs_rt::Arc;

use crate::call::{Call, STOPPED};
use crate::cli;
use crate::epoch;
use crate::failure::{self, Exit, Failure, Result};
use crate::mounts::{self, Mounted};
use crate::output::{Output, quote};

/// For so long a sync may wait behind other commands, and take, before another way is gone.
const SYNC_WAIT_MAX: Duration = Duration::from_secs(60);

/// A filesystem that is served.
#[derive(Clone)]
pub struct Live {
    /// Where it is mounted.
    pub directory: PathBuf,
    /// Its device number, as the system's table of mounts has it.
    pub device: String,
    /// The engine's side.
    pub filesystem: Filesystem,
    /// The directory that is mounted.
    pub root: InodeId,
    /// The user and group whose is what is made.
    pub owner: (u32, u32),
    /// What was written may be with the kernel only, which does not look at sizes then.
    pub kernel_holds_writes: bool,
    /// Who has the command done that is being done.
    pub call: Call,
}

impl Live {
    /// Where paths begin: the top of what is mounted, or what of it a directory shows that is bound to another place.
    ///
    /// # Errors
    /// That is not to be found any more.
    pub fn start(&self) -> Result<InodeId> {
        const WHAT: &str = "finding what the directory shows";
        let Some(shown) = &self.call.shown else { return Ok(self.root) };
        let name = shown.as_os_str().as_bytes();
        let found = match name.strip_suffix(mounts::GONE) {
            Some(_) => Err(Failure::new(Exit::Io, WHAT, "it has lost its name")),
            None => self
                .filesystem
                .resolve(self.root, name)
                .map_err(|error| Failure::engine(WHAT, error)),
        };
        found.map_err(|failure| {
            let directory = quote::path(&self.directory);
            let advice = format!("Name {directory}, where all of it is mounted, and paths there.");
            failure.at_name(name).advice(advice)
        })
    }
}

thread_local! {
    static SERVED: RefCell<Option<Rc<Live>>> = const { RefCell::new(None) };
}

/// The filesystem that this thread does a command at, if it is one of a mount.
pub fn served() -> Option<Rc<Live>> {
    SERVED.with_borrow(Clone::clone)
}

/// Does a command that came by the control socket.
pub fn answer(live: &Live, server: &Arc<Server>, words: Vec<OsString>) -> ControlAnswer {
    let mut words = words.into_iter();
    let call = Call::of_word(&words.next().unwrap_or_default());
    let (is_terminal, unmounts) = (call.is_terminal, call.unmounts);
    SERVED.set(Some(Rc::new(Live { call, ..live.clone() })));
    let buffer = Buffer::default();
    let (exit, errors) = failure::overhear(|| {
        let mut out = Output::to(buffer.clone(), is_terminal);
        let exit = run(live, server, words.collect(), &mut out);
        if unmounts && matches!(live.filesystem.check_writable(), Err(Error::Aborted { .. })) {
            let _ = out.text(STOPPED);
        }
        let flushed = out.flush();
        match exit.and_then(|exit| flushed.map(|()| exit)) {
            Ok(exit) => exit.max(out.exit()),
            Err(failure) => {
                failure.report();
                failure.exit.max(out.exit())
            }
        }
    });
    SERVED.set(None);
    let output = buffer.0.take();
    ControlAnswer { exit: exit.code(), output, errors: errors.into_bytes() }
}

fn run(live: &Live, server: &Server, words: Vec<OsString>, out: &mut Output) -> Result<Exit> {
    let command = cli::parse_for_mount(words)?;
    let changed = command.changes_of_mount();
    if live.kernel_holds_writes && changed == Some(Changed::Anything) {
        let why = "with -o writeback the kernel would not see what becomes of files";
        return Err(refused("changing files", &live.directory, why));
    }
    if changed.is_some() && !command.is_sync() && server.is_mounted_read_only() {
        let error = io::Error::from(io::ErrorKind::ReadOnlyFilesystem);
        return Err(Failure::io("changing it", &error)
            .at_path(&live.directory)
            .advice("It is mounted read-only: mount -o remount,rw lets it be changed."));
    }
    let not_durable = "making all durable";
    if live.kernel_holds_writes || command.needs_data() {
        bring_back(live, server)
            .map_err(|error| Failure::io(not_durable, &error).at_path(&live.directory))?;
    }
    if command.is_sync() {
        let synced = server.sync();
        return synced
            .map(|()| Exit::Done)
            .map_err(|error| Failure::engine(not_durable, error).at_path(&live.directory));
    }
    let Some(changed) = changed else {
        // What it shows is what lies on the medium.
        match live.filesystem.sync() {
            Err(Error::ReadOnly { .. }) | Ok(()) => {}
            Err(error) => {
                return Err(Failure::engine(not_durable, error).at_path(&live.directory));
            }
        }
        return command.run(out);
    };
    server.change(changed, || command.run(out))
}

/// Has the kernel write what it holds back of the mount. This thread answers none of its requests.
fn bring_back(live: &Live, server: &Server) -> io::Result<()> {
    let Some(directory) = mounts::open_by_device(&live.device) else {
        // Who serves is asked for permission as anybody is, and may not see where it is by now. So each file is waited for, without having
        // had all written at once.
        server.bring_back();
        return server.take_refused();
    };
    // All at once; then each file is waited for.
    rustix::fs::syncfs(&directory)?;
    server.bring_back();
    // What could not be written since then is told here.
    let synced = rustix::fs::syncfs(&directory);
    let _ = server.take_refused();
    Ok(synced?)
}

/// What became of what programs wrote.
pub enum Synced {
    /// It is durable.
    Durable,
    /// Something is lost, of which was told: what to exit with.
    Lost(Exit),
    /// The filesystem has stopped, of which was told: nothing more becomes durable.
    Stopped(Exit),
}

/// What programs wrote is durable then, or lost and told of.
///
/// # Errors
/// The system's.
pub fn make_durable(mounted: &Mounted) -> io::Result<Synced> {
    if let Ok(answer) = sync(mounted) {
        let _ = io::stderr().write_all(&answer.errors);
        if answer.exit == Exit::Done.code() {
            // What the kernel held back is durable then, too: who called may not be let in to ask for it himself.
            return Ok(Synced::Durable);
        }
        let exit = exit_of(&answer).unwrap_or(Exit::Io);
        let has_stopped = answer.output == STOPPED.as_bytes();
        return Ok(if has_stopped { Synced::Stopped(exit) } else { Synced::Lost(exit) });
    }
    // Where commands do not reach who serves, this does.
    match File::open(&mounted.directory).and_then(|top| top.sync_all()) {
        // Nobody serves it: there is nothing left to wait for.
        Err(error) if is_unserved(&error) => {
            failure::say("ubtrfs: note: nobody served it any more; what was not synced is lost");
            Ok(Synced::Durable)
        }
        // So says one that has stopped; who reads only says that nothing is missing.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::ROFS) => {
            let failure = Failure::io("making all durable", &error).at_path(&mounted.directory);
            failure.report();
            Ok(Synced::Stopped(failure.exit))
        }
        result => result.map(|()| Synced::Durable),
    }
}

fn is_unserved(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Has who serves a mount sync it.
///
/// # Errors
/// Nobody listens there, or is done with other commands in time. Whether it could is in the answer.
fn sync(mounted: &Mounted) -> io::Result<ControlAnswer> {
    let call = Call { unmounts: true, ..Call::default() };
    let mut words = vec![call.into_word()];
    words.extend(["ubtrfs", "filesystem", "sync"].map(OsString::from));
    words.push(mounted.directory.clone().into_os_string());
    ubtrfs_fuse::control_within(mounted.uid, &mounted.device, &words, SYNC_WAIT_MAX)
}

/// Has this process's command done by who serves the mount, and prints what that said.
///
/// # Errors
/// Nobody listens there.
pub fn forward(mounted: &Mounted) -> Result<Exit> {
    let failed = |what: &str, error: &io::Error| {
        Failure::io(what, error).at_path(&mounted.directory).advice(
            "Who mounted it, and root, can give it commands; or unmount it, and name the image.",
        )
    };
    let call = Call {
        is_terminal: io::stdout().is_terminal(),
        shown: mounted.is_part().then(|| mounted.root.clone()),
        time_zone: std::env::var_os("TZ"),
        epoch: epoch::source_date_epoch()?,
        ..Call::default()
    };
    let mut words = vec![call.into_word()];
    words.extend(std::env::args_os());
    let answer = ubtrfs_fuse::control(mounted.uid, &mounted.device, &words)
        .map_err(|error| failed("reaching the process that serves the mount", &error))?;
    let mut out = io::stdout().lock();
    let written = out.write_all(&answer.output).and_then(|()| out.flush());
    let _ = io::stderr().write_all(&answer.errors);
    written.map_err(|error| Failure::stdout(&error))?;
    exit_of(&answer).ok_or_else(|| {
        let error = io::Error::new(io::ErrorKind::InvalidData, "it is of another version");
        failed("understanding the process that serves the mount", &error)
    })
}

/// What an answer's exit code means, unless it is of another version.
pub fn exit_of(answer: &ControlAnswer) -> Option<Exit> {
    Exit::MEANINGS.iter().map(|(exit, _)| *exit).find(|exit| exit.code() == answer.exit)
}

/// Refuses what cannot be done at a mount.
pub fn refused(what: &str, directory: &Path, why: &str) -> Failure {
    Failure::new(Exit::Unsupported, what, why).at_path(directory)
}

/// What is written stays here.
#[derive(Clone, Default)]
struct Buffer(Rc<RefCell<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
