//! Commands at a mount: whose they are, at which mount and at which place of it they are done, and how much is said to them and by them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::place::{NOBODY, Place, wait_until};

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Another image beside that of a place, which root or the place's user mounts.
struct Another<'a> {
    place: &'a Place,
    is_root: bool,
    image: PathBuf,
    directory: PathBuf,
}

impl<'a> Another<'a> {
    fn mounted(place: &'a Place, is_root: bool) -> Self {
        let image = place.image.with_file_name("another image");
        let directory = place.image.with_file_name("another");
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        fs::create_dir(&directory).unwrap();
        if !is_root {
            for path in [&image, &directory] {
                std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let another = Self { place, is_root, image, directory };
        another.done(&["mkfs"], &[&another.image]);
        another.done(&["mount"], &[&another.image, &another.directory]);
        another
    }

    fn run(&self, words: &[&str], paths: &[&Path]) -> Output {
        let program = env!("CARGO_BIN_EXE_ubtrfs");
        let mut command = match self.is_root {
            true => Command::new(program),
            false => self.place.command(program),
        };
        command.args(words).args(paths).output().unwrap()
    }

    fn done(&self, words: &[&str], paths: &[&Path]) {
        let output = self.run(words, paths);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
    }
}

impl Drop for Another<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-q", "-l"]).arg(&self.directory).status();
    }
}

/// The control sockets of what is mounted on a directory, wherever those of user `uid` may be.
fn sockets_of(uid: u32, directory: &Path) -> Vec<PathBuf> {
    // Of somebody else's mount root is told there only.
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let place = format!(" {} ", directory.display().to_string().replace(' ', "\\040"));
    let line = table.lines().find(|line| line.contains(&place)).unwrap();
    let name = format!("{}.control", line.split(' ').nth(2).unwrap());
    let directories = match uid {
        0 => vec!["/run/ubtrfs".to_owned()],
        _ => vec![format!("/run/user/{uid}/ubtrfs"), format!("/tmp/ubtrfs-{uid}")],
    };
    let paths = directories.iter().map(|directory| Path::new(directory).join(&name));
    paths.filter(|path| path.exists()).collect()
}

/// Something else by the names of a mount's sockets, until it is dropped.
struct Replaced(Vec<PathBuf>);

impl Replaced {
    fn by(sockets: Vec<PathBuf>, put: impl Fn(&Path)) -> Self {
        for socket in &sockets {
            fs::rename(socket, socket.with_extension("away")).unwrap();
            put(socket);
        }
        Self(sockets)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        for socket in &self.0 {
            let _ = fs::rename(socket.with_extension("away"), socket);
        }
    }
}

/// Root gave a command at a mount of somebody else, who had put a link to the socket of root's own mount in the place of his: it was done
/// there, and root's subvolume was deleted.
#[test]
fn command_is_done_at_the_mount_that_is_named_or_at_none() {
    let precious = Path::new("/precious");
    for another_is_root in [true, false] {
        let Some(place) = Place::new(false) else { return };
        place.mount(&[]);
        let another = Another::mounted(&place, another_is_root);
        another.done(&["subvolume", "create"], &[&another.directory, precious]);
        let owner = if another_is_root { 0 } else { NOBODY };
        let target = sockets_of(owner, &another.directory).pop().unwrap();
        let delete = || {
            let program = env!("CARGO_BIN_EXE_ubtrfs");
            let mut command = Command::new(program);
            command.args(["subvolume", "delete"]).args([&place.directory, precious]);
            command.output().unwrap()
        };
        let assert_refused = |how: &str| {
            let output = delete();
            let is_there = another.run(&["ls"], &[&another.directory, precious]).status.success();
            assert!(is_there && !output.status.success(), "{how}: {}", said(&output));
            said(&output)
        };
        let sockets = || sockets_of(NOBODY, &place.directory);
        {
            let _link = Replaced::by(sockets(), |path| symlink(&target, path).unwrap());
            let why = assert_refused("a symbolic link");
            assert!(why.contains("socket"), "{why}");
        }
        {
            let _link = Replaced::by(sockets(), |path| fs::hard_link(&target, path).unwrap());
            let why = assert_refused("a hard link");
            let reason = if another_is_root { "user 65534" } else { "another mount" };
            assert!(why.contains(reason), "{why}");
        }
        // His own is reached as before.
        place.done(&["subvolume", "create"], &[&place.directory, precious]);
        assert!(delete().status.success());
        another.done(&["umount"], &[&another.directory]);
        place.umount();
        place.assert_clean();
    }
}

