//! Experiment 1: a file with 4 KiB of data at each 8 KiB, walked by SEEK_DATA and SEEK_HOLE, copied sparsely to nothing, and
//! asked for its extents; with delalloc, after sync, after reopening.

use ubtrfs_engine::CACHE_BYTES_DEFAULT;
use ubtrfs_iomap::CacheOptions;

use super::files::{self, Kept};
use super::{Context, verdict};
use crate::chart::{Bar, Chart, Shape};
use crate::contest::{Contestant, Series, alternate};
use crate::error::Result;
use crate::mount::Kernel;
use crate::report::{Cell, Table};

/// Extents of 128 MiB, 512 MiB and 1 GiB.
const SIZES: [u64; 3] = [16_384, 65_536, 131_072];
const STATES: [&str; 3] = ["delalloc", "synced", "reopened"];
const SEEK_NS_MAX: f64 = 60.0;
const COPY_WARM_MS_MAX: f64 = 150.0;
const COPY_COLD_MS_MAX: f64 = 400.0;
const GROWTH_MAX: f64 = 1.3;
/// Of the time that the kernel's btrfs takes.
const MOUNTED_COPY_MAX: f64 = 2.0;
const OURS: &str = "ubtrfs";
/// Extents of the files on which everything is measured with the mechanism off. With ranges locked in the tree each seek
/// with delalloc takes time for each extent: a walk of 4,096 two seconds, of 16,384 half a minute, of 131,072 half an hour.
const BEFORE_SIZES: [u64; 3] = [410, 1_365, 4_096];
/// Ranges are locked in the tree: at [`BEFORE_SIZES`], and parts of a walk at [`SIZES`].
const LOCKED: [(&str, &str); 2] = [
    ("ubtrfs, before: no hint, ranges locked in the tree", "seek"),
    ("ubtrfs, ranges locked in the tree", "lock"),
];
/// At all sizes.
const NO_HINT: (&str, &str) = ("ubtrfs, no hint", "hint");
const WALK: &[&str] = &["walk"];
const ALL_LOOKS: &[&str] = &["make", "seek", "copy", "fiemap"];
/// As users have it, who give no options: most of a large file is written by the time that it is walked.
const DEFAULT_CACHE: &str = "ubtrfs, default cache";

/// A row with a mechanism off: its name, what is off, and the phases that it is measured in.
type Before = (&'static str, &'static str, &'static [&'static str]);

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let title = format!(
        "seek: 4 KiB of data at each 8 KiB, walked by SEEK_DATA and SEEK_HOLE (ns a seek), copied sparsely to nothing and \
         asked for its extents by FIEMAP (ms); on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut columns = vec![("file_bytes", "file MiB"), ("extents", "extents"), ("who", "who")];
    columns.extend([
        ("without_a_place", "of them delalloc"),
        ("seek_delalloc_ns", "seek delalloc"),
        ("seek_synced_ns", "synced"),
        ("seek_reopened_ns", "reopened"),
        ("copy_delalloc_ms", "copy delalloc"),
        ("copy_synced_ms", "synced"),
        ("copy_reopened_ms", "reopened"),
        ("fiemap_delalloc_ms", "FIEMAP delalloc"),
        ("fiemap_synced_ms", "synced"),
        ("fiemap_reopened_ms", "reopened"),
    ]);
    let mut table = Table::new("seek", title, &columns);
    let before = |phases| LOCKED.map(|(name, ablate)| (name, ablate, phases));
    let no_hint = (NO_HINT.0, NO_HINT.1, ALL_LOOKS);
    let mut befores = Vec::new();
    for extents in BEFORE_SIZES.map(|extents| context.scaled(extents)) {
        let [both, locked] = before(ALL_LOOKS);
        let series = measure(context, extents, &[both, locked, no_hint])?;
        push(&mut table, extents, &series);
        befores.push((extents, series));
    }
    let mut sizes = Vec::new();
    for extents in SIZES.map(|extents| context.scaled(extents)) {
        let [both, locked] = before(WALK);
        let series = measure(context, extents, &[no_hint, both, locked])?;
        push(&mut table, extents, &series);
        sizes.push((extents, series));
    }
    draw(&mut table, &befores, &sizes);
    note(context, &mut table, &sizes);
    note_sizes(&mut table, &befores, &sizes);
    Ok(vec![table, counts(&befores, &sizes)])
}

/// How many extents, and what was measured.
type Size = (u64, Vec<Series<Kept>>);

