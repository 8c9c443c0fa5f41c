//! Commands at a filesystem that is mounted: the process that serves the mount does them, with the filesystem that it has
//! open, and the command that was called prints what they say.
//!
//! In the serving process a thread does one command after the other. While it does one, whatever opens an image gets the
//! filesystem that is served, and failures are heard here instead of on the standard error. What it writes goes to who called as it comes:
//! a long answer is not held here, and a command whose caller has gone ends. Who called takes it at once, however slowly it is read of him:
//! the thread has other commands to do.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use ubtrfs_engine::{Error, Filesystem, InodeId};
use ubtrfs_fuse::{Caller, Changed, ControlAnswer, Said, Server};
use ubtrfs_rt::Arc;

use crate::call::{Call, STOPPED};
use crate::cli;
use crate::epoch;
use crate::failure::{self, Exit, Failure, Result};
use crate::mounts::{self, Mounted};
use crate::output::{Output, quote};

/// For so long a sync may wait behind other commands, and take, before another way is gone.
const SYNC_WAIT_MAX: Duration = Duration::from_secs(60);
/// For so long it may take that other way.
const SYNC_BESIDE_WAIT_MAX: Duration = Duration::from_secs(120);
/// Says another number of seconds in the place of both. For the tests.
const SYNC_WAIT: &str = "UBTRFS_SYNC_WAIT_SECONDS";
/// For so long a command that is being done may go on when nobody uses the mount any more.
const COMMAND_WAIT_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Pieces of an answer, of 64 KiB, that wait until they are read of who called.
const WAITING_PIECES_MAX: usize = 16 << 10;

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
pub fn answer(live: &Live, server: &Arc<Server>, words: Vec<OsString>, caller: Caller) {
    let mut words = words.into_iter();
    let call = Call::of_word(&words.next().unwrap_or_default());
    let (is_terminal, unmounts) = (call.is_terminal, call.unmounts);
    let live = Rc::new(Live { call, ..live.clone() });
    SERVED.set(Some(Rc::clone(&live)));
    let caller = Rc::new(RefCell::new(caller));
    let (exit, errors) = failure::overhear(|| {
        let mut out = Output::to(Told(Rc::clone(&caller)), is_terminal);
        let exit = run(&live, server, words.collect(), &mut out);
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
    let Some(mut caller) = Rc::into_inner(caller).map(RefCell::into_inner) else { return };
    // Who has gone away hears nothing.
    let _ = caller.say(Said::Errors(errors.as_bytes())).and_then(|()| caller.end(exit.code()));
}

fn run(live: &Live, server: &Server, words: Vec<OsString>, out: &mut Output) -> Result<Exit> {
    if live.call.device != live.device {
        // A socket can have another name.
        let why = "it is for another mount, or of who has another version";
        return Err(Failure::new(Exit::Io, "a command", why).at_path(&live.directory));
    }
    let command = cli::parse_for_mount(words)?;
    let changed = command.changes_of_mount();
    if live.kernel_holds_writes && changed == Some(Changed::Anything) {
        let why = "with -o writeback the kernel would not see what becomes of files";
        return Err(refused("changing files", &live.directory, why));
    }
    if changed.is_some() && !command.is_sync() {
        check_writable(live, server)?;
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

/// Refuses changes where nothing can be changed: everywhere, or at the place that was named.
fn check_writable(live: &Live, server: &Server) -> Result<()> {
    let (place, advice) = match &live.call.read_only {
        _ if server.is_mounted_read_only() => {
            (&live.directory, "It is mounted read-only: mount -o remount,rw lets it be changed.")
        }
        Some(place) => (
            place,
            "It is read-only in this place: mount -o remount,bind,rw lets it be changed here.",
        ),
        None => return Ok(()),
    };
    // As the kernel has it.
    let error = io::Error::from_raw_os_error(Errno::ROFS.raw_os_error());
    Err(Failure::io("changing it", &error).at_path(place).advice(advice))
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
        let exit = exit_of(answer.exit).unwrap_or(Exit::Io);
        let has_stopped = answer.output == STOPPED.as_bytes();
        return Ok(if has_stopped { Synced::Stopped(exit) } else { Synced::Lost(exit) });
    }
    // Where commands do not reach who serves, this does. It has no limit of its own.
    let directory = mounted.directory.clone();
    let sync = move || File::open(directory).and_then(|top| top.sync_all());
    match within(sync_wait_max(SYNC_BESIDE_WAIT_MAX), sync) {
        None => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "who serves it does not answer: umount -f takes it off, and what is not durable is lost",
        )),
        Some(synced) => told_of_sync(mounted, synced),
    }
}

/// What it means that a sync beside the control socket was answered so.
fn told_of_sync(mounted: &Mounted, synced: io::Result<()>) -> io::Result<Synced> {
    // He has nothing that is not durable.
    let only_reads = || mounted.is_read_only_everywhere && mounted.shares_its_image();
    match synced {
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
        Ok(()) if mounted.is_part() && !only_reads() => Err(io::Error::other(
            "only a part of it is to be seen there, and who serves it cannot be reached: sync it where all of it is mounted, or take it off \
             by umount -l",
        )),
        result => result.map(|()| Synced::Durable),
    }
}

/// Does `work` on a thread of its own, unless that takes longer.
pub fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, wait) = mpsc::channel();
    // Where there is no thread, nobody says anything.
    let _ = thread::Builder::new().spawn(move || done.send(work()));
    wait.recv_timeout(patience).ok()
}