/// Where a part of a mount is to be seen, too.
struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-q", "-l"]).arg(&self.0).status();
    }
}

/// Commands asked whether all of the mount is read-only, and changed it at a place that alone is.
#[test]
fn place_that_is_read_only_is_changed_by_no_command_and_another_place_is() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = &place.directory;
    place.done(&["mkdir"], &[top, Path::new("/home")]);
    fs::write(top.join("home/file"), b"here").unwrap();
    let bound = place.image.with_file_name("bound");
    fs::create_dir(&bound).unwrap();
    let mount = |words: &[&str], paths: &[&Path]| {
        let output = Command::new("mount").args(words).args(paths).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    mount(&["--bind"], &[&top.join("home"), &bound]);
    let bound = Bound(bound);
    let bound = &bound.0;
    mount(&["-o", "remount,bind,ro"], &[bound]);
    let changes: [(&[&str], &[&str]); 8] = [
        (&["mkdir"], &["/x"]),
        (&["chmod", "777"], &[]),
        (&["touch"], &["/file"]),
        (&["truncate", "-s", "1"], &["/file"]),
        (&["subvolume", "create"], &["/x"]),
        (&["subvolume", "snapshot"], &["/", "/x"]),
        (&["property", "set"], &["/file", "compression", "zstd"]),
        (&["filesystem", "label"], &["x"]),
    ];
    for (words, paths) in changes {
        // The mode of `chmod` comes behind the image.
        let (words, paths) = match words {
            [command, mode @ ..] if *command == "chmod" => {
                (&words[..1], [mode, &["/file"]].concat())
            }
            _ => (words, paths.to_vec()),
        };
        let paths: Vec<&Path> = paths.iter().map(Path::new).collect();
        let output = place.run(words, &[&[bound.as_path()], &paths[..]].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(4), "{words:?}: {said}");
        assert!(said.contains("Read-only file system") || said.contains("read-only"), "{said}");
        assert!(said.contains("bound"), "{said}");
    }
    assert_eq!(fs::read(top.join("home/file")).unwrap(), b"here");
    assert!(!top.join("home/x").exists());
    place.done(&["filesystem", "sync"], &[bound]);
    assert_eq!(place.done(&["ls"], &[bound, Path::new("/")]), "file\n");
    place.done(&["mkdir"], &[top, Path::new("/home/x")]);
    assert!(bound.join("x").is_dir());
    let output = Command::new("umount").arg(bound).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    place.umount();
    place.assert_clean();
}

/// More than some four thousand paths, or a mebibyte of them, were not understood, and that was told as an end of the connection.
#[test]
fn commands_take_as_many_paths_as_a_command_line_holds() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    fs::write(place.directory.join("a"), b"").unwrap();
    let many: Vec<&Path> = vec![Path::new("/a"); 50_000];
    // The system lets one word be so long, with its end.
    let long = PathBuf::from(["/.".repeat((128 << 10) / 2 - 2), "/a".to_owned()].concat());
    let long: Vec<&Path> = vec![&long; 14];
    for paths in [many, long] {
        let shown = place.done(&["ls"], &[&[place.directory.as_path()], &paths[..]].concat());
        assert_eq!(shown.lines().count(), paths.len());
    }
    place.umount();
}

/// The process that serves opened the path by itself, and showed the superblock of what has that name where it was started.
#[test]
fn superblock_of_a_mount_named_by_a_relative_path_is_no_other_images() {
    let Some(place) = Place::new(true) else { return };
    let elsewhere = place.image.with_file_name("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let decoy = elsewhere.join(place.directory.file_name().unwrap());
    File::create(&decoy).unwrap().set_len(512 << 20).unwrap();
    place.done(&["mkfs", "-L", "decoy"], &[&decoy]);
    let mut server = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["mount", "-f"])
        .args([&place.image, &place.directory])
        .current_dir(&elsewhere)
        .spawn()
        .unwrap();
    wait_until("mounted", || place.is_mounted());
    wait_until("listens", || !sockets_of(0, &place.directory).is_empty());
    let name = Path::new(place.directory.file_name().unwrap());
    for path in [name, &Path::new(".").join(name), &place.directory] {
        let output = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
            .args(["inspect", "super"])
            .arg(path)
            .current_dir(place.directory.parent().unwrap())
            .output()
            .unwrap();
        let said = said(&output);
        assert!(!said.contains("decoy"), "{said}");
        assert_eq!(output.status.code(), Some(6), "{said}");
        assert!(said.contains("not mounted"), "{said}");
    }
    place.umount();
    assert!(server.wait().unwrap().success());
}

