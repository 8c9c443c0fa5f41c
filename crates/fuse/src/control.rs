//! The control socket of a mount: commands that reach the engine which serves it, and what they have to say.
//!
//! The socket belongs to the user who mounted. Only he and root are answered, and he alone is asked: who gives a command at his mount hears
//! nobody else, root neither. Its name follows from his number and the mount's device number, so who sees the mount finds it. Of who is not
//! root it is in two places, as that of his session comes and goes with that, and the other may be made by somebody else before. A command
//! is the words of a command line; its answer is what the process would have written, as it comes, and its exit code. What a command means
//! is not known here.
//!
//! A command is strings: how many in 4 bytes, then each behind its length in 4 bytes, little-endian. An answer is pieces: a byte that says
//! of which kind, then the bytes behind their length likewise; the exit code is the last. One command a connection.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::PidfdFlags;
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering};

use crate::own;
use crate::peer::Peer;

/// Bytes of a command at most, each string with [`STRING_OWN_BYTES`]. That is more than any command line has: execve(2) gives no more than
/// 6 MiB to that and the environment.
const COMMAND_BYTES_MAX: usize = 8 << 20;
/// What a string takes beside its own bytes, as execve(2) counts them: its end, and a pointer to it.
const STRING_OWN_BYTES: usize = 9;
/// Who has connected has said all that he wants within this.
const PATIENCE: Duration = Duration::from_secs(10);
/// And takes [`STEP_BYTES`] of the answer, or the rest, within this, without the time in which there is nothing to take.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// Who has taken so much of an answer has the same time for as much again.
const STEP_BYTES: usize = 1 << 20;
/// Bytes of a piece of an answer at most; so much is written at once.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// Bytes of an answer that is kept as a whole at most.
const KEPT_BYTES_MAX: usize = 1 << 20;
/// What has a name, be it a symbolic link, and not for reading it.
const ONLY_ITSELF: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// The kinds of pieces.
const OUTPUT: u8 = 1;
const ERRORS: u8 = 2;
const EXIT: u8 = 3;
/// What who called hears of a command that panicked, and its exit code: as of an error of input or output.
const PANICKED: &str =
    "ubtrfs: the command panicked in the process that serves the mount, which goes on\n";
const PANICKED_EXIT: u8 = 4;
/// Before the next connection is taken where one could not be.
const AFTER_ERROR: Duration = Duration::from_millis(10);
/// Before the next try to connect to who has more waiting than the system lets wait.
const CONNECT_AGAIN_EVERY: Duration = Duration::from_millis(5);
/// No limit.
const FOR_EVER: Duration = Duration::MAX;

/// A piece of what a command says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Said<'a> {
    /// To the standard output.
    Output(&'a [u8]),
    /// To the standard error.
    Errors(&'a [u8]),
}

/// Who has a command done, and hears what it says meanwhile.
#[derive(Debug)]
pub struct Caller {
    stream: UnixStream,
    patience: Duration,
    /// Of that, for the step which is being taken.
    left: Duration,
    step_bytes: usize,
}

/// All of what a short command said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ControlAnswer {
    /// The exit code.
    pub exit: u8,
    /// What goes to the standard output.
    pub output: Vec<u8>,
    /// What goes to the standard error.
    pub errors: Vec<u8>,
}

/// A socket at which commands are taken, in each of its places.
#[derive(Debug)]
pub struct ControlSocket {
    bound: Vec<Bound>,
    is_closed: AtomicBool,
    /// Whose words are being read.
    heard: Mutex<Option<UnixStream>>,
}

/// A socket in one place.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    path: PathBuf,
    /// The device and the number of the socket's file.
    file: (u64, u64),
}

/// Where the socket of a mount may be: of user `uid`, with the device number that `/proc/self/mountinfo` shows of it.
pub fn control_paths(uid: u32, device: &str) -> Vec<PathBuf> {
    let name = format!("{device}.control");
    directories_of(uid).into_iter().map(|directory| directory.join(&name)).collect()
}

