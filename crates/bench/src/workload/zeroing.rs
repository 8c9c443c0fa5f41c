//! Experiment 5: a block is written and the file cut to one byte less, over and over; a range is zeroed of which every other block is dirty;
//! and a mapped store beyond the end of a file, which nobody may see when the file has grown.

use ubtrfs_engine::CACHE_BYTES_DEFAULT;

use super::Context;
use super::files::{self, Kept};
use super::published::{self, Pair};
use crate::chart::{Bar, Chart, Shape};
use crate::contest::{Contestant, Series, alternate, median};
use crate::error::Result;
use crate::mount::{Kernel, Setup};
use crate::report::{Cell, Table};

const ROUNDS: [u64; 3] = [5_000, 16_667, 50_000];
/// Dirty blocks of a range that is zeroed, twice as long: up to 128 MiB.
const ZEROED_BLOCKS: [u64; 3] = [1_638, 5_461, 16_384];
const LOOP_S_MAX: f64 = 0.1;
/// As the change was published, 50,000 times.
const PUBLISHED_S: (f64, f64) = (14.103, 0.144);
const GROWTH_MAX: f64 = 1.3;
/// Of the time that the kernel's xfs takes.
const MOUNTED_MAX: f64 = 0.5;
const OURS: &str = "ubtrfs";
const BEFORE: &str = "ubtrfs, before: written back first";
const NO_SLABS: &str = "ubtrfs, each folio from the allocator";
const HUGE_PAGES: &str = "ubtrfs, huge pages";
const DEFAULT: &str = "ubtrfs, default cache";
const RANGE: &str = "ubtrfs, ZERO_RANGE";

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let title = format!(
        "zeroing: pwrite of a block, ftruncate to one byte less than its end, over and over; on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let columns = [
        ("rounds", "times"),
        ("who", "who"),
        ("wall_s", "wall s"),
        ("wall_min_s", "min"),
        ("wall_max_s", "max"),
        ("times_ours", "× ours"),
        ("cpu_s", "CPU s"),
        ("wall_ns", "ns each"),
        ("fsync_s", "fsync s"),
        ("pages_flushed", "pages flushed"),
        ("device_writes", "device writes"),
        ("commits", "commits"),
        ("peak_bytes", "peak MiB"),
    ];
    let mut table = Table::new("zeroing", title, &columns);
    let mut sizes = Vec::new();
    for rounds in ROUNDS {
        let rounds = context.scaled(rounds);
        let series = measure(context, rounds)?;
        push(&mut table, rounds, &series);
        sizes.push((rounds, series));
    }
    draw(context, &mut table, &sizes);
    note(context, &mut table, &sizes);
    Ok(vec![table, before_and_after(&sizes), counts(&sizes), zeroed(context)?, store(context)?])
}

fn measure(context: &Context<'_>, rounds: u64) -> Result<Vec<Series<Kept>>> {
    let ours = |name: &str, arguments: &'static [&'static str]| {
        Contestant::new(name, move || {
            let add = |phase: &str, job: &mut std::process::Command| {
                job.args(["--phase", phase]).args(arguments);
            };
            files::ours(context, "zeroing", rounds, add, &["make"])
        })
    };
    let mut contestants = vec![
        ours(OURS, &["--cache-mib", "1024"]),
        ours(DEFAULT, &[]),
        ours(BEFORE, &["--cache-mib", "1024", "--ablate", "batch"]),
        ours(NO_SLABS, &["--cache-mib", "1024", "--ablate", "slabs"]),
        ours(HUGE_PAGES, &["--cache-mib", "1024", "--huge-pages"]),
    ];
    if files::mount_available(context).is_ok() {
        contestants.push(Contestant::new(files::MOUNTED, move || {
            files::mounted(context, "zeroing", rounds, &["make"])
        }));
    }
    for kernel in files::kernels(context) {
        contestants.push(Contestant::new(kernel.name(), move || {
            files::theirs(context, kernel, Setup::default(), ("zeroing", rounds), &[], &["make"])
        }));
    }
    alternate(contestants, context.options.round_count)
}