fn sync_wait_max(usual: Duration) -> Duration {
    let said = std::env::var(SYNC_WAIT).ok().and_then(|said| said.parse().ok());
    said.map_or(usual, Duration::from_secs)
}

/// Waits for the command that is being done, though not for ever: what it waits for may not come, and what is written is to become durable.
pub fn wait_for_command(taking: &JoinHandle<()>) {
    wait_until_over(taking, COMMAND_WAIT_MAX);
}

fn wait_until_over(thread: &JoinHandle<()>, patience: Duration) {
    let begun = Instant::now();
    while !thread.is_finished() && begun.elapsed() < patience {
        thread::sleep(LOOK_EVERY);
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
    let call = Call { device: mounted.device.clone(), unmounts: true, ..Call::default() };
    let mut words = vec![call.into_word()];
    words.extend(["ubtrfs", "filesystem", "sync"].map(OsString::from));
    words.push(mounted.directory.clone().into_os_string());
    let patience = sync_wait_max(SYNC_WAIT_MAX);
    let (uid, device) = (mounted.uid, mounted.device.clone());
    // The way to him may lead through what nobody serves.
    let asked = move || ubtrfs_fuse::control_within(uid, &device, &words, patience);
    within(patience, asked).unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
}

/// Has this process's command done by who serves the mount, and prints what that says.
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
        device: mounted.device.clone(),
        shown: mounted.is_part().then(|| mounted.root.clone()),
        read_only: mounted.is_read_only.then(|| mounted.directory.clone()),
        time_zone: std::env::var_os("TZ"),
        epoch: epoch::source_date_epoch()?,
        ..Call::default()
    };
    let mut words = vec![call.into_word()];
    words.extend(std::env::args_os());
    let (pieces, waiting) = mpsc::sync_channel(WAITING_PIECES_MAX);
    let (uid, device) = (mounted.uid, mounted.device.clone());
    let hear = move || ubtrfs_fuse::control(uid, &device, &words, |said| send(&pieces, said));
    let hearing =
        thread::Builder::new().spawn(hear).map_err(|error| Failure::io("starting", &error))?;
    // Where nobody reads on, this process ends, and he who serves sees that nobody hears him.
    print(&waiting).map_err(|error| Failure::stdout(&error))?;
    let lost = |_| Err(io::Error::other("the thread that hears it has ended"));
    let answered = hearing.join().unwrap_or_else(lost);
    let exit = answered.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let why = "it has ended, or what it said was not taken for too long";
            failed("hearing the process that serves the mount", &io::Error::other(why))
        }
        _ => failed("reaching the process that serves the mount", &error),
    })?;
    exit_of(exit).ok_or_else(|| {
        let error = io::Error::new(io::ErrorKind::InvalidData, "it is of another version");
        failed("understanding the process that serves the mount", &error)
    })
}

/// Where a piece of an answer is printed.
enum Stream {
    Output,
    Errors,
}

fn send(pieces: &SyncSender<(Stream, Vec<u8>)>, said: Said<'_>) -> io::Result<()> {
    let piece = match said {
        Said::Output(bytes) => (Stream::Output, bytes.to_vec()),
        Said::Errors(bytes) => (Stream::Errors, bytes.to_vec()),
    };
    pieces.send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
}

/// Prints the pieces of an answer, until there are no more, or nobody reads them.
fn print(pieces: &Receiver<(Stream, Vec<u8>)>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for (stream, bytes) in pieces {
        match stream {
            Stream::Output => out.write_all(&bytes)?,
            Stream::Errors => {
                out.flush()?;
                let _ = io::stderr().write_all(&bytes);
            }
        }
    }
    out.flush()
}

/// What the exit code of an answer means, unless it is of another version.
fn exit_of(code: u8) -> Option<Exit> {
    Exit::MEANINGS.iter().map(|(exit, _)| *exit).find(|exit| exit.code() == code)
}

/// Refuses what cannot be done at a mount.
pub fn refused(what: &str, directory: &Path, why: &str) -> Failure {
    Failure::new(Exit::Unsupported, what, why).at_path(directory)
}

/// What is written is told who called.
struct Told(Rc<RefCell<Caller>>);

impl Write for Told {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().say(Said::Output(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_takes_too_long_is_not_waited_for() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let (end, ended) = mpsc::channel::<()>();
        let begun = Instant::now();
        assert_eq!(within(Duration::from_millis(100), move || ended.recv().is_ok()), None);
        assert!(begun.elapsed() < Duration::from_secs(30));
        drop(end);
    }

    /// The end of a mount waited without limit for a command, and nothing was committed.
    #[test]
    fn command_that_does_not_end_is_not_waited_for_for_ever() {
        let (end, ended) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let _ = ended.recv();
        });
        let begun = Instant::now();
        wait_until_over(&thread, Duration::from_millis(100));
        assert!(!thread.is_finished());
        drop(end);
        wait_until_over(&thread, Duration::from_secs(60));
        assert!(thread.is_finished() && begun.elapsed() < Duration::from_secs(30));
        thread.join().unwrap();
    }
}
