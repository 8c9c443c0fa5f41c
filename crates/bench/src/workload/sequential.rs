//! A large file written and read from its beginning to its end, by calls of several sizes: beside a plain file where the image lies,
//! and the kernel's filesystems; and compressed.

use std::path::{Path, PathBuf};

use ubtrfs_engine::CACHE_BYTES_DEFAULT;

use super::Context;
use super::files::{self, Kept};
use crate::chart::{Bar, Chart, Shape};
use crate::contest::{Contestant, Series, alternate};
use crate::error::{Error, Result};
use crate::mount::{Kernel, Setup};
use crate::report::{Cell, Table};

const MIB: u64 = 4096;
const OURS: &str = "ubtrfs";
const PLAIN: &str = "plain file";
const SHARE_OF_PLAIN_MIN: f64 = 0.8;
const TIMES_KERNEL_ZSTD_MIN: f64 = 1.5;
const PHASES: [&str; 2] = ["make", "look"];
/// Of sources, as long as of the text: further than any compression looks back.
const CONTENTS_BYTES: usize = 64 << 20;
const ZSTD: &str = "compress=zstd:1";
/// Names of jobs.
const TO_WHOLE_PAGES: &str = "plain to whole pages";
const COPY: &str = "copy";
const PACKED: &str = "zstd:1";
const OF_SOURCES: &str = "zstd:1 of sources";
/// What is stored of the same file may differ by such a share of it, or by so much, which is that of trees.
const STORED_SHARE_MAX: f64 = 0.1;
const STORED_BYTES_MAX: f64 = 4_194_304.0;
/// Where what is read goes to, as with cp.
const WHOLE_PAGES: &str = "--whole-pages";
/// Names of jobs, and what tells them. What a call takes decides whether what is written goes by memory: whole MiB behind what memory keeps
/// do not.
const OTHER_CALLS: [(&str, &[&str]); 3] = [
    (TO_WHOLE_PAGES, &[WHOLE_PAGES]),
    ("plain by 64 KiB", &["--chunk-kib", "64"]),
    ("plain by 4 KiB", &["--chunk-kib", "4"]),
];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let mib = context.scaled(MIB);
    let title = format!(
        "sequential: {mib} MiB of text, or of sources, written by 1 MiB, or as told, and made durable, then read after reopening; on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let columns = [
        ("job", "job"),
        ("who", "who"),
        ("write_s", "write s"),
        ("write_min_s", "min"),
        ("write_max_s", "max"),
        ("write_times_ours", "× ours"),
        ("write_cpu_s", "CPU s"),
        ("write_mib_per_s", "MiB/s"),
        ("read_s", "read s"),
        ("read_min_s", "min"),
        ("read_max_s", "max"),
        ("read_times_ours", "× ours"),
        ("read_cpu_s", "CPU s"),
        ("read_mib_per_s", "MiB/s"),
        ("device_writes", "device writes"),
        ("device_reads", "device reads"),
        ("stored_bytes", "MiB stored"),
        ("peak_bytes", "peak MiB"),
    ];
    let mut table = Table::new("sequential", title, &columns);
    let mut jobs = Vec::new();
    let done = measure_all(context, mib, &mut jobs);
    for (job, series) in &jobs {
        push(&mut table, job, mib, series);
    }
    table.charts = ["write", "read"].map(|what| chart(what, mib, &jobs)).to_vec();
    note(context, &mut table, &jobs);
    let tables = vec![table, counts(&jobs)];
    match done {
        Ok(()) => Ok(tables),
        Err(source) if jobs.is_empty() => Err(source),
        Err(source) => Err(Error::Unfinished { tables, source: Box::new(source) }),
    }
}

