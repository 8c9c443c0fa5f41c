//! Experiment 1: a file with 4 KiB of data at each 8 KiB, walked by SEEK_DATA and SEEK_HOLE, copied sparsely to nothing, and
//! asked for its extents; with delalloc, after sync, after reopening.

use ubtrfs_engine::CACHE_BYTES_DEFAULT;

use super::Context;
use super::files::{self, Kept};
use super::published::{self, Pair};
use crate::chart::{Bar, Chart, Shape};
use crate::contest::{Contestant, Series, alternate};
use crate::error::Result;
use crate::mount::{Kernel, Room, Setup};
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
/// Extents of files that are walked whole with the mechanism off, too. With ranges locked in the tree each seek with delalloc
/// takes time for each extent, as it does in the kernel's btrfs: a walk of 4,096 two seconds, of 16,384 half a minute, of 131,072 half
/// an hour.
const BEFORE_SIZES: [u64; 3] = [410, 1_365, 4_096];
/// With delalloc whole at [`BEFORE_SIZES`], in parts at [`SIZES`]; whole in the other states.
const LOCKED: [(&str, &str); 2] = [
    ("ubtrfs, before: no hint, ranges locked in the tree", "seek"),
    ("ubtrfs, ranges locked in the tree", "lock"),
];
/// As the change was published, for a file of 1 GiB.
const PUBLISHED_MS: [(f64, f64); 3] = [(10_074.0, 3_320.0), (886.0, 880.0), (181_261.0, 1_801.0)];
/// Whole at all sizes.
const NO_HINT: (&str, &str) = ("ubtrfs, no hint", "hint");
/// Whole at all sizes.
const NO_SLABS: (&str, &str) = ("ubtrfs, each folio from the allocator", "slabs");
const ALL_LOOKS: &[&str] = &["make", "seek", "copy", "fiemap"];
/// Parts with delalloc.
const PART_LOOKS: &[&str] = &["walk", "seek", "copy", "fiemap"];
/// As users have it, who give no options: most of a large file is written by the time that it is walked.
const DEFAULT_CACHE: &str = "ubtrfs, default cache";

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
    let mut tell = |extents: &[u64], slow_looks| -> Result<Vec<Size>> {
        let mut told = Vec::new();
        for extents in extents.iter().map(|extents| context.scaled(*extents)) {
            let series = measure(context, extents, slow_looks)?;
            push(&mut table, extents, &series);
            told.push((extents, series));
        }
        Ok(told)
    };
    let befores = tell(&BEFORE_SIZES, ALL_LOOKS)?;
    let sizes = tell(&SIZES, PART_LOOKS)?;
    draw(context, &mut table, &befores, &sizes);
    note(context, &mut table, &sizes);
    note_sizes(context, &mut table, &befores, &sizes);
    Ok(vec![table, before_and_after(&sizes), counts(&befores, &sizes)])
}

/// How many extents, and what was measured.
type Size = (u64, Vec<Series<Kept>>);

/// Those who need time for each extent in each seek with delalloc look at the file in the phases `slow_looks`.
fn measure(
    context: &Context<'_>,
    extents: u64,
    slow_looks: &'static [&'static str],
) -> Result<Vec<Series<Kept>>> {
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
    contestants.extend(LOCKED.map(|(name, ablate)| ours(name, Some(ablate), slow_looks)));
    for (name, ablate) in [NO_HINT, NO_SLABS] {
        contestants.push(ours(name, Some(ablate), ALL_LOOKS));
    }
    if files::mount_available(context).is_ok() {
        contestants.push(Contestant::new(files::MOUNTED, move || {
            files::mounted(context, "seek", extents, &["make", "seek", "copy"])
        }));
    }
    for kernel in files::kernels(context) {
        let (setup, looks) = match kernel {
            Kernel::Btrfs => (Setup { room: Room::Vast, ..Setup::default() }, slow_looks),
            // It gives a file that grows more space than it asks for, which SEEK_DATA then calls data.
            Kernel::Xfs => (Setup { options: "allocsize=4k", ..Setup::default() }, ALL_LOOKS),
        };
        contestants.push(Contestant::new(kernel.name(), move || {
            files::theirs(context, kernel, setup, ("seek", extents), &[], looks)
        }));
    }
    alternate(contestants, context.options.round_count)
}

fn seek_ns(series: &Series<Kept>, state: &str) -> f64 {
    series.median(|run| run.wall_each_ns(&format!("seek, {state}")))
}

/// The fewest of all rounds.
fn without_a_place(series: &Series<Kept>) -> Option<u64> {
    let told = |run: &Kept| run.outcome.count("fiemap, delalloc", "extents without a place");
    series.rounds.iter().filter_map(told).min()
}

