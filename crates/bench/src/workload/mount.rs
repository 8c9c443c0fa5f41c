//! What users do on a mount: ours, the kernel's, those of other FUSE filesystems, and of a server that does nothing.

mod requests;

use std::path::{Path, PathBuf};
use std::process::Command;

use ubtrfs_testkit::command;

use super::{Context, run_job, verdict, verdict_at_least};
use crate::chart::{Bar, Chart, Shape};
use crate::child::{self, Usage};
use crate::contest::{Contestant, Series, alternate};
use crate::error::{Error, Result};
use crate::machine::touch_memory;
use crate::peer::{Mounted, Peer};
use crate::report::{Cell, Table};

/// Files of the tree at full scale: the others take a second a thousand of them.
const TREE_FILES: u64 = 12_000;
/// How often the tree is walked in one measurement.
const WALKS: u64 = 5;
const FSMARK_THREADS: u64 = 2;
/// Empty files a thread.
const FSMARK_FILES: u64 = 50_000;
/// Where each one takes time for each that is there: all would take most of an hour.
const FSMARK_FILES_LINEAR_MAX: u64 = 5_000;
const SEQUENTIAL_MIB: u64 = 1024;
/// Data in a file of 32 MiB.
const SEEK_EXTENTS: u64 = 4096;
/// An archive holds at least this share of the bytes that went in.
const OUTPUT_SHARE_MIN: f64 = 0.99;

/// What is done on the mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Job {
    Untar,
    TarBack,
    Stat,
    List,
    FsMark,
    Remove,
    Seek,
    Write,
    Read,
    Random,
}

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    /// Each takes so many microseconds.
    Micros(&'static str),
    MibPerSecond,
}

impl Job {
    /// In the order in which they are done.
    const ALL: [Self; 10] = [
        Self::Untar,
        Self::TarBack,
        Self::Stat,
        Self::List,
        Self::FsMark,
        Self::Remove,
        Self::Seek,
        Self::Write,
        Self::Read,
        Self::Random,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Untar => "untar",
            Self::TarBack => "tar back, warm",
            Self::Stat => "stat, warm",
            Self::List => "readdir, warm",
            Self::FsMark => "fs_mark",
            Self::Remove => "remove",
            Self::Seek => "seek",
            Self::Write => "write",
            Self::Read => "read",
            Self::Random => "random 4 KiB reads, cached",
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::Untar | Self::TarBack | Self::Stat | Self::FsMark | Self::Remove => {
                Unit::Micros("µs a file")
            }
            Self::List => Unit::Micros("µs an entry"),
            Self::Seek => Unit::Micros("µs a seek"),
            Self::Random => Unit::Micros("µs a read"),
            Self::Write | Self::Read => Unit::MibPerSecond,
        }
    }
}

/// What one job took.
#[derive(Clone, Copy, Debug)]
struct Figure {
    job: Job,
    count: u64,
    wall_s: f64,
    /// Of who asks, not of who serves.
    cpu_s: f64,
    /// A syncfs behind it, not counted in the others.
    sync_s: Option<f64>,
}

/// One contestant's, in one round.
#[derive(Clone, Debug, Default)]
struct Round {
    figures: Vec<Figure>,
    /// Whether SEEK_HOLE and SEEK_DATA found what there is.
    tells_holes: bool,
    failures: Vec<String>,
}

/// What the contestants get.
struct Work {
    archive: PathBuf,
    file_count: u64,
    bytes: u64,
}

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let mut table = Table::new("mount", String::new(), &COLUMNS);
    if let Err(missing) = Peer::Ubtrfs.available() {
        "mount: nothing can be mounted".clone_into(&mut table.title);
        table.note(format!("Left out: {missing}."));
        return Ok(vec![table]);
    }
    let work = prepare(context)?;
    table.title = format!(
        "mount: {} files, {} MB from a tar archive and back; {} empty files by two threads; {} MiB by 1 MiB; \
         4 KiB of data at each 8 KiB; on {}, {} rounds",
        work.file_count,
        work.bytes / 1_000_000,
        FSMARK_THREADS * context.scaled(FSMARK_FILES),
        context.scaled(SEQUENTIAL_MIB),
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut contestants = Vec::new();
    let mut missing = Vec::new();
    for peer in Peer::ALL {
        match available(context, peer) {
            Ok(()) => {
                let work = &work;
                contestants.push(Contestant::new(peer.name(), move || round(context, peer, work)));
            }
            Err(why) => missing.push(format!("{} is left out: {why}.", peer.name())),
        }
    }
    let series = alternate(contestants, context.options.round_count)?;
    let requests = requests::tables(context, &work)?;
    std::fs::remove_file(&work.archive).map_err(Error::io("remove the archive"))?;
    push(&mut table, &series);
    table.charts = vec![chart(&series)];
    note(&mut table, &series);
    missing.into_iter().for_each(|note| table.note(note));
    Ok([table].into_iter().chain(requests).collect())
}