/// Each is this user's alone, or not used.
fn directories_of(uid: u32) -> Vec<PathBuf> {
    match outside(&uid_map(), uid) {
        0 => vec![PathBuf::from("/run/ubtrfs")],
        number => vec![
            PathBuf::from(format!("/run/user/{number}/ubtrfs")),
            PathBuf::from(format!("/tmp/ubtrfs-{number}")),
        ],
    }
}

fn uid_map() -> String {
    own::open_own_proc("uid_map").and_then(io::read_to_string).unwrap_or_default()
}

/// What a user is outside of the user namespace of this process: root of one is no root there.
///
/// Source: the lines of `/proc/PID/uid_map`, user_namespaces(7): the first inside, the first outside, how many.
fn outside(map: &str, uid: u32) -> u32 {
    let lines = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let mut next = || numbers.next()?.ok();
        Some((next()?, next()?, next()?))
    });
    let mut found = lines.filter_map(|(inside, outside, count)| {
        let at = uid.checked_sub(inside).filter(|at| *at < count)?;
        outside.checked_add(at)
    });
    found.next().unwrap_or(uid)
}

/// Whether users have the same numbers here as on the machine.
pub(crate) fn is_first_user_namespace() -> bool {
    let map = uid_map();
    let mut numbers = map.split_whitespace().map(str::parse::<u32>);
    let mut next = || numbers.next()?.ok();
    (next(), next(), next()) == (Some(0), Some(0), Some(u32::MAX))
}

/// Opens a place of sockets. Refuses one that is not this user's alone: others could listen there in his place.
fn open_directory(path: &Path, uid: u32) -> io::Result<OwnedFd> {
    let directory = rustix::fs::open(path, ONLY_ITSELF, Mode::empty())?;
    let (mode, owner) = own::mode_and_owner(&directory)?;
    let is_directory = FileType::from_raw_mode(mode) == FileType::Directory;
    if is_directory && owner == uid && mode & 0o077 == 0 {
        return Ok(directory);
    }
    Err(refused(format!("{} is not a directory of user {uid} alone", path.display())))
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// The device and the number of a file.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    let about = std::fs::symlink_metadata(path)?;
    Ok((about.dev(), about.ino()))
}

impl ControlSocket {
    /// Makes the socket of a mount of this process's user, in each place where that can be.
    ///
    /// # Errors
    /// The system's, where it can be in none; `PermissionDenied` where others could have put theirs.
    pub fn bind(device: &str) -> io::Result<Self> {
        let uid = own::user().as_raw();
        let (mut bound, mut refused) = (Vec::new(), None);
        for path in control_paths(uid, device) {
            match Bound::at(path, uid) {
                Ok(one) => bound.push(one),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if bound.is_empty() => Err(error),
            _ => Ok(Self { bound, is_closed: AtomicBool::new(false), heard: Mutex::new(None) }),
        }
    }

    /// Takes commands one after the other, until [`ControlSocket::close`].
    pub fn serve(&self, run: impl Fn(Vec<OsString>, Caller)) {
        let mut waited: Vec<PollFd<'_>> =
            self.bound.iter().map(|one| PollFd::new(&one.listener, PollFlags::IN)).collect();
        while !self.is_closed.load(Ordering::Acquire) {
            if rustix::event::poll(&mut waited, None).is_err() {
                std::thread::sleep(AFTER_ERROR);
                continue;
            }
            for (one, waited) in self.bound.iter().zip(&waited) {
                if waited.revents().is_empty() || self.is_closed.load(Ordering::Acquire) {
                    continue;
                }
                match one.listener.accept() {
                    // Who goes away, or says nothing that makes sense, hears nothing.
                    Ok((stream, _)) => drop(self.answer(stream, &run)),
                    // Out of files or memory, say, which passes.
                    Err(_) => std::thread::sleep(AFTER_ERROR),
                }
            }
        }
    }

    fn answer(
        &self,
        mut stream: UnixStream,
        run: &impl Fn(Vec<OsString>, Caller),
    ) -> io::Result<()> {
        let peer = Peer::of(&stream)?.uid;
        if !peer.is_root() && peer != own::user() {
            return Err(refused("of another user".to_owned()));
        }
        let words = self.hear(&mut stream)?;
        let words = words.into_iter().map(OsString::from_vec).collect();
        let again = stream.try_clone()?;
        let caller = Caller::new(stream, ANSWER_PATIENCE);
        // A command that panics takes no other with it: who listens and answers nobody would be waited for without end. What became of the
        // filesystem is told where that is asked next.
        let answered = catch_unwind(AssertUnwindSafe(|| run(words, caller)));
        if answered.is_err() {
            let mut caller = Caller::new(again, ANSWER_PATIENCE);
            caller.say(Said::Errors(PANICKED.as_bytes()))?;
            caller.end(PANICKED_EXIT)?;
        }
        Ok(())
    }

    /// The words of a command; cut short where the socket is closed meanwhile.
    fn hear(&self, stream: &mut UnixStream) -> io::Result<Vec<Vec<u8>>> {
        *self.heard.lock() = Some(stream.try_clone()?);
        // Looked at after it can be found: whoever closes either finds it, or is seen here.
        let words = match self.is_closed.load(Ordering::Acquire) {
            true => Err(io::ErrorKind::ConnectionAborted.into()),
            false => read_words(&mut Until::within(stream, PATIENCE), COMMAND_BYTES_MAX),
        };
        *self.heard.lock() = None;
        words
    }

    /// Takes no further command; what was begun is done to its end, and what is not all said yet is not.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(heard) = &*self.heard.lock() {
            let _ = heard.shutdown(std::net::Shutdown::Both);
        }
        for one in &self.bound {
            // By now it may be that of the next mount. Its own number is not given again while the listener is open.
            if file_at(&one.path).is_ok_and(|file| file == one.file) {
                let _ = std::fs::remove_file(&one.path);
            }
            let _ = rustix::net::shutdown(&one.listener, rustix::net::Shutdown::Both);
        }
    }
}

