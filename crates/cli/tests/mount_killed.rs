//! What becomes of files when the process that serves a mount is killed beside programs that write and sync.

#[path = "support/place.rs"]
mod place;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use place::{NOBODY, Place, assert_image_clean, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use ubtrfs_testkit::{KernelMount, Prng};

const BLOCK: usize = 4096;
const MAP_BYTES: usize = 4 * BLOCK;
const WRITTEN_BYTES: usize = 8 * BLOCK;
/// Of so many rounds the files are kept.
const ROUNDS_KEPT: usize = 3;
/// So many kills more there are at most, of each half, where those that are asked for have cut too few syncs.
const FURTHER_KILLS_MAX: u64 = 6;

/// One step after the other, until the server is gone. Of each it says in a file outside of the mount that it was begun ("tried"), and that it
/// is durable by what a call answered ("done"); and in the end whether the server went while it waited for that ("cut"): a request that is
/// under way then fails with another error than one that is made afterwards.
const WRITER: &str = r#"
import os,sys,mmap,errno
from itertools import count
kind,log=sys.argv[1:3]
os.chdir(sys.argv[3])
told=os.open(log,os.O_WRONLY|os.O_CREAT|os.O_APPEND,0o644)
syncing=False
def tell(*words): os.write(told,(' '.join(map(str,words))+'\n').encode())
def text(number,length):
    word=b'%s %d.'%(kind.encode(),number)
    return (word*(length//len(word)+1))[:length]
def length(number): return 1+number*7919%6000
def synced(call,*of):
    global syncing
    syncing=True; call(*of); syncing=False
def whole(fd,data,at=None):
    # Of several requests the first may have been answered when the server goes.
    while data:
        done=os.write(fd,data) if at is None else os.pwrite(fd,data,at)
        data=data[done:]; at=None if at is None else at+done
def opened(name,flags=0): return os.open(name,os.O_RDWR|os.O_CREAT|flags,0o644)
def do_append():
    fd=opened(kind,os.O_APPEND)
    for n in count():
        tell('tried',n); whole(fd,text(n,length(n)))
        if n%4!=3: synced(os.fsync,fd); tell('done',n)
def do_replace():
    top=os.open('.',os.O_RDONLY)
    for n in count():
        tell('tried',n)
        fd=opened('new',os.O_TRUNC); whole(fd,text(n,length(n))); synced(os.fsync,fd); os.close(fd)
        os.rename('new',kind); synced(os.fsync,top); tell('done',n)
def do_map():
    bytes=4*4096
    tell('tried',0); fd=opened(kind); whole(fd,text(0,bytes)); synced(os.fsync,fd); tell('done',0)
    m=mmap.mmap(fd,bytes)
    for n in count(1): tell('tried',n); m[:]=text(n,bytes); synced(m.flush); tell('done',n)
def do_write():
    bytes=8*4096
    tell('tried',0); fd=opened(kind); whole(fd,text(0,bytes)); synced(os.fsync,fd); tell('done',0)
    for n in count(1):
        tell('tried',n); whole(fd,text(n,length(n)),n*5003%(bytes-6000)); synced(os.fdatasync,fd); tell('done',n)
def do_names():
    tops={}
    for top in ['a','b']: os.mkdir(top); tops[top]=os.open(top,os.O_RDONLY); synced(os.fsync,tops[top])
    synced(os.fsync,os.open('.',os.O_RDONLY))
    for step in count():
        tell('tried',step); n=step//3
        if step%3==0:
            fd=opened('a/%d'%n); whole(fd,text(n,length(n))); synced(os.fsync,fd); os.close(fd); synced(os.fsync,tops['a'])
        if step%3==1:
            os.rename('a/%d'%n,'b/%d'%n); synced(os.fsync,tops['b']); synced(os.fsync,tops['a'])
        if step%3==2 and n>=2:
            os.unlink('b/%d'%(n-2)); synced(os.fsync,tops['b'])
        tell('done',step)
try: globals()['do_'+kind]()
except OSError as error:
    # What Linux was just handing to a ring of the server is cancelled (`fuse_uring_send_in_task`).
    rings=os.environ.get('UBTRFS_RINGS')=='Y'
    under_way=(errno.ECONNABORTED,errno.ECANCELED) if rings else (errno.ECONNABORTED,)
    if error.errno in under_way and syncing: tell('cut')
    elif error.errno not in under_way+(errno.ENOTCONN,errno.EIO): raise
"#;

/// Writes, and never syncs.
const LOAD: &str = r#"
    bytes=$(head -c 50000 /dev/zero | tr '\0' 1)
    at=0
    while printf %s "$bytes" >"$1/load $((at % 50))"; do
        test $((at % 3)) != 0 || rm "$1/load $((at % 50))" || exit
        at=$((at + 1))
    done 2>/dev/null"#;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Append,
    Replace,
    Map,
    Write,
    Names,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Append, Self::Replace, Self::Map, Self::Write, Self::Names];

    fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Replace => "replace",
            Self::Map => "map",
            Self::Write => "write",
            Self::Names => "names",
        }
    }

    /// As the writer makes it.
    fn text(self, number: u64, len: usize) -> Vec<u8> {
        format!("{} {number}.", self.name()).into_bytes().into_iter().cycle().take(len).collect()
    }

    /// A record, or a file, of the writer's length.
    fn record(self, number: u64) -> Vec<u8> {
        self.text(number, usize::try_from(1 + number * 7919 % 6000).unwrap())
    }
}