/// Of the whole file; where parts of it were looked at, as long as it takes at their rate.
fn all_ms(series: &Series<Kept>, extents: u64, what: &str, state: &str) -> f64 {
    let each_ns = |run: &Kept| run.wall_each_ns(&format!("{what}, {state}"));
    series.median(each_ns) * extents as f64 / 1e6
}

/// Whether parts of a file stand for it as long as it is delalloc.
fn is_in_parts(series: &Series<Kept>, extents: u64) -> bool {
    let copied = |run: &Kept| run.outcome.all("copy, delalloc").map(|timing| timing.count).sum();
    series.rounds.iter().map(copied).any(|count: u64| count != extents)
}

/// What of its file was not delalloc when it was looked at as if it was; `None` if all was.
fn lack(series: &Series<Kept>, extents: u64) -> Option<String> {
    let name = &series.name;
    match without_a_place(series) {
        None => Some(format!("what of the file of {name} was delalloc is not known")),
        Some(count) if count < extents => {
            Some(format!("{count} of {extents} extents of the file of {name} were delalloc"))
        }
        Some(_) => {
            let late = |run: &Kept| run.outcome.count("copy, delalloc", "written back meanwhile");
            series.rounds.iter().any(|run| late(run) > Some(0)).then(|| {
                format!(
                    "the file of {name} was written back before all was done that was to be done with delalloc"
                )
            })
        }
    }
}

/// The same in brackets, for a state in which that matters.
fn lack_in(state: &str, series: &Series<Kept>, extents: u64) -> String {
    let lack = lack(series, extents).filter(|_| state == STATES[0]);
    lack.map_or_else(String::new, |lack| format!(" ({lack})"))
}

fn push(table: &mut Table, extents: u64, series: &[Series<Kept>]) {
    for one in series {
        let mut row =
            vec![Cell::Bytes(extents * 8192), Cell::Count(extents), Cell::text(&one.name)];
        row.push(without_a_place(one).map_or(Cell::Missing, Cell::Count));
        // A row need not have all: FUSE hands no FIEMAP on.
        let each_ns = |what: &str, state: &str| {
            one.values(|run| run.wall_each_ns(&format!("{what}, {state}")))
        };
        row.extend(STATES.map(|state| files::of_rounds(each_ns("seek", state), Cell::Nanos)));
        for what in ["copy", "fiemap"] {
            row.extend(STATES.map(|state| {
                let all_ms = each_ns(what, state).into_iter().map(|ns| ns * extents as f64 / 1e6);
                files::of_rounds(all_ms.collect(), Cell::Millis)
            }));
        }
        table.push(row);
    }
}