fn available(context: &Context<'_>, peer: Peer) -> std::result::Result<(), String> {
    if peer != Peer::Ubtrfs && !context.options.with_kernel {
        return Err("on request".to_owned());
    }
    peer.available()
}

/// An archive of a share of the tree.
fn prepare(context: &Context<'_>) -> Result<Work> {
    let all = context.source()?;
    let share = context.scaled(TREE_FILES) as f64 / all.file_count as f64;
    let part = context.scratch.path("part");
    let sampled = if share < 1.0 { Some(all.sample(share, &part)?) } else { None };
    let tree = sampled.as_ref().unwrap_or(all);
    let archive = context.scratch.path("archive.tar");
    let mut tar = command("tar");
    child::run(tar.arg("cf").arg(&archive).arg("-C").arg(&tree.directory).arg("."))?;
    let work = Work { archive, file_count: tree.file_count, bytes: tree.bytes };
    if sampled.is_some() {
        std::fs::remove_dir_all(&part).map_err(Error::io("remove a directory"))?;
    }
    Ok(work)
}

/// All jobs on a new filesystem. A peer that cannot do one has no figure for it.
fn round(context: &Context<'_>, peer: Peer, work: &Work) -> Result<Round> {
    let (options, scratch) = (context.options, context.scratch);
    peer.make(options, scratch)?;
    let mut mounted = peer.mount(options, scratch)?;
    let mut round = Round::default();
    for job in Job::ALL {
        if peer == Peer::BindfsAsked && job != Job::Seek {
            continue;
        }
        if job == Job::Read {
            if !peer.keeps_data() {
                continue;
            }
            // What the kernel keeps of a mount goes with it.
            mounted.end()?;
            mounted = peer.mount(options, scratch)?;
        }
        match perform(context, peer, job, &mounted, work, &mut round) {
            Ok(figure) => round.figures.push(figure),
            Err(error) if peer.is_ours() => return Err(error),
            Err(error) => round.failures.push(format!("{}, {}: {error}", peer.name(), job.name())),
        }
    }
    mounted.end()?;
    if peer.is_ours() {
        // A wrong image is no result.
        context.check("image", work.file_count)?;
    }
    peer.clear(scratch)?;
    Ok(round)
}

fn perform(
    context: &Context<'_>,
    peer: Peer,
    job: Job,
    mounted: &Mounted,
    work: &Work,
    round: &mut Round,
) -> Result<Figure> {
    let top = mounted.path();
    let tree = top.join("tree");
    let mib = context.scaled(SEQUENTIAL_MIB);
    let files_max = if peer == Peer::Fuse2fs { FSMARK_FILES_LINEAR_MAX } else { u64::MAX };
    let files = context.scaled(FSMARK_FILES).min(files_max);
    let threads = FSMARK_THREADS.to_string();
    let sequential = top.join("sequential");
    if matches!(job, Job::Untar | Job::Write | Job::Read) {
        // For the image, the server and the kernel.
        touch_memory(3 * mib);
    }
    match job {
        Job::Untar => untar(context, work, &tree),
        Job::TarBack => {
            // Once more than is counted, so that what can be cached is.
            tar_back(&tree, work)?;
            let usage = tar_back(&tree, work)?;
            Ok(Figure::of_usage(job, work.file_count, usage))
        }
        Job::Stat => figure(job, on(context, "walk", &tree, WALKS, &["--phase", "stat"]), "stat"),
        Job::List => figure(job, on(context, "walk", &tree, WALKS, &["--phase", "list"]), "list"),
        Job::FsMark => {
            let marks = directory(&top, "fs_mark")?;
            figure(job, on(context, "files", &marks, files, &["--threads", &threads]), "create")
        }
        Job::Remove => {
            let arguments = ["--threads", &threads, "--phase", "remove"];
            figure(job, on(context, "files", &top.join("fs_mark"), files, &arguments), "remove")
        }
        Job::Seek => {
            let seeks = directory(&top, "seek")?;
            let mut command = on(context, "seek", &seeks, SEEK_EXTENTS, &["--phase", "places"]);
            let run = run_job(&mut command)?;
            round.tells_holes = run.outcome.count("seek", "told") == Some(2 * SEEK_EXTENTS);
            Figure::told(job, &run, "seek")
        }
        Job::Write => {
            directory(&top, "sequential")?;
            figure(job, on(context, "sequential", &sequential, mib, &["--phase", "make"]), "write")
        }
        Job::Read => {
            figure(job, on(context, "sequential", &sequential, mib, &["--phase", "look"]), "read")
        }
        Job::Random => {
            let command = on(context, "sequential", &sequential, mib, &["--phase", "random"]);
            figure(job, command, "random")
        }
    }
}