/// A directory with many long names, and a command that shows it so often.
fn shows_much(place: &Place, count: usize) -> Command {
    let names = place.directory.join("names");
    if !names.exists() {
        fs::create_dir(&names).unwrap();
        for number in 0..1000 {
            fs::write(names.join(format!("{number:0250}")), b"").unwrap();
        }
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.arg("ls").arg(&place.directory).args(vec!["/names"; count]);
    command
}

fn status_number(server: &str, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// All that a command had to say was held by the process that serves, twice at the end.
#[test]
fn long_answers_are_not_held_by_who_serves() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "cache=64M"]);
    let few = shows_much(&place, 2).output().unwrap();
    assert!(few.status.success());
    let server = place.server();
    let before_kib = status_number(&server, "VmHWM:");
    let many = shows_much(&place, 600).output().unwrap();
    assert!(many.status.success());
    let bytes = many.stdout.len();
    assert!(bytes > few.stdout.len() * 299, "{bytes}");
    let grown_kib = status_number(&server, "VmHWM:") - before_kib;
    assert!(grown_kib < 32 << 10, "the server has grown by {grown_kib} KiB for {bytes} bytes");
    place.umount();
}

/// Ticks that a process has run.
fn ticks_of(server: &str) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{server}/stat")).unwrap();
    let behind_name = stat.rsplit(')').next().unwrap();
    let numbers: Vec<&str> = behind_name.split_whitespace().collect();
    numbers[11].parse::<u64>().unwrap() + numbers[12].parse::<u64>().unwrap()
}

/// A command went on to its end for a reader who had gone away after the first line.
#[test]
fn command_ends_when_nobody_reads_on() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "busy_poll=0"]);
    let server = place.server();
    assert!(shows_much(&place, 1).output().unwrap().status.success());
    let begun = ticks_of(&server);
    assert!(shows_much(&place, 1500).stdout(Stdio::null()).status().unwrap().success());
    let whole = ticks_of(&server) - begun;
    let begun = ticks_of(&server);
    let mut child = shows_much(&place, 1500).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(child.wait().unwrap().success());
    // The next one is done when that has ended.
    place.done(&["df"], &[&place.directory]);
    let part = ticks_of(&server) - begun;
    assert!(part * 2 < whole, "{part} of {whole} ticks");
    place.umount();
}

/// Who does not answer was waited for without limit, after those who answer commands had been for a minute.
#[test]
fn umount_ends_where_who_serves_does_not_answer() {
    for has_socket in [true, false] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", "commit=3600"]);
        fs::write(place.directory.join("file"), b"written").unwrap();
        let sockets = if has_socket { Vec::new() } else { sockets_of(0, &place.directory) };
        let away = Replaced::by(sockets, |_| ());
        place.signal("-STOP");
        let mut child = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
            .arg("umount")
            .arg(&place.directory)
            .env("UBTRFS_SYNC_WAIT_SECONDS", "1")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if begun.elapsed() > Duration::from_secs(60) => break None,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        place.signal("-CONT");
        let output = child.wait_with_output().unwrap();
        let said = said(&output);
        assert_eq!(ended.and_then(|status| status.code()), Some(4), "{said}");
        assert!(said.contains("does not answer") && said.contains("umount -f"), "{said}");
        assert!(place.is_mounted());
        drop(away);
        place.umount();
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "written");
        place.assert_clean();
    }
}

/// Listens in the place of sockets, with as many waiting as it lets wait, and takes nobody.
const TAKES_NOBODY: &str = "use Socket; $| = 1; my @open; for (@ARGV) {
    for my $listens (1, 0) {
        socket(my $s, PF_UNIX, SOCK_STREAM, 0) or die $!;
        if ($listens) { bind($s, sockaddr_un($_)) && listen($s, 0) or die $! }
        else { connect($s, sockaddr_un($_)) or die $! }
        push @open, $s;
    }
} print qq(full\\n); <STDIN>";