fn measure(context: &Context<'_>, extents: u64, befores: &[Before]) -> Result<Vec<Series<Kept>>> {
    let ours =
        |name: &'static str, ablate: Option<&'static str>, phases: &'static [&'static str]| {
            Contestant::new(name, move || {
                files::ours(
                    context,
                    "seek",
                    extents,
                    |phase, job| {
                        job.args(["--phase", phase]);
                        if name != DEFAULT_CACHE {
                            // Room for all of the file to be delalloc, as the kernel has it.
                            job.args(["--cache-mib", "1024"]);
                        }
                        if let Some(ablate) = ablate {
                            job.args(["--ablate", ablate]);
                        }
                    },
                    phases,
                )
            })
        };
    let mut contestants = vec![ours(OURS, None, ALL_LOOKS), ours(DEFAULT_CACHE, None, ALL_LOOKS)];
    let off = befores.iter().map(|(name, ablate, phases)| ours(name, Some(ablate), phases));
    contestants.extend(off);
    if files::mount_available(context).is_ok() {
        contestants.push(Contestant::new(files::MOUNTED, move || {
            files::mounted(context, "seek", extents, &["make", "seek", "copy"])
        }));
    }
    for kernel in files::kernels(context) {
        contestants.push(Contestant::new(kernel.name(), move || {
            files::theirs(context, kernel, mount_options(kernel), ("seek", extents), &[], ALL_LOOKS)
        }));
    }
    alternate(contestants, context.options.round_count)
}

/// xfs gives a file that grows more space than it asks for, which SEEK_DATA then calls data.
fn mount_options(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::Btrfs => "",
        Kernel::Xfs => "allocsize=4k",
    }
}

fn seek_ns(series: &Series<Kept>, state: &str) -> f64 {
    series.median(|run| run.wall_each_ns(&format!("seek, {state}")))
}

/// Of the first round.
fn without_a_place(series: &Series<Kept>) -> Option<u64> {
    series.rounds.first()?.outcome.count("seek, delalloc", "extents without a place")
}

fn all_ms(series: &Series<Kept>, what: &str, state: &str) -> f64 {
    series.median(|run| run.outcome.wall_s(&format!("{what}, {state}")) * 1e3)
}

/// A row need not have all: FUSE hands no FIEMAP on, and some are of a walk alone.
fn measured(value: f64, cell: fn(f64) -> Cell) -> Cell {
    if value > 0.0 { cell(value) } else { Cell::Missing }
}

fn push(table: &mut Table, extents: u64, series: &[Series<Kept>]) {
    for one in series {
        let mut row =
            vec![Cell::Bytes(extents * 8192), Cell::Count(extents), Cell::text(&one.name)];
        row.push(without_a_place(one).map_or(Cell::Missing, Cell::Count));
        row.extend(STATES.map(|state| measured(seek_ns(one, state), Cell::Nanos)));
        for what in ["copy", "fiemap"] {
            row.extend(STATES.map(|state| measured(all_ms(one, what, state), Cell::Millis)));
        }
        table.push(row);
    }
}

fn draw(table: &mut Table, befores: &[Size], sizes: &[Size]) {
    let (Some((first, smallest)), Some((last, largest))) = (befores.last(), sizes.last()) else {
        return;
    };
    let groups = |series: &[Series<Kept>], value: &dyn Fn(&Series<Kept>, &str) -> f64| {
        let bars = |state: &str| {
            let bar =
                |one: &Series<Kept>| Bar { label: short(&one.name), value: value(one, state) };
            let shown = series.iter().filter(|one| value(one, state) > 0.0);
            shown.map(bar).collect()
        };
        Shape::Bars(STATES.map(|state| (state.to_owned(), bars(state))).to_vec())
    };
    let chart = |title: String, unit: &str, shape, goal| Chart {
        title,
        unit: unit.to_owned(),
        shape,
        goal,
    };
    let copy = |one: &Series<Kept>, state: &str| all_ms(one, "copy", state);
    let fiemap = |one: &Series<Kept>, state: &str| all_ms(one, "fiemap", state);
    let lines = largest.iter().map(|one| {
        let points = sizes.iter().filter_map(|(extents, series)| {
            let same = series.iter().find(|other| other.name == one.name)?;
            Some((*extents as f64, seek_ns(same, "synced")))
        });
        (one.name.clone(), points.collect())
    });
    let x_label = "extents of the file".to_owned();
    table.charts = vec![
        chart(
            format!("One seek, {last} extents"),
            "ns a seek",
            groups(largest, &seek_ns),
            Some(SEEK_NS_MAX),
        ),
        chart(
            format!("One seek, {first} extents, and before"),
            "ns a seek",
            groups(smallest, &seek_ns),
            None,
        ),
        chart(format!("Sparse copy, {last} extents"), "ms", groups(largest, &copy), None),
        chart(format!("FIEMAP, {last} extents"), "ms", groups(largest, &fiemap), None),
        chart(
            "One seek after sync, by size".to_owned(),
            "ns a seek",
            Shape::Lines { x_label, lines: lines.collect() },
            None,
        ),
    ];
}

/// As it fits beside a bar.
fn short(name: &str) -> String {
    name.replace("ubtrfs, before: no hint, ranges locked in the tree", "ubtrfs, before")
        .replace("ranges locked in the tree", "locks in the tree")
}