fn loop_s(series: &Series<Kept>) -> f64 {
    series.median(|run| run.outcome.wall_s("rounds"))
}

fn each_ns(series: &Series<Kept>) -> f64 {
    series.median(|run| run.wall_each_ns("rounds"))
}

fn fsync_s(series: &Series<Kept>) -> Cell {
    files::of_rounds(series.values(|run| run.outcome.wall_s("fsync")), Cell::Precise)
}

fn push(table: &mut Table, rounds: u64, series: &[Series<Kept>]) {
    let Some(ours) = series.first() else { return };
    for one in series {
        let first = one.rounds.first();
        let count = |what: &str| {
            let count = first.and_then(|run| run.outcome.count("rounds", what));
            count.map_or(Cell::Missing, Cell::Count)
        };
        let peak = one.rounds.iter().map(|run| run.peak_bytes).max().unwrap_or(0);
        // It is the server's that counts.
        let peak = if one.name == files::MOUNTED { Cell::Missing } else { Cell::Bytes(peak) };
        let mut row = vec![Cell::Count(rounds), Cell::text(&one.name)];
        row.extend(files::times(one, ours, "rounds", Cell::Precise));
        row.push(Cell::Nanos(each_ns(one)));
        row.push(fsync_s(one));
        row.extend(["pages flushed", "device writes", "commits"].map(count));
        row.push(peak);
        table.push(row);
    }
}

fn draw(context: &Context<'_>, table: &mut Table, sizes: &[(u64, Vec<Series<Kept>>)]) {
    let Some((rounds, largest)) = sizes.last() else { return };
    let bars = largest.iter().map(|one| Bar { label: one.name.clone(), value: loop_s(one) });
    let lines = largest.iter().map(|one| {
        let points = sizes.iter().filter_map(|(rounds, series)| {
            let same = series.iter().find(|other| other.name == one.name)?;
            Some((*rounds as f64, each_ns(same)))
        });
        (one.name.clone(), points.collect())
    });
    table.charts = vec![
        Chart {
            title: format!("{rounds} times write and cut"),
            unit: "s".to_owned(),
            shape: Shape::Bars(vec![(String::new(), bars.collect())]),
            goal: context.is_full_size().then_some(LOOP_S_MAX),
        },
        Chart {
            title: "One time, by how often".to_owned(),
            unit: "ns".to_owned(),
            shape: Shape::Lines { x_label: "times".to_owned(), lines: lines.collect() },
            goal: None,
        },
    ];
}

fn note(context: &Context<'_>, table: &mut Table, sizes: &[(u64, Vec<Series<Kept>>)]) {
    let Some((rounds, largest)) = sizes.last() else { return };
    let mut verdicts = Vec::new();
    let what = format!("{rounds} times");
    for one in largest.iter().filter(|one| [OURS, DEFAULT].contains(&one.name.as_str())) {
        let what = format!("{}: {what}", one.name);
        verdicts.push(context.verdict(&what, loop_s(one), LOOP_S_MAX, "s"));
    }
    let each_ns: Vec<f64> = sizes.iter().map(|(_, series)| each_ns(&series[0])).collect();
    let growth = files::growth(&each_ns);
    verdicts.push(context.verdict(
        "one at any size against the smallest",
        growth,
        GROWTH_MAX,
        "times",
    ));
    let of = |name: &str| largest.iter().find(|one| one.name == name);
    if let (Some(mounted), Some(xfs)) = (of(files::MOUNTED), of(Kernel::Xfs.name())) {
        let share = loop_s(mounted) / loop_s(xfs);
        verdicts.push(context.verdict(
            "mounted, against xfs",
            share,
            MOUNTED_MAX,
            "times its time",
        ));
    }
    table.note(verdicts.join(" "));
    files::note_missing(context, table);
    table.note(files::MEMORY_NOTE);
    table.note(files::CPU_NOTE);
    table.note(format!(
        "The loop, without the fsync behind it. Ours in process with a cache of 1 GiB, which holds all of it, as the kernel's does; the \
         kernel's by two system calls, each {:.0} ns here when it does nothing. With the default cache, as users have it, at most {} MiB are file \
         data, and what is dirty is written back beside. Pages flushed, device writes and commits are those of the loop.",
        context.syscall_ns,
        CACHE_BYTES_DEFAULT >> 21,
    ));
}