/// A job through system calls.
fn on(context: &Context<'_>, job: &str, path: &Path, count: u64, arguments: &[&str]) -> Command {
    let mut command = context.job(job);
    command.arg(path).arg(count.to_string()).arg("--system").args(arguments);
    command
}

fn directory(top: &Path, name: &str) -> Result<PathBuf> {
    let path = top.join(name);
    std::fs::create_dir(&path).map_err(Error::io(format!("make {}", path.display())))?;
    Ok(path)
}

fn figure(job: Job, mut command: Command, what: &str) -> Result<Figure> {
    Figure::told(job, &run_job(&mut command)?, what)
}

impl Figure {
    /// Seconds of one.
    fn each_s(&self) -> f64 {
        self.wall_s / self.count.max(1) as f64
    }

    fn told(job: Job, run: &super::JobRun, what: &str) -> Result<Self> {
        let timing = run.outcome.all(what).next();
        let timing = super::files::told(timing, what)?;
        let sync_s = run.outcome.all("commit").next().map(|sync| sync.wall_ns as f64 / 1e9);
        let (wall_s, cpu_s) = (timing.wall_ns as f64 / 1e9, timing.cpu_ns as f64 / 1e9);
        Ok(Self { job, count: timing.count, wall_s, cpu_s, sync_s })
    }

    fn of_usage(job: Job, count: u64, usage: Usage) -> Self {
        let (wall_s, cpu_s) = (usage.wall.as_secs_f64(), usage.cpu.as_secs_f64());
        Self { job, count, wall_s, cpu_s, sync_s: None }
    }
}

fn untar(context: &Context<'_>, work: &Work, tree: &Path) -> Result<Figure> {
    std::fs::create_dir(tree).map_err(Error::io("make a directory"))?;
    let usage =
        child::run(command("tar").arg("xf").arg(&work.archive).arg("-C").arg(tree).arg("."))?;
    let synced = run_job(&mut on(context, "walk", tree, 1, &["--phase", "sync"]))?;
    let sync_s = Some(synced.outcome.wall_s("sync"));
    Ok(Figure { sync_s, ..Figure::of_usage(Job::Untar, work.file_count, usage) })
}

fn tar_back(tree: &Path, work: &Work) -> Result<Usage> {
    let usage = child::run_into_pipe(command("tar").args(["cf", "-", "-C"]).arg(tree).arg("."))?;
    if (usage.output_bytes as f64) < work.bytes as f64 * OUTPUT_SHARE_MIN {
        let what = format!("{} bytes came out of {}", usage.output_bytes, work.bytes);
        return Err(Error::Input { what });
    }
    Ok(usage)
}

const COLUMNS: [(&str, &str); 9] = [
    ("job", "job"),
    ("who", "who"),
    ("count", "count"),
    ("wall_s", "wall s"),
    ("times_ours", "× ours"),
    ("each", "each"),
    ("unit", "unit"),
    ("sync_s", "syncfs s"),
    ("cpu_s", "CPU s"),
];

/// The middle one of the rounds in which the job was done; of an even number, the slower of the middle two, as one round has to be chosen.
fn median(series: &Series<Round>, job: Job) -> Option<Figure> {
    let all = series.rounds.iter().flat_map(|round| &round.figures);
    let mut done: Vec<Figure> = all.filter(|figure| figure.job == job).copied().collect();
    done.sort_by(|a, b| a.wall_s.total_cmp(&b.wall_s));
    done.get(done.len() / 2).copied()
}

fn push(table: &mut Table, series: &[Series<Round>]) {
    let Some(ours) = series.first() else { return };
    for job in Job::ALL {
        for one in series {
            let Some(figure) = median(one, job) else { continue };
            let times = median(ours, job).map(|ours| figure.each_s() / ours.each_s());
            let (each, unit) = match job.unit() {
                Unit::Micros(unit) => (Cell::Micros(figure.each_s() * 1e6), unit),
                Unit::MibPerSecond => {
                    (Cell::Count((1.0 / figure.each_s()).round() as u64), "MiB/s")
                }
            };
            table.push(vec![
                Cell::text(job.name()),
                Cell::text(&one.name),
                Cell::Count(figure.count),
                Cell::Precise(figure.wall_s),
                times.map_or(Cell::Missing, Cell::Ratio),
                each,
                Cell::text(unit),
                figure.sync_s.map_or(Cell::Missing, Cell::Precise),
                Cell::Precise(figure.cpu_s),
            ]);
        }
    }
}