fn draw(context: &Context<'_>, table: &mut Table, befores: &[Size], sizes: &[Size]) {
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
    let copy = |one: &Series<Kept>, state: &str| all_ms(one, *last, "copy", state);
    let fiemap = |one: &Series<Kept>, state: &str| all_ms(one, *last, "fiemap", state);
    let lines = largest.iter().map(|one| {
        let points = sizes.iter().filter_map(|(extents, series)| {
            let same = series.iter().find(|other| other.name == one.name)?;
            Some((*extents as f64, seek_ns(same, "synced")))
        });
        let points = points.filter(|(_, ns)| *ns > 0.0);
        (one.name.clone(), points.collect())
    });
    let x_label = "extents of the file".to_owned();
    table.charts = vec![
        chart(
            format!("One seek, {last} extents"),
            "ns a seek",
            groups(largest, &seek_ns),
            context.is_full_size().then_some(SEEK_NS_MAX),
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
    let Some((extents, largest)) = sizes.last() else { return };
    let large = &largest[0];
    let extents = *extents;
    let of = |name: &str| largest.iter().find(|one| one.name == name);
    let mut verdicts: Vec<String> = [OURS, DEFAULT_CACHE]
        .into_iter()
        .filter_map(of)
        .flat_map(|one| verdicts_of(context, one, extents))
        .collect();
    if let (Some(mounted), Some(kernel)) = (of(files::MOUNTED), of(Kernel::Btrfs.name())) {
        for state in STATES {
            verdicts.push(verdict_of_copies(context, state, mounted, kernel, extents));
        }
    }
    for (what, name) in [("seek", "a seek"), ("copy", "an extent of a copy")] {
        verdicts.extend(STATES.map(|state| {
            let each_ns = |(_, series): &Size| {
                series[0].median(|run| run.wall_each_ns(&format!("{what}, {state}")))
            };
            let each_ns: Vec<f64> = sizes.iter().map(each_ns).collect();
            let what = format!("{name}, {state}, at any size against the smallest");
            context.verdict(&what, files::growth(&each_ns), GROWTH_MAX, "times")
        }));
    }
    table.note(verdicts.join(" "));
    for one in &largest[1..] {
        let times = STATES.map(|state| {
            let ours = |what| all_ms(large, extents, what, state);
            let (seek, copy) = (
                seek_ns(one, state) / seek_ns(large, state),
                all_ms(one, extents, "copy", state) / ours("copy"),
            );
            format!("{state} {seek:.1} and {copy:.1}{}", lack_in(state, one, extents))
        });
        table.note(format!(
            "{} takes so many times as long for a seek and a copy: {}.",
            one.name,
            times.join(", ")
        ));
    }
    files::note_missing(context, table);
    table.note(files::MEMORY_NOTE);
    files::note_writeback(table);
    table.note(format!(
        "Ours in process, the kernel's by lseek, pread and ioctl, each of which pays for a system call: {:.0} ns here when it does \
         nothing. Reopened: each of the three in a process of its own, first thing after opening; of the kernel after umount and \
         mount. So that all of the file can be delalloc, ours has a cache of 1 GiB, all of which may be dirty file data; by default it has {} MiB, of \
         which a sixteenth may be, and a quarter of it mounted, so most of a large file is written by then. What of a file was delalloc as its walk began: as FIEMAP told it, which \
         FUSE does not; the fewest of all rounds. Seeks of a mount against bindfs: see the workload \
         mount.",
        context.syscall_ns,
        CACHE_BYTES_DEFAULT >> 20,
    ));
}

/// Whether seeks and copies of the largest file take as little time as they are to.
fn verdicts_of(context: &Context<'_>, one: &Series<Kept>, extents: u64) -> Vec<String> {
    let copies = [COPY_WARM_MS_MAX, COPY_WARM_MS_MAX, COPY_COLD_MS_MAX];
    let judge = |what: &str, state: &str, have: f64, goal: f64, unit: &str| {
        let what = format!("{}: {what}, {state}", one.name);
        // Of what was written back it would be that of another state.
        if let Some(lack) = lack(one, extents).filter(|_| state == STATES[0]) {
            return format!("Goal, {what}: measured {have:.3} {unit}; not judged, as {lack}.");
        }
        context.verdict(&what, have, goal, unit)
    };
    let seeks = STATES.map(|state| judge("a seek", state, seek_ns(one, state), SEEK_NS_MAX, "ns"));
    let copy = format!("a copy of {} MiB", (extents * 8192) >> 20);
    let copies = STATES
        .into_iter()
        .zip(copies)
        .map(|(state, goal)| judge(&copy, state, all_ms(one, extents, "copy", state), goal, "ms"));
    seeks.into_iter().chain(copies).collect()
}

/// Whether a copy by the mount is as fast as it is to be. With delalloc that is told and not judged unless both files are known to
/// have been so: who has written back copies another file, and may be much faster for it.
fn verdict_of_copies(
    context: &Context<'_>,
    state: &str,
    mounted: &Series<Kept>,
    kernel: &Series<Kept>,
    extents: u64,
) -> String {
    let times = all_ms(mounted, extents, "copy", state) / all_ms(kernel, extents, "copy", state);
    let what = format!("copy by the mount, {state}, against kernel btrfs");
    let mut lacks: Vec<_> =
        [mounted, kernel].into_iter().filter_map(|one| lack(one, extents)).collect();
    if state != STATES[0] || lacks.is_empty() {
        return context.verdict(&what, times, MOUNTED_COPY_MAX, "times its time");
    }
    if is_in_parts(kernel, extents) {
        lacks.push("the kernel's time is that of parts, for the whole".to_owned());
    }
    let lacks = lacks.join("; ");
    format!("Goal, {what}: measured {times:.3} times its time; not judged, as {lacks}.")
}

/// Says which figures stand for more than was looked at, and how the kernel is made to keep what was written.
fn note_sizes(context: &Context<'_>, table: &mut Table, befores: &[Size], sizes: &[Size]) {
    let all: Vec<String> = befores.iter().map(|(extents, _)| extents.to_string()).collect();
    let times = sizes.iter().flat_map(|(extents, series)| {
        let parts = series.iter().filter(|one| is_in_parts(one, *extents));
        parts.map(move |one| {
            let times = seek_ns(one, STATES[0]) / seek_ns(&series[0], STATES[0]);
            format!("{extents} extents, {}: {times:.0}", one.name)
        })
    });
    table.note(format!(
        "Where ranges are locked in the tree, and in the kernel's btrfs, each seek with delalloc takes time for each extent, and a walk or a copy \
         grows with the square of the file's size. So these rows have files of their own that are walked and copied whole, of {} extents; of the \
         large files parts are, as long as they are delalloc: 20 seeks, and 10 extents copied, in the middle of each tenth of the file. \
         What such a copy takes is calculated: the time an extent of those parts, for all extents. All else is of the whole file. So \
         many times as long as ours takes a seek in those parts: {}. With only the hint off everything is of the whole file.",
        all.join(", "),
        times.collect::<Vec<_>>().join("; "),
    ));
    if files::kernels(context).is_empty() {
        return;
    }
    table.note(
        "The kernel's btrfs has an image of 8 TiB here, nearly all of it a hole, if there can be such a file. For each extent with delalloc it \
         reserves 256 KiB of metadata, and promises an eighth of what it could allocate for that: on 8 GiB it begins to write back at some 1,400 \
         extents, with 4 MiB of dirty memory, whatever vm.dirty_background_bytes allows. It keeps the rest for as long as what is \
         dirty is below vm.dirty_background_ratio (or vm.dirty_background_bytes) and younger than vm.dirty_expire_centisecs: who finds fewer \
         extents with delalloc than there are may raise these for the time of the run. Of 131,072 extents it has written back some sooner all \
         the same, far below these.",
    );
    let late = befores.iter().chain(sizes).flat_map(|(extents, series)| {
        let lacks = series.iter().filter(|one| one.name == Kernel::Btrfs.name());
        lacks.filter_map(|one| lack(one, *extents)).map(move |lack| format!("{extents}: {lack}"))
    });
    let late: Vec<String> = late.collect();
    if !late.is_empty() {
        table.note(format!("Its figures with delalloc are of another state: {}.", late.join("; ")));
    }
}

/// At each size, in each state.
fn before_and_after(sizes: &[Size]) -> Table {
    let published = PUBLISHED_MS.into_iter().zip(1..).map(|((before, after), nth)| {
        Pair::new(format!("131072 extents, {nth} of 3 figures, ms"), before, after)
    });
    let mut ours = Vec::new();
    for (extents, series) in sizes {
        let of = |name: &str| series.iter().find(|one| one.name == name);
        let (Some(off), Some(on)) = (of(LOCKED[0].0), of(OURS)) else { continue };
        for state in STATES {
            let part = if state == STATES[0] { "; before of parts" } else { "" };
            let what = format!("{extents} extents, a seek, {state}, ns{part}");
            ours.push(Pair::new(what, seek_ns(off, state), seek_ns(on, state)));
            for what in ["copy", "fiemap"] {
                let ms = |one| all_ms(one, *extents, what, state);
                // Extents are asked for whole.
                let part = if what == "copy" { part } else { "" };
                let what = format!("{extents} extents, {what}, {state}, ms{part}");
                ours.push(Pair::new(what, ms(off), ms(on)));
            }
        }
    }
    let title = "seek: before and after, as published";
    let mut table = published::table("seek_published", title, published, ours, Cell::Millis);
    table.note(format!(
        "Ours before: {}. Of a file with delalloc the seeks and copies before are those of parts of it, and a copy is calculated from \
         that for the whole. The published figures are of Linux with a file of this form, on another machine.",
        LOCKED[0].0,
    ));
    table
}

/// What does not depend on the machine, of ours: everything at the large sizes, of the largest also with a mechanism off; else the
/// walk with delalloc.
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
        let is_large = at >= befores.len();
        let is_last = at + 1 == befores.len() + sizes.len();
        for one in series {
            let is_all = is_large && one.name == OURS || is_last && one.name != DEFAULT_CACHE;
            let done = if is_all { &done[..] } else { &done[2..3] };
            files::push_counts(&mut table, &Cell::Count(*extents), one, done);
        }
    }
    let large: Vec<String> = sizes.iter().map(|(extents, _)| extents.to_string()).collect();
    table.note(format!(
        "With delalloc, rows with ranges locked in the tree are at {} extents of the parts that were walked and copied: of at most 200 seeks, \
         and 100 extents.",
        large.join(", "),
    ));
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{Count, Outcome};

    /// It may be that of a file which was all written by then.
    #[test]
    fn extents_without_a_place_are_the_fewest_of_all_rounds() {
        let round = |count| {
            let what = "fiemap, delalloc: extents without a place".to_owned();
            let outcome = Outcome { counts: vec![Count { what, count }], ..Outcome::default() };
            Kept { outcome, ..Kept::default() }
        };
        let rounds = vec![round(4), round(0)];
        let one = Series { name: DEFAULT_CACHE.to_owned(), rounds };
        assert_eq!(without_a_place(&one), Some(0));
        let all = Series { name: OURS.to_owned(), rounds: vec![round(4)] };
        assert_eq!(lack(&all, 4), None);
        assert!(lack_in(STATES[0], &one, 4).contains("0 of 4 extents"));
        assert_eq!(lack_in(STATES[1], &one, 4), "");
    }
}