/// Does one job behind the other. Where one fails, `jobs` has those before it.
fn measure_all(context: &Context<'_>, mib: u64, jobs: &mut Vec<Job>) -> Result<()> {
    jobs.push(("plain", measure(context, mib, "", &[], &[])?));
    for (job, all) in OTHER_CALLS {
        jobs.push((job, measure(context, mib, "", &[], all)?));
    }
    jobs.push((COPY, copies(context, mib)?));
    // How long the library takes depends on what it is given, and what all else takes does not.
    let contents = contents(context)?;
    for (job, all) in [(PACKED, &[][..]), (OF_SOURCES, &["--contents", &contents])] {
        let series = measure(context, mib, ZSTD, &["--compress", "1"], all)?;
        require_as_much_stored(job, &series)?;
        jobs.push((job, series));
    }
    Ok(())
}

/// What is done, and what came of it.
type Job = (&'static str, Vec<Series<Kept>>);

/// Where the contents lie that are sources.
fn contents(context: &Context<'_>) -> Result<String> {
    let path = context.scratch.path("contents");
    let contents = context.source()?.contents(CONTENTS_BYTES)?;
    std::fs::write(&path, contents).map_err(Error::io("write the contents"))?;
    let path = path.into_os_string().into_string();
    path.map_err(|_| Error::Input { what: "a scratch directory that is no UTF-8".to_owned() })
}

/// What does not depend on the machine, of ours.
fn counts(jobs: &[Job]) -> Table {
    let mut table = files::counts_table(
        "sequential_counts",
        "sequential: what was done, whatever the machine",
        ("job", "job"),
    );
    let done = ["write", "read"].map(str::to_owned);
    for (job, series) in jobs {
        for one in series {
            files::push_counts(&mut table, &Cell::text(*job), one, &done);
        }
    }
    table
}

/// A plain file copied into an image, and out of it to another; beside a plain file copied twice.
fn copies(context: &Context<'_>, mib: u64) -> Result<Vec<Series<Kept>>> {
    let source = new_directory(context, "source")?;
    let mut command = context.job("sequential");
    command.arg(&source).arg(mib.to_string()).args(["--system", "--phase", "make"]);
    Kept::default().add(&mut command)?;
    let ours = Contestant::new(OURS, || {
        let kept = copy(context, mib, &context.scratch.absent("image")?, false, &source)?;
        context.check("image", 1)?;
        context.scratch.absent("image")?;
        Ok(kept)
    });
    let plain = Contestant::new(PLAIN, || {
        copy(context, mib, &new_directory(context, "plain")?, true, &source)
    });
    let series = alternate(vec![ours, plain], context.options.round_count)?;
    for name in ["source", "plain", "other"] {
        new_directory(context, name)?;
    }
    Ok(series)
}

fn copy(
    context: &Context<'_>,
    mib: u64,
    path: &Path,
    is_plain: bool,
    source: &Path,
) -> Result<Kept> {
    let other = new_directory(context, "other")?;
    let mut kept = Kept::on_touched_memory(mib);
    for (phase, plain) in [("into", source), ("out", &other)] {
        let mut command = context.job("sequential");
        command.arg(path).arg(mib.to_string()).args(["--phase", phase, "--plain"]).arg(plain);
        command.arg(WHOLE_PAGES).args(is_plain.then_some("--system"));
        kept.add(&mut command)?;
    }
    Ok(kept)
}

/// An empty one.
fn new_directory(context: &Context<'_>, name: &str) -> Result<PathBuf> {
    let path = context.scratch.path(name);
    if path.exists() {
        std::fs::remove_dir_all(&path).map_err(Error::io("remove a directory"))?;
    }
    std::fs::create_dir(&path).map_err(Error::io("make a directory"))?;
    Ok(path)
}

fn measure<'a>(
    context: &'a Context<'_>,
    mib: u64,
    options: &'a str,
    ours: &'a [&'a str],
    all: &'a [&'a str],
) -> Result<Vec<Series<Kept>>> {
    let add = move |phase: &str, job: &mut std::process::Command| {
        job.args(["--phase", phase]).args(ours).args(all);
    };
    let mut contestants =
        vec![Contestant::new(OURS, move || files::ours(context, "sequential", mib, add, &PHASES))];
    if options.is_empty() {
        contestants.push(Contestant::new(PLAIN, move || plain_file(context, mib, all)));
    }
    for kernel in files::kernels(context) {
        if !options.is_empty() && kernel == Kernel::Xfs {
            continue;
        }
        let setup = Setup { options, ..Setup::default() };
        contestants.push(Contestant::new(kernel.name(), move || {
            files::theirs(context, kernel, setup, ("sequential", mib), all, &PHASES)
        }));
    }
    alternate(contestants, context.options.round_count)
}