impl Bound {
    fn at(path: PathBuf, uid: u32) -> io::Result<Self> {
        let directory = path.parent().ok_or(io::ErrorKind::NotFound)?;
        let name = path.file_name().ok_or(io::ErrorKind::NotFound)?;
        // That of a session is made with it, and is the user's: nobody else can make one in it.
        let directory = match std::fs::DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => open_directory(directory, uid)?,
        };
        // Device numbers come again; whoever had this one has unmounted.
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Err(errno) if errno != Errno::NOENT => return Err(errno.into()),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        // In what was looked at, where nobody else can have put a link in its place: the directory may have another name by now.
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::chmodat(&directory, name, mode, AtFlags::empty())?;
        let file = file_at(&path)?;
        Ok(Self { listener, path, file })
    }
}

impl Caller {
    fn new(stream: UnixStream, patience: Duration) -> Self {
        Self { stream, patience, left: patience, step_bytes: 0 }
    }

    /// Says it to him, and waits for him where he has not taken what was said before.
    ///
    /// # Errors
    /// The system's; `BrokenPipe` where he is gone. He hears nothing more then.
    pub fn say(&mut self, said: Said<'_>) -> io::Result<()> {
        let (kind, bytes) = match said {
            Said::Output(bytes) => (OUTPUT, bytes),
            Said::Errors(bytes) => (ERRORS, bytes),
        };
        bytes.chunks(PIECE_BYTES_MAX).try_for_each(|piece| self.send(kind, piece))
    }

    /// Says what the command has come to, after all else.
    ///
    /// # Errors
    /// As [`Caller::say`].
    pub fn end(mut self, exit: u8) -> io::Result<()> {
        self.send(EXIT, &[exit])
    }

    fn send(&mut self, kind: u8, bytes: &[u8]) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).map_err(|_| no_sense("too long a piece"))?;
        let piece = [&[kind][..], &len.to_le_bytes(), bytes].concat();
        let begun = Instant::now();
        let result = Until::within(&mut self.stream, self.left).write_all(&piece);
        self.left = self.left.saturating_sub(begun.elapsed());
        self.step_bytes += piece.len();
        if self.step_bytes >= STEP_BYTES {
            (self.left, self.step_bytes) = (self.patience, 0);
        }
        result.map_err(|error| {
            // Half a piece may be said: what came behind it would make no sense.
            self.left = Duration::ZERO;
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
            match error.kind() {
                io::ErrorKind::ConnectionReset => io::ErrorKind::BrokenPipe.into(),
                _ => error,
            }
        })
    }
}

