//! Called by mount(8) as `mount.fuse.ubtrfs`, for lines of `/etc/fstab` with the type `fuse.ubtrfs`, and by umount(8) as
//! `umount.fuse.ubtrfs`: umount(2) returns while the process that serves still writes, and the helper waits for that.
//!
//! Source: the parts EXTERNAL HELPERS of mount(8) and umount(8): `mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE.SUBTYPE]`
//! and `umount.TYPE DIR [-flnrv] [-N NAMESPACE] [-t TYPE.SUBTYPE]`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::failure::{Exit, Failure, Result};
use crate::mounts;

/// What this command is called by mount(8).
pub const NAMES: [&str; 2] = ["mount.fuse.ubtrfs", "mount.ubtrfs"];

/// And by umount(8), which knows of most mounts no more than that they are of FUSE.
pub const UMOUNT_NAMES: [&str; 3] = ["umount.fuse.ubtrfs", "umount.ubtrfs", UMOUNT_FUSE];
const UMOUNT_FUSE: &str = "umount.fuse";

/// The arguments of this process, in the form in which the command takes them; `None` where nothing is to be done.
pub fn arguments() -> Option<Vec<OsString>> {
    translated(words())
}

/// What this command is to be called where it calls itself with the same arguments.
pub fn name() -> OsString {
    let called = std::env::args_os().next().filter(|_| is_called_by_mount());
    called.unwrap_or_else(|| "ubtrfs".into())
}

/// Whether mount(8) has called, or somebody in its words.
pub fn is_called_by_mount() -> bool {
    is_called(&words(), &NAMES)
}

/// What this process exits with. mount(8) and umount(8) hand that on, and have other meanings for most numbers.
///
/// Source: the part EXIT STATUS of mount(8).
pub fn exit_code(exit: Exit) -> ExitCode {
    /// An incorrect call, or nobody who may.
    const USAGE: u8 = 1;
    const FAILURE: u8 = 32;
    let words = words();
    if !(is_called(&words, &NAMES) || is_called(&words, &UMOUNT_NAMES)) {
        return exit.into();
    }
    match exit {
        Exit::Done => ExitCode::SUCCESS,
        Exit::Usage => USAGE.into(),
        _ => FAILURE.into(),
    }
}

fn words() -> Vec<OsString> {
    std::env::args_os().collect()
}

/// Gives what another program has mounted back to umount(8), which this process becomes then.
///
/// # Errors
/// The system's.
pub fn hand_back() -> Result<()> {
    const WHAT: &str = "starting umount";
    let words = words();
    if !is_called(&words, &[UMOUNT_FUSE]) {
        return Ok(());
    }
    let (flags, plain) = flags_and_plain(words.clone());
    // Only looked at from there: programs that are there are not to be trusted.
    let home = Home::of_this_process().map_err(|error| Failure::io(WHAT, &error))?;
    enter_namespace()?;
    let is_ours = |word: &OsString| matches!(mounts::at(Path::new(word)), Ok(Some(_)));
    let is_ours = plain.iter().any(is_ours);
    if let Some(home) = home {
        home.enter().map_err(|error| Failure::io(WHAT, &error))?;
    }
    if is_ours {
        return Ok(());
    }
    // `-i`: without a helper.
    let mut umount = Command::new("umount");
    umount.arg("-i").args(flags.iter().map(|letter| format!("-{}", char::from(*letter))));
    if let Some(namespace) = namespace_in(&words) {
        umount.arg("-N").arg(namespace);
    }
    Err(Failure::io(WHAT, &umount.arg("--").args(plain).exec()))
}

/// Where a process is that goes to another namespace, to come back.
struct Home {
    namespace: File,
    root: OwnedFd,
    directory: OwnedFd,
}

impl Home {
    /// `None` where it does not go.
    fn of_this_process() -> io::Result<Option<Self>> {
        if !goes_elsewhere() {
            return Ok(None);
        }
        let namespace = File::open("/proc/self/ns/mnt")?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = |path: &str| rustix::fs::open(path, flags, Mode::empty());
        Ok(Some(Self { namespace, root: opened("/")?, directory: opened(".")? }))
    }

    fn enter(&self) -> io::Result<()> {
        // To its root, which need not be that of this process.
        move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
        rustix::process::fchdir(&self.root)?;
        rustix::process::chroot(".")?;
        Ok(rustix::process::fchdir(&self.directory)?)
    }
}

/// Whether mount(8) or umount(8) told of another mount namespace.
pub fn goes_elsewhere() -> bool {
    namespace_in(&words()).is_some()
}

/// Goes to the mount namespace that mount(8) or umount(8) was told of: it has its helper run in its own. No program may be started from
/// there on: it would be one of that namespace, or would load its libraries. Nor may anything be written by the names of `/proc` and `/sys`, by
/// which somebody else may have put anything there, nor anything be read by them of this process and its mounts. What is read by them of others
/// (who makes a request, and what he may; who has a file open or locked, or a device in use; which kinds of filesystems there are) is what who
/// made that namespace has there.
///
/// # Errors
/// The system's.
pub fn enter_namespace() -> Result<()> {
    let words = words();
    let Some(namespace) = namespace_in(&words) else { return Ok(()) };
    let entered = ubtrfs_fuse::keep_own_proc().and_then(|()| enter(namespace));
    entered.map_err(|error| Failure::io("entering the mount namespace", &error))
}