/// The same calls on a file that lies where the images do.
fn plain_file(context: &Context<'_>, mib: u64, all: &[&str]) -> Result<Kept> {
    let directory = new_directory(context, "plain")?;
    let mut kept = Kept::on_touched_memory(mib);
    for phase in PHASES {
        let mut command = context.job("sequential");
        command.arg(&directory).arg(mib.to_string()).args(["--system", "--phase", phase]);
        command.args(all);
        kept.add(&mut command)?;
    }
    std::fs::remove_dir_all(&directory).map_err(Error::io("remove a directory"))?;
    Ok(kept)
}

fn seconds(series: &Series<Kept>, what: &str) -> f64 {
    series.median(|run| run.outcome.wall_s(what))
}

/// How many times as fast as another ours is.
fn times(series: &[Series<Kept>], who: &str, what: &str) -> Option<f64> {
    let other = series.iter().find(|one| one.name == who)?;
    Some(seconds(other, what) / seconds(&series[0], what))
}

fn push(table: &mut Table, job: &str, mib: u64, series: &[Series<Kept>]) {
    let Some(ours) = series.first() else { return };
    for one in series {
        let first = one.rounds.first();
        let count = |done: &str, what: &str| {
            let count = first.and_then(|run| run.outcome.count(done, what));
            count.map_or(Cell::Missing, Cell::Count)
        };
        let mut row = vec![Cell::text(job), Cell::text(&one.name)];
        for what in ["write", "read"] {
            row.extend(files::times(one, ours, what, Cell::Seconds));
            row.push(rate(mib, seconds(one, what)));
        }
        row.push(count("write", "device writes"));
        row.push(count("read", "device reads"));
        // What is not compressed is stored as it is.
        let stored = if job.starts_with(PACKED) { stored_bytes(one) } else { f64::NAN };
        row.push(if stored > 0.0 { Cell::Bytes(stored.round() as u64) } else { Cell::Missing });
        row.push(Cell::Bytes(one.rounds.iter().map(|run| run.peak_bytes).max().unwrap_or(0)));
        table.push(row);
    }
}

/// The median of all rounds.
fn stored_bytes(series: &Series<Kept>) -> f64 {
    series.median(|run| run.stored_bytes.map_or(f64::NAN, |bytes| bytes as f64))
}

/// Who finds that a file cannot be compressed, and stores it as it is, is the faster for it: times of unlike images compare nothing.
///
/// # Errors
/// If the kernel's image took more or less than ours.
fn require_as_much_stored(job: &str, series: &[Series<Kept>]) -> Result<()> {
    let of = |name: &str| series.iter().find(|one| one.name == name).map(stored_bytes);
    let (Some(ours), Some(theirs)) = (of(OURS), of(Kernel::Btrfs.name())) else { return Ok(()) };
    let may_differ = (theirs * STORED_SHARE_MAX).max(STORED_BYTES_MAX);
    if (ours - theirs).abs() <= may_differ {
        return Ok(());
    }
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    Err(Error::Input {
        what: format!(
            "{job}: {:.1} MiB are stored by {OURS} and {:.1} MiB by {}, which differ by more than {:.0} %: one of them did not \
             compress as the other did",
            mib(ours),
            mib(theirs),
            Kernel::Btrfs.name(),
            STORED_SHARE_MAX * 100.0,
        ),
    })
}