/// What a writer said: up to which step it has come, and up to which all is durable.
#[derive(Clone, Copy, Debug)]
struct Told {
    kind: Kind,
    tried: u64,
    done: u64,
    was_cut: bool,
}

impl Told {
    fn read(kind: Kind, log: &Path) -> Self {
        let text = fs::read_to_string(log).unwrap();
        let last = |word: &str| {
            let mut of_step = text.lines().filter_map(|line| line.strip_prefix(word));
            of_step.next_back().expect("it waited for one").trim().parse().unwrap()
        };
        let was_cut = text.lines().any(|line| line == "cut");
        Self { kind, tried: last("tried "), done: last("done "), was_cut }
    }

    /// Each thing is as the last call said that was answered, or as one that was not would make it.
    fn assert_shown(&self, top: &Path) {
        let path = top.join(self.kind.name());
        let read = || fs::read(&path).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        match self.kind {
            Kind::Append => self.assert_appended(&read()),
            Kind::Replace => {
                let shown = read();
                let is_one = (self.done..=self.tried).any(|n| self.kind.record(n) == shown);
                assert!(is_one, "{self:?}: {} bytes: {:?}", shown.len(), head(&shown));
            }
            // The kernel may write a page while it is stored to.
            Kind::Map => self.assert_blocks(&read(), |step| self.kind.text(step, MAP_BYTES), 1),
            Kind::Write => self.assert_blocks(&read(), written, BLOCK),
            Kind::Names => self.assert_names(top),
        }
    }

    fn assert_appended(&self, shown: &[u8]) {
        let all = |last: u64| (0..=last).flat_map(|n| self.kind.record(n)).collect::<Vec<u8>>();
        let (least, most) = (all(self.done).len(), all(self.tried));
        assert!(shown.len() >= least, "{self:?}: {} bytes of {least}", shown.len());
        assert!(most.starts_with(shown), "{self:?}: {} bytes, others than written", shown.len());
    }

    /// Each piece is as before the step that was tried, or as after it.
    fn assert_blocks(&self, shown: &[u8], state: impl Fn(u64) -> Vec<u8>, piece_bytes: usize) {
        let (old, new) = (state(self.done), state(self.tried));
        assert_eq!(shown.len(), old.len(), "{self:?}");
        let pieces = old.chunks(piece_bytes).zip(new.chunks(piece_bytes));
        for (at, (have, (old, new))) in shown.chunks(piece_bytes).zip(pieces).enumerate() {
            assert!(have == old || have == new, "{self:?}: piece {at}: {:?}", head(have));
        }
    }