fn before_and_after(sizes: &[(u64, Vec<Series<Kept>>)]) -> Table {
    let published = Pair::new("50000 times, s", PUBLISHED_S.0, PUBLISHED_S.1);
    let ours = sizes.iter().filter_map(|(rounds, series)| {
        let of = |name: &str| series.iter().find(|one| one.name == name);
        let (off, on) = (of(BEFORE)?, of(OURS)?);
        Some(Pair::new(format!("{rounds} times, s"), loop_s(off), loop_s(on)))
    });
    let title = "zeroing: before and after, as published";
    let mut table = published::table("zeroing_published", title, [published], ours, Cell::Precise);
    table.note(format!(
        "Ours before: {BEFORE}. The published figures are of Linux's xfs, on another machine.",
    ));
    table
}

/// What does not depend on the machine, of the largest size.
fn counts(sizes: &[(u64, Vec<Series<Kept>>)]) -> Table {
    let mut table = files::counts_table(
        "zeroing_counts",
        "zeroing: what was done, whatever the machine",
        ("rounds", "times"),
    );
    let done = ["rounds", "fsync"].map(str::to_owned);
    if let Some((rounds, series)) = sizes.last() {
        for one in series {
            files::push_counts(&mut table, &Cell::Count(*rounds), one, &done);
        }
    }
    table
}

/// The loop's block is dirty as a whole, which is seen without a mapping. Here the batch is what spares writing back.
fn zeroed(context: &Context<'_>) -> Result<Table> {
    let title = format!(
        "zeroing: a range that was allocated, of which every other block is dirty, zeroed at once; on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let columns = [
        ("blocks", "dirty blocks"),
        ("who", "who"),
        ("wall_s", "wall s"),
        ("wall_min_s", "min"),
        ("wall_max_s", "max"),
        ("times_ours", "× ours"),
        ("cpu_s", "CPU s"),
        ("wall_ns", "ns a block"),
        ("fsync_s", "fsync s"),
        ("both_s", "both s"),
        ("both_times_ours", "× ours"),
        ("mappings", "mappings asked for"),
        ("pages_flushed", "pages flushed"),
        ("device_writes", "device writes"),
    ];
    let mut table = Table::new("zeroed_range", title, &columns);
    let mut each_ns = Vec::new();
    for blocks in ZEROED_BLOCKS {
        let blocks = context.scaled(blocks);
        let series = zeroed_blocks(context, blocks)?;
        push_zeroed(&mut table, blocks, &series);
        each_ns.push(series[0].median(|run| run.wall_each_ns("zero")));
    }
    let growth = files::growth(&each_ns);
    table.note(context.verdict(
        "a block at any size against the smallest",
        growth,
        GROWTH_MAX,
        "times",
    ));
    table.note(
        "All of it reads as zeros then. Ours zeroes what is dirty in memory, as that is what the call is for that zeroes part of a file, and its \
         fsync writes that; the kernel's ZERO_RANGE makes the range unwritten again, for which it writes back first, or drops what is dirty. So \
         do our own by that name, and our mount, of which that is asked: these are to be compared with the kernel's.",
    );
    Ok(table)
}

