//! The control socket of a mount: commands that reach the engine which serves it, and what they have to say.
//!
//! The socket belongs to the user who mounted, and only he and root are answered. Its name follows from his number and the mount's
//! device number, so who sees the mount finds it. Of who is not root it is in two places, as that of his session comes and goes with
//! that, and the other may be made by somebody else before. A command is the words of a command line; its answer is what the
//! process would have written, and its exit code. What a command means is not known here.
//!
//! Both are strings: how many in 4 bytes, then each behind its length in 4 bytes, little-endian. One command a connection.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::PidfdFlags;
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering};

/// Bytes of a command at most.
const COMMAND_BYTES_MAX: usize = 1 << 20;
/// Bytes of an answer at most.
const ANSWER_BYTES_MAX: usize = 1 << 30;
/// Strings of either at most.
const STRING_COUNT_MAX: usize = 4096;
/// Who has connected has said all that he wants within this.
const PATIENCE: Duration = Duration::from_secs(10);
/// And has taken the whole answer, which may be long, within this.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// So much of an answer is written at once.
const BITE_BYTES: usize = 64 << 10;
/// Before the next connection is taken where one could not be.
const AFTER_ERROR: Duration = Duration::from_millis(10);

/// What a command came to.
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
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    match outside(&map, uid) {
        0 => vec![PathBuf::from("/run/ubtrfs")],
        number => vec![
            PathBuf::from(format!("/run/user/{number}/ubtrfs")),
            PathBuf::from(format!("/tmp/ubtrfs-{number}")),
        ],
    }
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
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mut numbers = map.split_whitespace().map(str::parse::<u32>);
    let mut next = || numbers.next()?.ok();
    (next(), next(), next()) == (Some(0), Some(0), Some(u32::MAX))
}