    fn assert_names(&self, top: &Path) {
        let mut shown = BTreeSet::new();
        for directory in ["a", "b"] {
            for entry in fs::read_dir(top.join(directory)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                shown.insert((directory, name.parse::<u64>().unwrap()));
            }
        }
        let (old, new) = (names_after(self.done), names_after(self.tried));
        assert!(shown == old || shown == new, "{self:?}: {shown:?}, not {old:?} or {new:?}");
        for (directory, number) in shown {
            let bytes = fs::read(top.join(directory).join(number.to_string())).unwrap();
            let was_synced = number * 3 <= self.done;
            assert!(!was_synced || bytes == self.kind.record(number), "{self:?}: file {number}");
        }
    }
}

fn head(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned()
}

/// The file that is overwritten in places, after a step.
fn written(step: u64) -> Vec<u8> {
    let mut state = Kind::Write.text(0, WRITTEN_BYTES);
    for number in 1..=step {
        let record = Kind::Write.record(number);
        let at = usize::try_from(number).unwrap() * 5003 % (WRITTEN_BYTES - 6000);
        state[at..at + record.len()].copy_from_slice(&record);
    }
    state
}

fn names_after(step: u64) -> BTreeSet<(&'static str, u64)> {
    let mut names = BTreeSet::new();
    for step in 0..=step {
        let number = step / 3;
        match step % 3 {
            0 => _ = names.insert(("a", number)),
            1 => {
                names.remove(&("a", number));
                names.insert(("b", number));
            }
            _ if number >= 2 => _ = names.remove(&("b", number - 2)),
            _ => {}
        }
    }
    names
}

/// What was written in a round: below a directory of the mount.
struct Round {
    directory: String,
    told: Vec<Told>,
}

fn assert_shown(rounds: &[Round], top: &Path) {
    for round in rounds {
        for told in &round.told {
            told.assert_shown(&top.join(&round.directory));
        }
    }
}

/// As the mount shows it. Root is not let in where another user mounted.
fn assert_mounted_shows(rounds: &[Round], place: &Place) {
    let copy = place.directory.with_file_name("logs").join("shown");
    let status = place.command("cp").arg("-r").args([&place.directory, &copy]).status();
    assert!(status.unwrap().success());
    assert_shown(rounds, &copy);
    fs::remove_dir_all(copy).unwrap();
}

/// As if the machine started with the kernel's btrfs then; in a copy, so that the next mount of ours finds what was left.
fn assert_kernel_recovers(image: &Path, rounds: &[Round]) {
    let copy = image.with_extension("copy");
    let status = Command::new("cp").arg("--sparse=always").args([image, &copy]).status().unwrap();
    assert!(status.success());
    let kernel = KernelMount::read_write(&copy, "");
    assert_shown(rounds, kernel.path());
    kernel.unmount();
    assert_image_clean(&copy);
    fs::remove_file(copy).unwrap();
}