/// Root's command opened what a user had put into the place of his image, a FIFO say, and waited at his socket for who takes nobody:
/// without end.
#[test]
fn root_waits_for_nothing_that_a_user_has_put_into_his_way() {
    let remount = ["mount", "-o", "remount,rw"];
    for (words, options, code) in
        [(&["umount", "-f"][..], "rw", 0), (&["umount"], "rw", 4), (&remount, "ro", 0)]
    {
        let Some(place) = Place::new(false) else { return };
        place.mount(&["-o", options]);
        let sockets = sockets_of(NOBODY, &place.directory);
        assert!(!sockets.is_empty());
        let away = Replaced::by(sockets.clone(), |_| ());
        let mut child = place
            .command("perl")
            .args(["-e", TAKES_NOBODY])
            .args(&sockets)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "full\n");
        fs::rename(&place.image, place.image.with_file_name("away")).unwrap();
        assert!(Command::new("mkfifo").arg(&place.image).status().unwrap().success());
        let mut root = Command::new("timeout");
        root.args(["60", env!("CARGO_BIN_EXE_ubtrfs")]).args(words);
        if words == remount {
            root.arg(&place.image);
        }
        let output = root.arg(&place.directory).env("UBTRFS_SYNC_WAIT_SECONDS", "1").output();
        let output = output.unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        drop(away);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", said(&output));
        assert_eq!(place.is_mounted(), words != ["umount", "-f"], "{words:?}");
    }
}

/// Where commands did not reach who serves, what is seen at the place was synced, which may be a part, and all was said to be durable.
#[test]
fn umount_of_a_part_says_of_no_more_that_it_is_durable_than_is() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=3600"]);
    fs::create_dir(place.directory.join("part")).unwrap();
    fs::write(place.directory.join("file"), b"elsewhere").unwrap();
    let bound = place.image.with_file_name("bound");
    fs::create_dir(&bound).unwrap();
    let bind = || {
        let mut mount = Command::new("mount");
        mount.arg("--bind").arg(place.directory.join("part")).arg(&bound);
        assert!(mount.status().unwrap().success());
        Bound(bound.clone())
    };
    let is_bound = || Command::new("mountpoint").arg("-q").arg(&bound).status().unwrap().success();
    let bound_once = bind();
    {
        let _away = Replaced::by(sockets_of(0, &place.directory), |_| ());
        let output = place.run(&["umount"], &[&bound]);
        assert_eq!(output.status.code(), Some(4), "{}", said(&output));
        assert!(said(&output).contains("only a part") && is_bound(), "{}", said(&output));
    }
    place.done(&["umount"], &[&bound]);
    assert!(!is_bound());
    drop(bound_once);
    // Of what nobody serves any more nothing is to be had.
    let _bound = bind();
    place.kill();
    let output = place.run(&["umount"], &[&bound]);
    assert!(output.status.success() && said(&output).contains("nobody served"), "{output:?}");
    assert!(!is_bound());
}

/// What is read only has nothing to be made durable, and a part of it stayed on all the same.
#[test]
fn part_of_what_only_reads_is_unmounted_though_who_serves_is_not_reached() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    fs::create_dir(place.directory.join("part")).unwrap();
    place.umount();
    let bound = place.image.with_file_name("bound");
    fs::create_dir(&bound).unwrap();
    let is_bound = || Command::new("mountpoint").arg("-q").arg(&bound).status().unwrap().success();
    // In the last two who serves can write: one place is read-only, or all of it since.
    for (options, then, can_write) in
        [("ro", "", false), ("rw", "remount,bind,ro", true), ("rw", "remount,ro", true)]
    {
        place.mount(&["-o", options]);
        let mut mount = Command::new("mount");
        mount.arg("--bind").arg(place.directory.join("part")).arg(&bound);
        assert!(mount.status().unwrap().success());
        let _bound = Bound(bound.clone());
        if !then.is_empty() {
            place.done(&["mount", "-o", then], &[&place.image, &bound]);
        }
        {
            let _away = Replaced::by(sockets_of(0, &place.directory), |_| ());
            let output = place.run(&["umount"], &[&bound]);
            assert_eq!(is_bound(), can_write, "{options}, {then}: {}", said(&output));
            assert_eq!(output.status.code(), Some(if can_write { 4 } else { 0 }), "{output:?}");
        }
        if can_write {
            place.done(&["umount"], &[&bound]);
        }
        place.umount();
    }
    place.assert_clean();
}

/// The number of who serves is none there.
#[test]
fn commands_reach_a_mount_from_where_its_process_is_not_to_be_seen() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let run = |words: &[&str], path: &str| {
        let mut command = Command::new("unshare");
        command.args(["-pf", "--mount-proc", env!("CARGO_BIN_EXE_ubtrfs")]).args(words);
        let output = command.arg(&place.directory).arg(path).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    run(&["mkdir"], "/made");
    assert_eq!(run(&["ls"], "/"), "made\n");
    place.umount();
    place.assert_clean();
}