/// Refuses a place that is not this user's alone: others could listen there in his place.
fn check_owner(path: &Path, uid: u32) -> io::Result<()> {
    let about = std::fs::symlink_metadata(path)?;
    if about.is_dir() && about.uid() == uid && about.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{} is not a directory of user {uid} alone", path.display()),
    ))
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
        let uid = rustix::process::geteuid().as_raw();
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
    pub fn serve(&self, run: impl Fn(Vec<OsString>) -> ControlAnswer) {
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
        run: &impl Fn(Vec<OsString>) -> ControlAnswer,
    ) -> io::Result<()> {
        check_peer(&stream, rustix::process::geteuid().as_raw())?;
        let words = self.hear(&mut stream)?;
        let answer = run(words.into_iter().map(OsString::from_vec).collect());
        let mut until = Until::within(&mut stream, ANSWER_PATIENCE);
        write_strings(&mut until, &[&[answer.exit], &answer.output, &answer.errors])
    }

    /// The words of a command; cut short where the socket is closed meanwhile.
    fn hear(&self, stream: &mut UnixStream) -> io::Result<Vec<Vec<u8>>> {
        *self.heard.lock() = Some(stream.try_clone()?);
        // Looked at after it can be found: whoever closes either finds it, or is seen here.
        let words = match self.is_closed.load(Ordering::Acquire) {
            true => Err(io::ErrorKind::ConnectionAborted.into()),
            false => read_strings(&mut Until::within(stream, PATIENCE), COMMAND_BYTES_MAX),
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
        // That of a session is made with it, and is the user's: nobody else can make one in it.
        match std::fs::DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => check_owner(directory, uid)?,
        }
        // Device numbers come again; whoever had this one has unmounted.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let file = file_at(&path)?;
        Ok(Self { listener, path, file })
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
        self.stream.write(&bytes[..bytes.len().min(BITE_BYTES)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Only the user who mounted is answered, and root; and only he is believed.
fn check_peer(stream: &UnixStream, uid: u32) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid;
    if peer.is_root() || peer.as_raw() == uid {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "of another user"))
}

/// Has a command done by who serves the mount of user `uid` with that device number.
///
/// # Errors
/// The system's; `NotFound` and `ConnectionRefused` where nobody listens, `InvalidData` for an answer that is none.
pub fn control(uid: u32, device: &str, words: &[OsString]) -> io::Result<ControlAnswer> {
    ask(&connect(uid, device)?, words)
}

/// As [`control`], for who can do without the answer if it takes longer than `patience`, which is not zero: what is asked for may wait
/// behind other commands.
///
/// # Errors
/// As [`control`]; `WouldBlock` where it takes longer.
pub fn control_within(
    uid: u32,
    device: &str,
    words: &[OsString],
    patience: Duration,
) -> io::Result<ControlAnswer> {
    let stream = connect(uid, device)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    ask(&stream, words)
}

/// The process that serves a mount, whatever number it has.
#[derive(Debug)]
pub struct ServingProcess(OwnedFd);

impl ServingProcess {
    /// That which listens for the mount of user `uid` with that device number.
    ///
    /// # Errors
    /// As [`control`]; the system's, where it lies outside of what processes this one sees.
    pub fn of_mount(uid: u32, device: &str) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(connect(uid, device)?)?;
        Ok(Self(rustix::process::pidfd_open(peer.pid, PidfdFlags::empty())?))
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

fn connect(uid: u32, device: &str) -> io::Result<UnixStream> {
    let mut refused = io::Error::from(io::ErrorKind::NotFound);
    for path in control_paths(uid, device) {
        match connect_at(&path, uid) {
            Ok(stream) => return Ok(stream),
            // Of two refusals that one is told which is not because nothing is there.
            Err(error) if error.kind() != io::ErrorKind::NotFound => refused = error,
            Err(_) => {}
        }
    }
    Err(refused)
}

fn connect_at(path: &Path, uid: u32) -> io::Result<UnixStream> {
    check_owner(path.parent().ok_or(io::ErrorKind::NotFound)?, uid)?;
    let stream = UnixStream::connect(path)?;
    check_peer(&stream, uid)?;
    Ok(stream)
}

fn ask(mut stream: &UnixStream, words: &[OsString]) -> io::Result<ControlAnswer> {
    let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
    write_strings(&mut stream, &words)?;
    let answer = read_strings(&mut stream, ANSWER_BYTES_MAX)?;
    match <[Vec<u8>; 3]>::try_from(answer) {
        Ok([exit, output, errors]) if exit.len() == 1 => {
            Ok(ControlAnswer { exit: exit[0], output, errors })
        }
        _ => Err(no_sense("an answer of another form")),
    }
}

/// Serves on a thread of its own.
///
/// # Errors
/// The system's, where it gives no thread.
pub fn serve_control(
    socket: &Arc<ControlSocket>,
    run: impl Fn(Vec<OsString>) -> ControlAnswer + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    let socket = Arc::clone(socket);
    std::thread::Builder::new().name("ubtrfs-control".to_owned()).spawn(move || socket.serve(run))
}

fn no_sense(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn write_strings(to: &mut impl Write, strings: &[&[u8]]) -> io::Result<()> {
    let number = |len: usize| {
        u32::try_from(len).map(u32::to_le_bytes).map_err(|_| no_sense("longer than can be said"))
    };
    let mut bytes = number(strings.len())?.to_vec();
    for string in strings {
        bytes.extend_from_slice(&number(string.len())?);
        bytes.extend_from_slice(string);
    }
    to.write_all(&bytes)
}

fn read_number(from: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX))
}

fn read_strings(from: &mut impl Read, bytes_max: usize) -> io::Result<Vec<Vec<u8>>> {
    let count = read_number(from)?;
    if count > STRING_COUNT_MAX {
        return Err(no_sense("too many strings"));
    }
    let (mut strings, mut left) = (Vec::new(), bytes_max);
    for _ in 0..count {
        let len = read_number(from)?;
        left = left.checked_sub(len).ok_or_else(|| no_sense("too long"))?;
        // As it comes: what is said of its length may not be true.
        let mut string = Vec::new();
        from.by_ref().take(len as u64).read_to_end(&mut string)?;
        if string.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        strings.push(string);
    }
    Ok(strings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_outside_of_a_namespace_are_found() {
        assert_eq!(outside("         0          0 4294967295\n", 7), 7);
        let map = "0 1000 1\n1 100000 65536\n";
        assert_eq!([0, 1, 5].map(|uid| outside(map, uid)), [1000, 100_000, 100_004]);
        for (map, uid) in [("", 3), ("0 1000 1", 3), ("x y z\n1 2", 3), ("0 4294967295 9", 3)] {
            assert_eq!(outside(map, uid), uid, "{map}");
        }
    }

    #[test]
    fn strings_come_back_and_what_is_cut_or_too_long_is_refused() {
        let mut bytes = Vec::new();
        let strings: [&[u8]; 3] = [b"subvolume", b"", b"\xff\0x"];
        write_strings(&mut bytes, &strings).unwrap();
        assert_eq!(read_strings(&mut &bytes[..], 100).unwrap(), strings);
        assert!(read_strings(&mut &bytes[..], 11).is_err());
        for len in 0..bytes.len() {
            assert!(read_strings(&mut &bytes[..len], 100).is_err(), "{len}");
        }
        assert!(read_strings(&mut &[255; 100][..], usize::MAX).is_err());
        let claims_much = [1, 0, 0, 0, 255, 255, 255, 255, 7];
        assert!(read_strings(&mut &claims_much[..], usize::MAX).is_err());
    }

    #[test]
    fn commands_reach_who_serves_until_it_closes() {
        let device = format!("test:{}", std::process::id());
        let socket = Arc::new(ControlSocket::bind(&device).unwrap());
        let uid = rustix::process::geteuid().as_raw();
        let serving = serve_control(&socket, |words| ControlAnswer {
            exit: u8::try_from(words.len()).unwrap(),
            output: words.concat_bytes(),
            errors: b"said".to_vec(),
        })
        .unwrap();
        for words in [&["a", "b"][..], &[], &["\u{e9}"]] {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let answer = control(uid, &device, &words).unwrap();
            assert_eq!(usize::from(answer.exit), words.len());
            assert_eq!(answer.output, words.concat_bytes());
            assert_eq!(answer.errors, b"said");
        }
        // Who says nothing of sense keeps nobody else from being heard.
        UnixStream::connect(&control_paths(uid, &device)[0]).unwrap().write_all(&[255; 8]).unwrap();
        assert_eq!(control(uid, &device, &["x".into()]).unwrap().exit, 1);
        let mode = std::fs::symlink_metadata(&control_paths(uid, &device)[0]).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        socket.close();
        serving.join().unwrap();
        let refused = control(uid, &device, &[]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    }

    /// Who sent a byte now and then was listened to for as long as he liked: the mount did not end, and nobody else was heard.
    #[test]
    fn words_that_trickle_in_keep_neither_the_end_nor_others_waiting() {
        let device = format!("test:slow:{}", std::process::id());
        let socket = Arc::new(ControlSocket::bind(&device).unwrap());
        let serving = serve_control(&socket, |_| ControlAnswer::default()).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let mut slow = UnixStream::connect(&control_paths(uid, &device)[0]).unwrap();
        slow.write_all(&[1, 0, 0]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        socket.close();
        serving.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        let (mut from, mut to) = UnixStream::pair().unwrap();
        let sending = std::thread::spawn(move || {
            let mut words = [&u32::to_le_bytes(1)[..], &u32::to_le_bytes(1 << 19)].concat();
            words.resize(1 << 19, b'x');
            words.iter().all(|byte| {
                std::thread::sleep(Duration::from_millis(20));
                to.write_all(&[*byte]).is_ok()
            })
        });
        let begun = Instant::now();
        let until = &mut Until::within(&mut from, Duration::from_millis(300));
        assert!(read_strings(until, COMMAND_BYTES_MAX).is_err());
        assert!(write_strings(until, &[&[0; 1 << 20]]).is_err());
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        drop(from);
        assert!(!sending.join().unwrap());
    }

    /// It ends when the process does, not when it listens no more.
    #[test]
    fn process_that_serves_is_waited_for_until_it_ends() {
        let device = format!("test:process:{}", std::process::id());
        let socket = ControlSocket::bind(&device).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let process = ServingProcess::of_mount(uid, &device).unwrap();
        socket.close();
        assert!(!process.wait(Duration::from_millis(50)).unwrap());
        assert!(ServingProcess::of_mount(uid, &device).is_err());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let process =
            ServingProcess(rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap());
        assert!(!process.wait(Duration::ZERO).unwrap());
        child.kill().unwrap();
        assert!(process.wait(Duration::from_secs(20)).unwrap());
        child.wait().unwrap();
    }

    /// Whoever ended late took away the socket of the next mount that had his device number, which no command reached any more.
    #[test]
    fn socket_of_the_next_mount_stays_when_an_earlier_one_closes() {
        let device = format!("test:next:{}", std::process::id());
        let uid = rustix::process::geteuid().as_raw();
        let earlier = ControlSocket::bind(&device).unwrap();
        let next = Arc::new(ControlSocket::bind(&device).unwrap());
        let serving = serve_control(&next, |_| ControlAnswer::default()).unwrap();
        earlier.close();
        let answered = control(uid, &device, &[]).map_err(|error| error.kind());
        next.close();
        serving.join().unwrap();
        assert_eq!(answered, Ok(ControlAnswer::default()));
        assert!(!control_paths(uid, &device)[0].exists());
    }

    trait ConcatBytes {
        fn concat_bytes(&self) -> Vec<u8>;
    }

    impl ConcatBytes for [OsString] {
        fn concat_bytes(&self) -> Vec<u8> {
            self.iter().flat_map(|word| word.as_bytes().to_vec()).collect()
        }
    }
}