fn chart(series: &[Series<Round>]) -> Chart {
    let bars = |job: Job| {
        let ours = median(&series[0], job)?.each_s();
        let bar = |one: &Series<Round>| {
            Some(Bar { label: one.name.clone(), value: median(one, job)?.each_s() / ours })
        };
        Some((job.name().to_owned(), series.iter().filter_map(bar).collect()))
    };
    Chart {
        title: "Time of each job against ubtrfs, shorter is better".to_owned(),
        unit: "× ubtrfs".to_owned(),
        shape: Shape::Bars(Job::ALL.into_iter().filter_map(bars).collect()),
        goal: None,
    }
}

/// How a goal is set.
#[derive(Clone, Copy)]
enum Goal {
    /// Our time is at most so many times theirs.
    TimeMax(f64),
    /// Our speed is at least so many times theirs.
    SpeedMin(f64),
}

const GOALS: [(Job, Peer, Goal); 14] = [
    (Job::Untar, Peer::Bindfs, Goal::TimeMax(0.25)),
    (Job::Untar, Peer::Fuse2fs, Goal::TimeMax(0.25)),
    (Job::Untar, Peer::Ntfs3g, Goal::TimeMax(0.25)),
    (Job::Untar, Peer::KernelBtrfs, Goal::TimeMax(4.0)),
    (Job::TarBack, Peer::Bindfs, Goal::TimeMax(0.3)),
    (Job::Stat, Peer::KernelBtrfs, Goal::SpeedMin(0.9)),
    (Job::List, Peer::KernelBtrfs, Goal::SpeedMin(0.9)),
    (Job::FsMark, Peer::Bindfs, Goal::SpeedMin(1.4)),
    (Job::FsMark, Peer::Floor, Goal::SpeedMin(0.75)),
    (Job::Seek, Peer::Bindfs, Goal::TimeMax(0.5)),
    (Job::Seek, Peer::BindfsAsked, Goal::TimeMax(0.5)),
    (Job::Write, Peer::KernelBtrfs, Goal::SpeedMin(0.6)),
    (Job::Read, Peer::KernelBtrfs, Goal::SpeedMin(0.8)),
    (Job::Random, Peer::KernelBtrfs, Goal::SpeedMin(0.9)),
];

fn note(table: &mut Table, series: &[Series<Round>]) {
    for (job, peer, goal) in GOALS {
        let theirs = series.iter().find(|one| one.name == peer.name());
        let what = format!("{} against {}", job.name(), peer.name());
        let (Some(ours), Some(theirs)) =
            (median(&series[0], job), theirs.and_then(|theirs| median(theirs, job)))
        else {
            table.note(format!("Goal, {what}: not judged, as there is no figure of both."));
            continue;
        };
        table.note(match goal {
            Goal::TimeMax(goal) => {
                verdict(&what, ours.each_s() / theirs.each_s(), goal, "times its time")
            }
            Goal::SpeedMin(goal) => {
                verdict_at_least(&what, theirs.each_s() / ours.each_s(), goal, "times its speed")
            }
        });
    }
    for one in series {
        let sought = median(one, Job::Seek).is_some();
        if sought && one.rounds.iter().any(|round| !round.tells_holes) {
            table.note(format!(
                "{} does not tell holes: for SEEK_DATA and SEEK_HOLE the kernel looks at the file's size only, and asks \
                 nobody where it knows that.",
                one.name
            ));
        }
        let mut failures: Vec<&String> =
            one.rounds.iter().flat_map(|round| &round.failures).collect();
        failures.dedup();
        for failure in failures {
            table.note(format!("Not done: {failure}."));
        }
    }
    table.note(
        "Each on a new filesystem, all jobs one after the other. × ours: time of one file, seek, read or MiB; fuse2fs gets \
         10,000 empty files at most, as it searches all of a directory for each. Write: with its fsync. Read: after mounting anew; the \
         floor keeps nothing that could be read then. Warm: after once that is not counted. syncfs: behind the job, not \
         counted in it; the kernel does not hand it on to FUSE servers that mount as these do, so fsync of the top directory follows. CPU: of the program that asks, in user space and in system calls, not of the server. The floor is a \
         FUSE server that does nothing: it keeps names and attributes, and all data reads as zeros.",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_two_rounds_is_the_slower_one() {
        let round = |wall_s: f64| {
            let usage =
                Usage { wall: std::time::Duration::from_secs_f64(wall_s), ..Usage::default() };
            Round { figures: vec![Figure::of_usage(Job::Untar, 1, usage)], ..Round::default() }
        };
        let rounds = |walls: &[f64]| Series {
            name: "who".to_owned(),
            rounds: walls.iter().copied().map(round).collect(),
        };
        let wall_s = |walls: &[f64]| median(&rounds(walls), Job::Untar).map(|figure| figure.wall_s);
        assert_eq!(wall_s(&[2.0, 1.0]), Some(2.0));
        assert_eq!(wall_s(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(wall_s(&[]), None);
    }
}