/// MiB a second.
fn rate(mib: u64, seconds: f64) -> Cell {
    let rate = mib as f64 / seconds;
    if rate.is_finite() { Cell::Count(rate.round() as u64) } else { Cell::Missing }
}

fn chart(what: &str, mib: u64, jobs: &[Job]) -> Chart {
    let bar = |one: &Series<Kept>| Bar {
        label: one.name.clone(),
        value: mib as f64 / seconds(one, what),
    };
    let bars = |(job, series): &Job| ((*job).to_owned(), series.iter().map(bar).collect());
    Chart {
        title: format!("{what}, longer is better"),
        unit: "MiB/s".to_owned(),
        shape: Shape::Bars(jobs.iter().map(bars).collect()),
        goal: None,
    }
}

fn note(context: &Context<'_>, table: &mut Table, jobs: &[Job]) {
    for (job, series) in jobs {
        let (who, min) = match *job {
            PACKED | OF_SOURCES => (Kernel::Btrfs.name(), TIMES_KERNEL_ZSTD_MIN),
            _ => (PLAIN, SHARE_OF_PLAIN_MIN),
        };
        let verdict = |what| {
            let times = times(series, who, what)?;
            let goal = match (*job, what) {
                (COPY, "write") => {
                    "a copy of a plain file into the image against one to a plain file".to_owned()
                }
                (COPY, _) => {
                    "a copy out of the image to a plain file against one of a plain file".to_owned()
                }
                _ => format!("{what}, {job}, against {who}"),
            };
            Some(context.verdict_at_least(&goal, times, min, "times as fast"))
        };
        let verdicts: Vec<String> = ["write", "read"].into_iter().filter_map(verdict).collect();
        if !verdicts.is_empty() {
            table.note(verdicts.join(" "));
        }
    }
    files::note_missing(context, table);
    table.note(files::MEMORY_NOTE);
    files::note_writeback(table);
    table.note(files::CPU_NOTE);
    table.note("MiB stored: what the image takes where it lies, once it is synced, without what it took before; of a new image ours with its trees.");
    table.note(
        "What is read goes to memory as the allocator gives it: of 1 MiB 16 bytes behind the start of a page, where some processors copy slowly. \
         To whole pages: to memory that begins with a page.",
    );
    table.note(
        "Copy: a plain file that lies where the image does is read by 1 MiB to whole pages, as cp does, and written, durable in the end; then back.",
    );
    table.note(format!(
        "Write: with the fsync behind it. Ours with the default cache, as users have it, of which at most {} MiB are file data; the kernel's with all \
         free memory.",
        CACHE_BYTES_DEFAULT >> 21,
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storing(name: &str, mib: &[u64]) -> Series<Kept> {
        let kept = |mib: &u64| Kept { stored_bytes: Some(mib << 20), ..Kept::default() };
        Series { name: name.to_owned(), rounds: mib.iter().map(kept).collect() }
    }

    #[test]
    fn images_that_do_not_store_as_much_are_not_compared() {
        let compare = |ours: &[u64], theirs: &[u64]| {
            let series = [storing(OURS, ours), storing(Kernel::Btrfs.name(), theirs)];
            require_as_much_stored(PACKED, &series)
        };
        compare(&[1000, 1090], &[1000, 1000]).unwrap();
        // Trees of small files.
        compare(&[5], &[2]).unwrap();
        for (ours, theirs) in [(1000, 1200), (1200, 1000)] {
            let error = compare(&[ours], &[theirs]).unwrap_err().to_string();
            assert!(error.contains(&format!("{ours}.0 MiB are stored by ubtrfs")), "{error}");
            assert!(error.contains("more than 10 %"), "{error}");
        }
        // What is not known is no more alike.
        assert!(compare(&[], &[1000]).is_err());
        require_as_much_stored(PACKED, &[storing(OURS, &[1000])]).unwrap();
    }
}