fn zeroed_blocks(context: &Context<'_>, blocks: u64) -> Result<Vec<Series<Kept>>> {
    let ours = |name: &str, phase: &'static str, ablation: &'static [&'static str]| {
        Contestant::new(name, move || {
            let add = |phase: &str, job: &mut std::process::Command| {
                job.args(["--phase", phase, "--cache-mib", "1024"]).args(ablation);
            };
            files::ours(context, "zeroing", blocks, add, &[phase])
        })
    };
    let mut contestants = vec![
        ours(OURS, "zero", &[]),
        ours(BEFORE, "zero", &["--ablate", "batch"]),
        ours(RANGE, "zero-range", &[]),
    ];
    if files::mount_available(context).is_ok() {
        contestants.push(Contestant::new(files::MOUNTED, move || {
            files::mounted(context, "zeroing", blocks, &["zero"])
        }));
    }
    for kernel in files::kernels(context) {
        contestants.push(Contestant::new(kernel.name(), move || {
            files::theirs(context, kernel, Setup::default(), ("zeroing", blocks), &[], &["zero"])
        }));
    }
    alternate(contestants, context.options.round_count)
}

/// The call with the fsync behind it: what one leaves to the other is in both.
fn both_s(series: &Series<Kept>) -> Vec<f64> {
    series.values(|run| run.outcome.wall_s("zero") + run.outcome.wall_s("fsync"))
}

fn push_zeroed(table: &mut Table, blocks: u64, series: &[Series<Kept>]) {
    for one in series {
        let first = one.rounds.first();
        let count = |what: &str| {
            let count = first.and_then(|run| run.outcome.count("zero", what));
            count.map_or(Cell::Missing, Cell::Count)
        };
        let mut row = vec![Cell::Count(blocks), Cell::text(&one.name)];
        row.extend(files::times(one, &series[0], "zero", Cell::Precise));
        row.push(Cell::Nanos(one.median(|run| run.wall_each_ns("zero"))));
        row.push(fsync_s(one));
        row.push(files::of_rounds(both_s(one), Cell::Precise));
        row.push(Cell::Ratio(median(both_s(one)) / median(both_s(&series[0]))));
        row.extend(["mappings", "pages flushed", "device writes"].map(count));
        table.push(row);
    }
}

/// Who shows bytes that nobody wrote to the file.
fn store(context: &Context<'_>) -> Result<Table> {
    let mut table = Table::new(
        "mapped_store",
        "zeroing: fallocate 1 KiB, write 1 KiB, a store of 1 KiB at 3 KiB through a map of 4 KiB, write 4 KiB at 32 KiB, fsync; \
         bytes that are not as they must be",
        &[
            ("who", "who"),
            ("wrong_bytes", "wrong bytes"),
            ("wrong_bytes_reopened", "after reopening"),
        ],
    );
    let phases = ["store", "look"];
    let add = |phase: &str, job: &mut std::process::Command| {
        job.args(["--phase", phase]);
    };
    let mut ours = vec![(OURS, files::ours(context, "zeroing", 1, add, &phases)?)];
    if files::mount_available(context).is_ok() {
        ours.push((files::MOUNTED, files::mounted(context, "zeroing", 1, &phases)?));
    }
    let mut verdicts = Vec::new();
    for (who, run) in &ours {
        let wrong: u64 = push_store(&mut table, who, run)?.iter().sum();
        let met = if wrong == 0 { "met" } else { "NOT met" };
        verdicts.push(format!("Goal, {who}: no wrong bytes; found {wrong}: {met}."));
    }
    table.note(verdicts.join(" "));
    for kernel in files::kernels(context) {
        let run = files::theirs(context, kernel, Setup::default(), ("zeroing", 1), &[], &phases)?;
        push_store(&mut table, kernel.name(), &run)?;
    }
    Ok(table)
}

/// How many there were, before and after reopening.
fn push_store(table: &mut Table, who: &str, run: &Kept) -> Result<[u64; 2]> {
    const WRONG: &str = "wrong bytes";
    let counts = run.outcome.counts.iter().filter(|count| count.what == WRONG);
    let mut wrong = counts.map(|count| count.count);
    let wrong = [files::told(wrong.next(), WRONG)?, files::told(wrong.next(), WRONG)?];
    table.push(vec![Cell::text(who), Cell::Count(wrong[0]), Cell::Count(wrong[1])]);
    Ok(wrong)
}