fn enter(namespace: &OsStr) -> io::Result<()> {
    let is_number = namespace.as_bytes().iter().all(u8::is_ascii_digit);
    let path = match is_number {
        true => Path::new("/proc").join(namespace).join("ns/mnt"),
        false => PathBuf::from(namespace),
    };
    let file = File::open(path)?;
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Mount))?)
}

fn namespace_in(words: &[OsString]) -> Option<&OsStr> {
    if !(is_called(words, &NAMES) || is_called(words, &UMOUNT_NAMES)) {
        return None;
    }
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        match word.as_bytes() {
            b"-N" => return rest.next().map(OsString::as_os_str),
            b"-o" | b"-t" => drop(rest.next()),
            _ => {}
        }
    }
    None
}

fn is_called(words: &[OsString], names: &[&str]) -> bool {
    let name = words.first().and_then(|word| Path::new(word).file_name());
    name.is_some_and(|name| names.iter().any(|own| name == OsStr::new(own)))
}

fn translated(words: Vec<OsString>) -> Option<Vec<OsString>> {
    if is_called(&words, &UMOUNT_NAMES) {
        return Some(translated_of_umount(words));
    }
    if !is_called(&words, &NAMES) {
        return Some(words);
    }
    let mut options = OsString::new();
    let mut plain = Vec::new();
    let mut rest = words.into_iter().skip(1);
    while let Some(word) = rest.next() {
        match word.as_bytes() {
            b"-o" => options = rest.next().unwrap_or_default(),
            b"-t" | b"-N" => drop(rest.next()),
            [b'-', letters @ ..] if letters.iter().all(|letter| b"sfnv".contains(letter)) => {
                // Only to see whether it would go.
                if letters.contains(&b'f') {
                    return None;
                }
            }
            _ => plain.push(word),
        }
    }
    let ours: Vec<&[u8]> =
        options.as_bytes().split(|byte| *byte == b',').filter(|word| !word.is_empty()).collect();
    let mut command: Vec<OsString> = vec!["ubtrfs".into(), "mount".into()];
    if !ours.is_empty() {
        command.extend(["-o".into(), OsString::from_vec(ours.join(&b','))]);
    }
    command.push("--".into());
    command.extend(plain);
    Some(command)
}

fn translated_of_umount(words: Vec<OsString>) -> Vec<OsString> {
    let (flags, plain) = flags_and_plain(words);
    let mut command: Vec<OsString> = vec!["ubtrfs".into(), "umount".into()];
    // `-n`, `-r` and `-v` say nothing here: there is no table to write, and what stays mounted stays as it is.
    for (letter, word) in [(b'f', "-f"), (b'l', "-l")] {
        if flags.contains(&letter) {
            command.push(word.into());
        }
    }
    command.push("--".into());
    command.extend(plain);
    command
}

/// The letters that umount(8) says, and what is not said by letters.
fn flags_and_plain(words: Vec<OsString>) -> (Vec<u8>, Vec<OsString>) {
    let (mut flags, mut plain) = (Vec::new(), Vec::new());
    let mut rest = words.into_iter().skip(1);
    while let Some(word) = rest.next() {
        match word.as_bytes() {
            b"-t" | b"-N" => drop(rest.next()),
            [b'-', letters @ ..] if letters.iter().all(|letter| b"flnrv".contains(letter)) => {
                flags.extend_from_slice(letters);
            }
            _ => plain.push(word),
        }
    }
    (flags, plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said_as(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn words_of_mount_become_those_of_the_command() {
        let said = "/sbin/mount.fuse.ubtrfs /a.img /mnt -n -o rw,noauto,x-systemd.automount,subvol=s -t fuse.ubtrfs";
        let expected =
            said_as("ubtrfs mount -o rw,noauto,x-systemd.automount,subvol=s -- /a.img /mnt");
        assert_eq!(translated(said_as(said)), Some(expected));
        for said in ["mount.ubtrfs a b -sv", "mount.ubtrfs a b -o ,", "mount.ubtrfs -n a b"] {
            assert_eq!(translated(said_as(said)), Some(said_as("ubtrfs mount -- a b")), "{said}");
        }
        assert_eq!(translated(said_as("mount.ubtrfs a b -fn")), None);
    }

    #[test]
    fn words_of_umount_become_those_of_the_command() {
        for (said, expected) in [
            ("/sbin/umount.fuse.ubtrfs /mnt -n -t fuse.ubtrfs", "ubtrfs umount -- /mnt"),
            ("umount.ubtrfs /mnt -v -r -N /proc/7/fd/3", "ubtrfs umount -- /mnt"),
            ("umount.ubtrfs /mnt -nlf -l", "ubtrfs umount -f -l -- /mnt"),
            ("umount.ubtrfs --all", "ubtrfs umount -- --all"),
        ] {
            assert_eq!(translated(said_as(said)), Some(said_as(expected)), "{said}");
        }
    }

    #[test]
    fn namespace_is_that_of_the_helper_alone() {
        for (said, expected) in [
            ("mount.ubtrfs a b -o -N -N 7", Some("7")),
            ("umount.ubtrfs b -n -N /proc/7/fd/3 -t x", Some("/proc/7/fd/3")),
            ("umount.ubtrfs b -n", None),
            ("ubtrfs umount -N 7", None),
        ] {
            assert_eq!(namespace_in(&said_as(said)), expected.map(OsStr::new), "{said}");
        }
    }

    #[test]
    fn words_of_the_command_stay() {
        for said in ["ubtrfs mount -o ro a b", "/usr/bin/ubtrfs ls a.img -l", "x"] {
            assert_eq!(translated(said_as(said)), Some(said_as(said)));
        }
    }
}