fn note(context: &Context<'_>, table: &mut Table, sizes: &[Size]) {
    let (Some((_, smallest)), Some((extents, largest))) = (sizes.first(), sizes.last()) else {
        return;
    };
    let (small, large) = (&smallest[0], &largest[0]);
    let mut verdicts = Vec::new();
    for state in STATES {
        let what = format!("a seek, {state}");
        verdicts.push(verdict(&what, seek_ns(large, state), SEEK_NS_MAX, "ns"));
    }
    if *extents == SIZES[2] {
        for (state, goal) in
            STATES.into_iter().zip([COPY_WARM_MS_MAX, COPY_WARM_MS_MAX, COPY_COLD_MS_MAX])
        {
            let what = format!("copy of 1 GiB, {state}");
            verdicts.push(verdict(&what, all_ms(large, "copy", state), goal, "ms"));
        }
    }
    let of = |name: &str| largest.iter().find(|one| one.name == name);
    if let (Some(mounted), Some(kernel)) = (of(files::MOUNTED), of(Kernel::Btrfs.name())) {
        for state in STATES {
            let times = all_ms(mounted, "copy", state) / all_ms(kernel, "copy", state);
            let what = format!("copy by the mount, {state}, against kernel btrfs");
            verdicts.push(verdict(&what, times, MOUNTED_COPY_MAX, "times its time"));
        }
    }
    let growth = STATES
        .map(|state| seek_ns(large, state) / seek_ns(small, state))
        .into_iter()
        .fold(0.0, f64::max);
    verdicts.push(verdict(
        "a seek at the largest size against the smallest",
        growth,
        GROWTH_MAX,
        "times",
    ));
    table.note(verdicts.join(" "));
    // Those that walked parts only are told of below.
    for one in largest[1..].iter().filter(|one| all_ms(one, "copy", STATES[0]) > 0.0) {
        let times = STATES.map(|state| {
            let (seek, copy) = (
                seek_ns(one, state) / seek_ns(large, state),
                all_ms(one, "copy", state) / all_ms(large, "copy", state),
            );
            format!("{state} {seek:.1} and {copy:.1}")
        });
        table.note(format!(
            "{} takes so many times as long for a seek and a copy: {}.",
            one.name,
            times.join(", ")
        ));
    }
    files::note_missing(context, table);
    table.note(format!(
        "Ours in process, the kernel's by lseek, pread and ioctl, each of which pays for a system call: {:.0} ns here when it does \
         nothing. Reopened: each of the three in a process of its own, first thing after opening; of the kernel after umount and \
         mount. So that all of the file can be delalloc, ours has a cache of 1 GiB, all of which may be dirty file data; by default it has {} MiB, of \
         which {} may be, and mounted, too, so most of a large file is written by then. What of a file was delalloc as its walk began: as FIEMAP told it, which \
         FUSE does not. Seeks of a mount against bindfs: see the workload \
         mount.",
        context.syscall_ns,
        CACHE_BYTES_DEFAULT >> 20,
        CacheOptions::default().dirty_bytes_max >> 20,
    ));
}

/// Says where rows with the mechanism off are, and of what.
fn note_sizes(table: &mut Table, befores: &[Size], sizes: &[Size]) {
    let file = |extents: u64| format!("{extents} extents ({:.1} MiB)", extents as f64 / 128.0);
    let all: Vec<String> = befores.iter().map(|(extents, _)| file(*extents)).collect();
    let times = sizes.iter().flat_map(|(extents, series)| {
        let off = series.iter().filter(|one| LOCKED.iter().any(|(name, _)| one.name == *name));
        off.map(move |one| {
            let times = seek_ns(one, STATES[0]) / seek_ns(&series[0], STATES[0]);
            format!("{extents} extents, {}: {times:.0}", one.name)
        })
    });
    table.note(format!(
        "Where ranges are locked in the tree each seek with delalloc takes time for each extent, and a walk grows with the square of \
         the file's size. So these rows have files of their own for everything: {}; and of the large files parts of the walk, 20 seeks at each tenth \
         of the file. So many times as long as ours takes a seek there: {}. With only the hint off there is all at each size.",
        all.join(", "),
        times.collect::<Vec<_>>().join("; "),
    ));
}

/// What does not depend on the machine, of ours: everything at the largest size, else the walk with delalloc.
fn counts(befores: &[Size], sizes: &[Size]) -> Table {
    let mut table = files::counts_table(
        "seek_counts",
        "seek: what was done, whatever the machine",
        ("extents", "extents"),
    );
    let looked = STATES
        .into_iter()
        .flat_map(|state| ["seek", "copy", "fiemap"].map(|what| format!("{what}, {state}")));
    let done: Vec<String> =
        ["write".to_owned(), "fsync".to_owned()].into_iter().chain(looked).collect();
    for (at, (extents, series)) in befores.iter().chain(sizes).enumerate() {
        let is_last = at + 1 == befores.len() + sizes.len();
        for one in series {
            let done = if is_last && one.name == OURS { &done[..] } else { &done[2..3] };
            files::push_counts(&mut table, &Cell::Count(*extents), one, done);
        }
    }
    table
}