/// A stream that has all that is read or written until a moment: a limit of each read would be none of how many there are.
struct Until<'a> {
    stream: &'a mut UnixStream,
    end: Instant,
}

impl<'a> Until<'a> {
    fn within(stream: &'a mut UnixStream, patience: Duration) -> Self {
        Self { stream, end: Instant::now() + patience }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        // A bite at a time: the system's limit is of each part that it waits for, not of the whole.
        self.stream.write(&bytes[..bytes.len().min(PIECE_BYTES_MAX)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Has a command done by who serves the mount of user `uid` with that device number, and calls `hear` with what it says, as it comes.
/// Returns the exit code.
///
/// # Errors
/// The system's; `NotFound` and `ConnectionRefused` where nobody listens, `InvalidInput` for a command that is too long, `InvalidData` for an
/// answer that is none, `UnexpectedEof` for one without an end; and those of `hear`, which end the command where it says more.
pub fn control(
    uid: u32,
    device: &str,
    words: &[OsString],
    hear: impl FnMut(Said<'_>) -> io::Result<()>,
) -> io::Result<u8> {
    let mut stream = connect(uid, device, FOR_EVER)?;
    say_words(&mut stream, words)?;
    hear_answer(&mut stream, hear)
}

/// As [`control`], for who can do without the answer if it takes longer than `patience`, which is not zero: what is asked for may wait
/// behind other commands. Returns what it said, which is short.
///
/// # Errors
/// As [`control`]; `WouldBlock` or `TimedOut` where it takes longer.
pub fn control_within(
    uid: u32,
    device: &str,
    words: &[OsString],
    patience: Duration,
) -> io::Result<ControlAnswer> {
    let begun = Instant::now();
    let mut stream = connect(uid, device, patience)?;
    let mut until = Until::within(&mut stream, patience.saturating_sub(begun.elapsed()));
    say_words(&mut until, words)?;
    let mut answer = ControlAnswer::default();
    answer.exit = hear_answer(&mut until, |said| {
        let (kept, bytes) = match said {
            Said::Output(bytes) => (&mut answer.output, bytes),
            Said::Errors(bytes) => (&mut answer.errors, bytes),
        };
        if kept.len() + bytes.len() > KEPT_BYTES_MAX {
            return Err(no_sense("a longer answer than was asked for"));
        }
        kept.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(answer)
}

/// The process that serves a mount, whatever number it has.
#[derive(Debug)]
pub struct ServingProcess(OwnedFd);

impl ServingProcess {
    /// That which listens for the mount of user `uid` with that device number. It is not waited for.
    ///
    /// # Errors
    /// As [`control`]; `WouldBlock` where it is behind with those who connect; `NotFound`, too, where it lies outside of what processes this
    /// one sees.
    pub fn of_mount(uid: u32, device: &str) -> io::Result<Self> {
        let peer = Peer::of(&connect(uid, device, Duration::ZERO)?)?;
        let pid = peer.pid.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self(rustix::process::pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Waits until it has ended, and let go of all that it had open. Whether that was within `patience`.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            match rustix::event::poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                ready => return Ok(ready? > 0),
            }
        }
    }
}

fn connect(uid: u32, device: &str, patience: Duration) -> io::Result<UnixStream> {
    let begun = Instant::now();
    let mut refused = io::Error::from(io::ErrorKind::NotFound);
    for path in control_paths(uid, device) {
        match connect_at(&path, uid, patience.saturating_sub(begun.elapsed())) {
            Ok(stream) => return Ok(stream),
            // Of two refusals that one is told which is not because nothing is there.
            Err(error) if error.kind() != io::ErrorKind::NotFound => refused = error,
            Err(_) => {}
        }
    }
    Err(refused)
}

/// Whatever else lies by these names by now, it is what was looked at that is connected to. Who listens and takes nobody is waited for no
/// longer than `patience`.
fn connect_at(path: &Path, uid: u32, patience: Duration) -> io::Result<UnixStream> {
    let parts = path.parent().zip(path.file_name());
    let (directory, name) = parts.ok_or(io::ErrorKind::NotFound)?;
    let directory = open_directory(directory, uid)?;
    let socket = rustix::fs::openat(&directory, name, ONLY_ITSELF, Mode::empty())?;
    let (mode, owner) = own::mode_and_owner(&socket)?;
    let is_socket = FileType::from_raw_mode(mode) == FileType::Socket;
    if !is_socket || owner != uid {
        return Err(refused(format!("{} is no socket of user {uid}", path.display())));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let begun = Instant::now();
    let connect = || {
        own::with_path_of(&socket, |path| {
            rustix::net::connect(&stream, &SocketAddrUnix::new(path)?)
        })
    };
    // The system would wait for room without end.
    while let Err(errno) = connect() {
        if errno != Errno::AGAIN || begun.elapsed() >= patience {
            return Err(errno.into());
        }
        std::thread::sleep(CONNECT_AGAIN_EVERY);
    }
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    // Root is not believed where it is not he who mounted: another link to his socket leads to him, who would do the command at his own mount.
    if Peer::of(&stream)?.uid.as_raw() != uid {
        return Err(refused(format!("who listens at {} is not user {uid}", path.display())));
    }
    Ok(stream)
}

/// Serves on a thread of its own.
///
/// # Errors
/// The system's, where it gives no thread.
pub fn serve_control(
    socket: &Arc<ControlSocket>,
    run: impl Fn(Vec<OsString>, Caller) + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    let socket = Arc::clone(socket);
    std::thread::Builder::new().name("ubtrfs-control".to_owned()).spawn(move || socket.serve(run))
}

fn no_sense(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn say_words(to: &mut impl Write, words: &[OsString]) -> io::Result<()> {
    let len_bytes: usize = words.iter().map(|word| word.len() + STRING_OWN_BYTES).sum();
    if len_bytes > COMMAND_BYTES_MAX {
        let max = COMMAND_BYTES_MAX >> 20;
        let why = format!("the command takes {len_bytes} bytes, and {max} MiB can be said at once");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let number = |len: usize| {
        u32::try_from(len).map(u32::to_le_bytes).map_err(|_| no_sense("longer than can be said"))
    };
    let mut bytes = number(words.len())?.to_vec();
    for word in words {
        bytes.extend_from_slice(&number(word.len())?);
        bytes.extend_from_slice(word.as_bytes());
    }
    to.write_all(&bytes)
}

fn read_number(from: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX))
}

/// Reads a command of at most `bytes_max` bytes, each string with [`STRING_OWN_BYTES`].
fn read_words(from: &mut impl Read, bytes_max: usize) -> io::Result<Vec<Vec<u8>>> {
    let count = read_number(from)?;
    let (mut strings, mut left) = (Vec::new(), bytes_max);
    for _ in 0..count {
        let len = read_number(from)?;
        let taken = len.checked_add(STRING_OWN_BYTES);
        left = taken.and_then(|taken| left.checked_sub(taken)).ok_or_else(too_long)?;
        strings.push(read_bytes(from, len)?);
    }
    Ok(strings)
}

fn read_bytes(from: &mut impl Read, len: usize) -> io::Result<Vec<u8>> {
    // As it comes: what is said of its length may not be true.
    let mut bytes = Vec::new();
    from.take(len as u64).read_to_end(&mut bytes)?;
    if bytes.len() < len { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

/// Hears pieces of an answer until its exit code, which is returned.
fn hear_answer(
    from: &mut impl Read,
    mut hear: impl FnMut(Said<'_>) -> io::Result<()>,
) -> io::Result<u8> {
    loop {
        let mut kind = [0];
        from.read_exact(&mut kind)?;
        let len = read_number(from)?;
        if len > PIECE_BYTES_MAX {
            return Err(too_long());
        }
        let bytes = read_bytes(from, len)?;
        match (kind[0], &bytes[..]) {
            (OUTPUT, bytes) => hear(Said::Output(bytes))?,
            (ERRORS, bytes) => hear(Said::Errors(bytes))?,
            (EXIT, [exit]) => return Ok(*exit),
            _ => return Err(no_sense("an answer of another form")),
        }
    }
}

fn too_long() -> io::Error {
    no_sense("too long")
}

#[cfg(test)]
mod tests;