/// Killed under load, again and again, at any moment: what was synced is there, for the kernel, too, what was under way is as before or after,
/// and both checkers find nothing. UBTRFS_KILLS says how often; half of it is of a mount of root, half of somebody else's, and half
/// of these commit each second and have all that write at once.
#[test]
fn process_that_is_killed_loses_nothing_that_was_synced() {
    let kills = std::env::var("UBTRFS_KILLS").map_or(4, |count| count.parse::<u64>().unwrap());
    let mut prng = Prng::of_test(1);
    let mut cut_count = 0;
    for (is_root, kills) in [(true, kills.div_ceil(2)), (false, kills / 2)] {
        let Some(place) = Place::new(is_root) else { return };
        let logs = place.directory.with_file_name("logs");
        fs::create_dir(&logs).unwrap();
        if !is_root {
            chown(&logs, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let mut rounds: Vec<Round> = Vec::new();
        let mut cut_here = 0;
        for number in 0..kills + FURTHER_KILLS_MAX {
            // Which of them cut a sync is chance: others follow as long as too few have.
            if number >= kills && cut_here * 4 >= kills {
                break;
            }
            let commits = number % 2 == 0;
            place.mount(if commits { &["-o", "commit=1"] } else { &[] });
            assert_mounted_shows(&rounds, &place);
            if rounds.len() == ROUNDS_KEPT {
                let old = place.directory.join(rounds.remove(0).directory);
                assert!(place.command("rm").arg("-r").arg(old).status().unwrap().success());
            }
            // Commits by time fall into the longer ones.
            let delay = Duration::from_millis(prng.below(if commits { 1500 } else { 300 }));
            // What one syncs may make durable what another one did not: so one is alone, too.
            let alone = Kind::ALL[prng.index(Kind::ALL.len())];
            let kinds = if commits { Kind::ALL.to_vec() } else { vec![alone] };
            let round = kill_under_load(&place, number, &kinds, &logs, delay);
            let cut: Vec<&Told> = round.told.iter().filter(|told| told.was_cut).collect();
            println!("root {is_root}, round {number}, {kinds:?}, {delay:?}, syncs cut: {cut:?}");
            cut_here += u64::from(!cut.is_empty());
            rounds.push(round);
            place.assert_clean();
            assert_kernel_recovers(&place.image, &rounds);
        }
        cut_count += cut_here;
        place.mount(&[]);
        assert_mounted_shows(&rounds, &place);
        let shown = listed(place.command("sh"), &place.directory);
        place.umount();
        place.assert_clean();
        let kernel = KernelMount::read_only(&place.image, "");
        assert_shown(&rounds, kernel.path());
        assert_eq!(listed(Command::new("sh"), kernel.path()), shown);
    }
    // Most do here; how many depends on the machine.
    assert!(cut_count * 4 >= kills, "of {kills} kills {cut_count} fell while a sync was under way");
}

/// Kills the process that serves while programs write.
fn kill_under_load(
    place: &Place,
    number: u64,
    kinds: &[Kind],
    logs: &Path,
    delay: Duration,
) -> Round {
    let directory = format!("round {number}");
    let top = place.directory.join(&directory);
    // Durable itself, as its name is in a directory that none of the writers syncs.
    let make = r#"mkdir "$1" && sync "$1" "$1/..""#;
    let status = place.command("sh").args(["-c", make, "sh"]).arg(&top).status();
    assert!(status.unwrap().success());
    let log = |kind: Kind| logs.join(format!("{} {number}", kind.name()));
    let started = kinds.iter().map(|kind| (*kind, writer(place, *kind, &log(*kind), &top)));
    let mut writers: Vec<(Kind, Child)> = started.collect();
    let mut load = place.command("sh");
    let mut load = load.args(["-c", LOAD, "sh"]).arg(&top).stderr(Stdio::null()).spawn().unwrap();
    let has_done =
        |kind: &Kind| fs::read_to_string(log(*kind)).is_ok_and(|text| text.contains("done"));
    wait_until("all have synced something", || kinds.iter().all(has_done));
    let server = Pid::from_raw(place.server().parse().unwrap()).unwrap();
    std::thread::sleep(delay);
    for (kind, writer) in &mut writers {
        assert_eq!(writer.try_wait().unwrap(), None, "{kind:?}: nothing is written");
    }
    assert_eq!(load.try_wait().unwrap(), None, "nothing is written");
    kill_process(server, Signal::KILL).unwrap();
    // While it is mounted: what lies below would take what they write.
    load.wait().unwrap();
    let told = writers.into_iter().map(|(kind, mut writer)| {
        let status = writer.wait().unwrap();
        // A map of what is gone.
        let is_bus_error = status.signal() == Some(Signal::BUS.as_raw());
        assert!(status.success() || (kind == Kind::Map && is_bus_error), "{kind:?}: {status}");
        Told::read(kind, &log(kind))
    });
    let told = told.collect();
    assert!(Command::new("umount").arg("-l").arg(&place.directory).status().unwrap().success());
    File::open(&place.image).unwrap().lock_shared().unwrap();
    Round { directory, told }
}

fn writer(place: &Place, kind: Kind, log: &PathBuf, top: &PathBuf) -> Child {
    let mut command = place.command("python3");
    // Root's own, which stands before it where there is one, is not for others.
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("/usr/bin:{path}"));
    command.args(["-c", WRITER, kind.name()]).args([log, top]).spawn().unwrap()
}

/// What there is, with its attributes and the sums of its bytes.
fn listed(mut shell: Command, directory: &Path) -> String {
    let script = r#"cd "$1" && find . -mindepth 1 -printf '%p %y %m %U %G %s %n %T@\n' | LC_ALL=C sort &&
        find . -type f -exec sha256sum {} + | LC_ALL=C sort"#;
    let output = shell.args(["-c", script, "sh"]).arg(directory).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
