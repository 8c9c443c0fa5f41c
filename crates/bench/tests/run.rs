//! The command as a user runs it: seek, zeroing and sequential at a thousandth of their size, alone and beside the kernel, and what it
//! writes. No time is judged.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use ubtrfs_testkit::oracle::{self, Oracle};

/// Of the sizes that the workloads have at full scale.
const SCALE: &str = "0.001";
const BEFORE: &str = "ubtrfs, before: no hint, ranges locked in the tree";
const LOCKED: &str = "ubtrfs, ranges locked in the tree";
const NO_HINT: &str = "ubtrfs, no hint";
const NO_SLABS: &str = "ubtrfs, each folio from the allocator";
const DEFAULT: &str = "ubtrfs, default cache";
const MOUNTED: &str = "ubtrfs, mounted";
const BTRFS: &str = "kernel btrfs";
const XFS: &str = "kernel xfs";

/// What a run left.
struct Run {
    stdout: String,
    figures: Value,
    page: String,
}

impl Run {
    fn rows(&self, table: &str) -> &[Value] {
        let tables = self.figures["tables"].as_array().unwrap();
        let found = tables.iter().find(|found| found["name"] == table);
        found.unwrap_or_else(|| panic!("table {table} is missing"))["rows"].as_array().unwrap()
    }

    /// The only row in which columns are as told.
    fn row(&self, table: &str, told: &[(&str, Value)]) -> &Value {
        let rows = self.rows(table).iter();
        let mut found = rows.filter(|row| told.iter().all(|(column, value)| row[column] == *value));
        let (row, other) = (found.next(), found.next());
        assert!(other.is_none(), "{table}: more than one row {told:?}");
        row.unwrap_or_else(|| panic!("{table}: no row {told:?}"))
    }

    fn notes(&self, table: &str) -> String {
        let tables = self.figures["tables"].as_array().unwrap();
        tables.iter().find(|found| found["name"] == table).unwrap()["notes"].to_string()
    }

    /// What is above 0 in each row of `who`, of which there are so many.
    fn require_figures(&self, table: &str, name: &str, row_count: usize, columns: &[&str]) {
        let rows: Vec<_> = self.rows(table).iter().filter(|row| row["who"] == name).collect();
        assert_eq!(rows.len(), row_count, "{table}: {name}");
        for row in rows {
            for column in columns {
                let value = row[*column].as_f64();
                assert!(value.is_some_and(|value| value > 0.0), "{table}: {column} of {row}");
            }
        }
    }

    fn count(&self, table: &str, told: &[(&str, Value)], column: &str) -> u64 {
        let row = self.row(table, told);
        row[column].as_u64().unwrap_or_else(|| panic!("{table}: {column} of {row}"))
    }
}

fn run(directory: &Path, vs: &str, ubtrfs: &Path) -> Run {
    let (json, html) = (directory.join("figures.json"), directory.join("figures.html"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs-bench"));
    command.args(["seek", "zeroing", "sequential", "--vs", vs, "--rounds", "1"]);
    command.args(["--scale", SCALE, "--ubtrfs"]).arg(ubtrfs);
    let sources = sources();
    command.arg("--source").arg(sources.path());
    command.arg("--scratch").arg(directory);
    command.arg("--json").arg(&json).arg("--html").arg(&html);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Run {
        stdout: String::from_utf8(output.stdout).unwrap(),
        figures: serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap(),
        page: std::fs::read_to_string(html).unwrap(),
    }
}

/// A run that fails, and what it says.
fn failing(directory: &Path, source: &Path) -> (String, std::path::PathBuf) {
    let json = directory.join("figures.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs-bench"));
    command.args(["zeroing", "sequential", "--vs", "none", "--rounds", "1", "--scale", SCALE]);
    command.arg("--source").arg(source).arg("--scratch").arg(directory).arg("--json").arg(&json);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    (String::from_utf8(output.stderr).unwrap(), json)
}

/// A thousandth of the tree is few files: this one has as many.
fn sources() -> tempfile::TempDir {
    let sources = tempfile::tempdir().unwrap();
    for number in 0..2000 {
        let below = sources.path().join(format!("d{}", number % 7));
        let text = format!("{number}\n");
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(below.join(number.to_string()), text.repeat(100)).unwrap();
    }
    sources
}

/// A run of half an hour once ended with its last job, for want of sources, and told nothing of those before. This one fails where it
/// has to name a file to the job of sources.
#[test]
fn what_was_measured_before_a_job_fails_is_told() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join(OsStr::from_bytes(b"\xff"));
    std::fs::create_dir(&directory).unwrap();
    let (said, json) = failing(&directory, sources().path());
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let ended_by = figures["ended_by"].as_str().unwrap();
    assert!(ended_by.starts_with("sequential: ") && ended_by.contains("UTF-8"), "{ended_by}");
    assert!(said.contains(ended_by), "{said}");
    let run = Run { stdout: String::new(), figures, page: String::new() };
    assert!(!run.rows("zeroing").is_empty());
    // What needs no sources: four plain jobs and the copy, ours and the plain file's.
    for name in ["ubtrfs", "plain file"] {
        run.require_figures("sequential", name, 5, &["write_s", "read_s"]);
    }
    assert!(
        run.rows("sequential").iter().all(|row| !row["job"].as_str().unwrap().contains("zstd"))
    );
    assert!(
        !run.notes("sequential").contains("zstd:1, against"),
        "no verdict on what was not measured"
    );
}

#[test]
fn a_run_without_the_sources_it_needs_does_not_begin() {
    let directory = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("empty"), "").unwrap();
    let broken = directory.path().join("broken.tar.xz");
    std::fs::write(&broken, "no tarball").unwrap();
    for source in [empty.path(), &broken, &directory.path().join("nothing here")] {
        let (said, json) = failing(directory.path(), source);
        assert!(said.contains(source.to_str().unwrap()), "{said}");
        assert!(!json.exists());
    }
}

fn who(name: &str) -> (&str, Value) {
    ("who", name.into())
}

fn what(done: &str) -> (&str, Value) {
    ("what", done.into())
}

#[test]
fn seek_zeroing_and_sequential_tell_all_that_they_measured() {
    let directory = tempfile::tempdir().unwrap();
    // Which mounts there are must not decide what is judged, and the command may be that of another build.
    let run = run(directory.path(), "none", &directory.path().join("missing"));
    judge_seek(&run);
    judge_zeroing(&run);
    judge_published(&run);
    judge_sequential(&run);
    judge_texts(&run);
    // Images go with the directory that they were made in.
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 2, "JSON and page alone");
}

#[test]
fn seek_zeroing_and_sequential_beside_the_kernel_have_its_rows() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::KernelXfs, Oracle::Fuse]) {
        return;
    }
    let ubtrfs = Path::new(env!("CARGO_BIN_EXE_ubtrfs-bench")).with_file_name("ubtrfs");
    assert!(ubtrfs.exists(), "`cargo build -p ubtrfs-cli` makes {}", ubtrfs.display());
    let directory = tempfile::tempdir().unwrap();
    let run = run(directory.path(), "kernel", &ubtrfs);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "JSON and page alone");
    let kernels = &[BTRFS, XFS];

    let by_calls = [
        "seek_delalloc_ns",
        "seek_synced_ns",
        "seek_reopened_ns",
        "copy_delalloc_ms",
        "copy_synced_ms",
        "copy_reopened_ms",
    ];
    run.require_figures("seek", MOUNTED, 6, &by_calls);
    let fiemap = ["fiemap_delalloc_ms", "fiemap_synced_ms", "fiemap_reopened_ms"];
    for name in kernels {
        run.require_figures("seek", name, 6, &[&by_calls[..], &fiemap].concat());
        for row in run.rows("seek").iter().filter(|row| row["who"] == *name) {
            assert_eq!(row["without_a_place"], row["extents"], "{row}");
        }
    }
    // What is not known to have been delalloc is not judged as if it was.
    let notes = run.notes("seek");
    for told in [
        "not judged, as what of the file of ubtrfs, mounted was delalloc is not known; the kernel's time is that of parts",
        "131 extents, kernel btrfs",
        "has an image of 8 TiB",
    ] {
        assert!(notes.contains(told), "{told}: {notes}");
    }

    for name in kernels.iter().chain(&[MOUNTED]) {
        run.require_figures("zeroing", name, 3, &["wall_s", "wall_ns", "times_ours", "fsync_s"]);
        run.require_figures("zeroed_range", name, 3, &["wall_s", "wall_ns", "fsync_s"]);
        let stored = run.row("mapped_store", &[who(name)]);
        assert!(stored["wrong_bytes"].is_u64() && stored["wrong_bytes_reopened"].is_u64());
        if *name == MOUNTED {
            assert_eq!(
                (&stored["wrong_bytes"], &stored["wrong_bytes_reopened"]),
                (&0.into(), &0.into())
            );
        }
    }
    let speeds = ["write_s", "write_times_ours", "read_s", "read_times_ours"];
    // Plain by calls of three lengths, and to whole pages; compressed, two kinds of contents.
    run.require_figures("sequential", BTRFS, 6, &speeds);
    run.require_figures("sequential", XFS, 4, &speeds);
}

fn judge_seek(run: &Run) {
    let extents_of = |name: &str| -> Vec<u64> {
        let rows = run.rows("seek").iter().filter(|row| row["who"] == name);
        rows.map(|row| row["extents"].as_u64().unwrap()).collect()
    };
    for name in ["ubtrfs", DEFAULT, NO_HINT, NO_SLABS, BEFORE, LOCKED] {
        assert_eq!(extents_of(name), [1, 1, 4, 16, 66, 131], "{name}");
    }
    // Whatever is off, and however large the file, nothing is left out.
    for row in run.rows("seek") {
        for (column, value) in row.as_object().unwrap() {
            let is_above_0 = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
            let is_there = match value.as_array() {
                Some(rounds) => rounds.len() == 1 && rounds.iter().all(is_above_0),
                None => value.is_string() || is_above_0(value),
            };
            assert!(is_there, "{column}: {row}");
        }
        for column in ["seek_delalloc_ns", "copy_synced_ms", "fiemap_reopened_ms"] {
            assert_eq!(row[format!("{column}_rounds")][0], row[column], "{row}");
        }
        assert_eq!(row["without_a_place"], row["extents"], "{row}");
    }

    let done = |name: &str, extents: u64, done: &str, column: &str| {
        run.count("seek_counts", &[who(name), ("extents", extents.into()), what(done)], column)
    };
    let ours = |what: &str, column: &str| done("ubtrfs", 131, what, column);
    // A block of each extent is written, in one transaction.
    assert_eq!(ours("fsync", "pages_flushed"), 131);
    assert_eq!(ours("fsync", "commits"), 1);
    for column in
        ["tree_searches", "tree_blocks_written", "runs_flushed", "device_writes", "device_flushes"]
    {
        assert!(ours("fsync", column) > 0, "{column}");
    }
    // To look at what is dirty asks nothing of trees or devices; to look at what is not changes nothing.
    for look in ["seek", "copy", "fiemap"] {
        for column in ["tree_searches", "tree_blocks_read", "device_reads"] {
            assert_eq!(ours(&format!("{look}, delalloc"), column), 0, "{look}: {column}");
        }
        assert!(ours(&format!("{look}, reopened"), "tree_searches") > 0, "{look}");
        for column in ["tree_blocks_written", "pages_flushed", "device_writes", "commits"] {
            assert_eq!(ours(&format!("{look}, reopened"), column), 0, "{look}: {column}");
        }
    }
    let all = ["write", "fsync"].map(str::to_owned).into_iter().chain(
        ["delalloc", "synced", "reopened"]
            .into_iter()
            .flat_map(|state| ["seek", "copy", "fiemap"].map(|look| format!("{look}, {state}"))),
    );
    let all: Vec<_> = all.collect();
    for (name, extents) in [
        ("ubtrfs", 16),
        ("ubtrfs", 66),
        ("ubtrfs", 131),
        (BEFORE, 131),
        (LOCKED, 131),
        (NO_HINT, 131_u64),
    ] {
        let rows = run.rows("seek_counts").iter();
        let told = rows.filter(|row| row["who"] == name && row["extents"] == extents);
        let told: Vec<_> = told.map(|row| row["what"].as_str().unwrap()).collect();
        assert_eq!(told, all, "{name}, {extents}");
        assert_eq!(done(name, extents, "fsync", "pages_flushed"), extents, "{name}");
    }
    assert!(ours("copy, reopened", "device_reads") > 0);
    assert!(ours("copy, reopened", "tree_blocks_read") > 0);
    // The hint is what spares searches.
    for name in [BEFORE, NO_HINT] {
        let searches = |name: &str| done(name, 16, "seek, delalloc", "state_searches");
        assert!(searches(name) >= 2 * 16 && searches("ubtrfs") < 16, "{name}");
    }
}

/// A time has its shortest, its longest and all rounds, of which there is one, and what the process worked.
fn judge_times(row: &Value, time: &str, cpu: &str) {
    let name = time.strip_suffix("_s").unwrap();
    let wall_s = row[time].as_f64().unwrap();
    assert!(wall_s > 0.0, "{row}");
    for same in [
        &row[format!("{name}_min_s")],
        &row[format!("{name}_max_s")],
        &row[format!("{time}_rounds")][0],
    ] {
        assert_eq!(same.as_f64(), Some(wall_s), "{row}");
    }
    assert!(row[cpu].as_f64().unwrap() >= 0.0, "{row}");
}

/// Ours are the figures of the tables beside them.
fn judge_published(run: &Run) {
    let written = "ubtrfs, before: written back first";
    for (table, pair, column, before, rows) in [
        ("seek_published", "131 extents, a seek, synced, ns", "seek_synced_ns", BEFORE, 3 + 27),
        ("seek_published", "16 extents, copy, reopened, ms", "copy_reopened_ms", BEFORE, 3 + 27),
        ("zeroing_published", "17 times, s", "wall_s", written, 1 + 3),
    ] {
        assert_eq!(run.rows(table).len(), rows);
        let size = pair.split(' ').next().unwrap().parse::<u64>().unwrap();
        let (from, sizes) =
            if column == "wall_s" { ("zeroing", "rounds") } else { ("seek", "extents") };
        let told = run.row(table, &[who("ubtrfs"), what(pair)]);
        let figure = |name: &str| &run.row(from, &[who(name), (sizes, size.into())])[column];
        assert_eq!((&told["before"], &told["after"]), (figure(before), figure("ubtrfs")));
        let times = told["before"].as_f64().unwrap() / told["after"].as_f64().unwrap();
        // As exact as JSON tells them.
        assert!((told["times"].as_f64().unwrap() / times - 1.0).abs() < 1e-9, "{told}");
    }
    let published = run.row("zeroing_published", &[who("published")]);
    assert_eq!(
        (published["before"].as_f64(), published["after"].as_f64()),
        (Some(14.103), Some(0.144))
    );
}

fn judge_zeroing(run: &Run) {
    const BEFORE: &str = "ubtrfs, before: written back first";
    const HUGE_PAGES: &str = "ubtrfs, huge pages";
    let all = ["ubtrfs", DEFAULT, BEFORE, NO_SLABS, HUGE_PAGES];
    for rounds in [5, 17, 50_u64] {
        for name in all {
            let row = run.row("zeroing", &[who(name), ("rounds", rounds.into())]);
            judge_times(row, "wall_s", "cpu_s");
            assert!(row["peak_bytes"].as_u64().unwrap() > 0, "{row}");
        }
    }
    assert_eq!(run.rows("zeroing").len(), 3 * all.len());
    let count = |name: &str, done: &str, column: &str| {
        run.count("zeroing_counts", &[who(name), what(done)], column)
    };
    for name in ["ubtrfs", DEFAULT] {
        for column in ["pages_flushed", "device_writes", "tree_blocks_written", "commits"] {
            assert_eq!(count(name, "rounds", column), 0, "{name}: {column}");
        }
        assert_eq!(count(name, "fsync", "pages_flushed"), 50, "{name}");
        for column in ["tree_searches", "tree_blocks_written", "runs_flushed", "commits"] {
            assert!(count(name, "fsync", column) > 0, "{name}: {column}");
        }
    }
    assert!(count(BEFORE, "rounds", "pages_flushed") >= 50);
    assert!(count(BEFORE, "rounds", "tree_searches") > count("ubtrfs", "rounds", "tree_searches"));
    for blocks in [2, 5, 16_u64] {
        let zeroed = |name: &str, column: &str| {
            run.count("zeroed_range", &[who(name), ("blocks", blocks.into())], column)
        };
        assert_eq!((zeroed("ubtrfs", "pages_flushed"), zeroed("ubtrfs", "device_writes")), (0, 0));
        assert!(zeroed("ubtrfs", "mappings") > 0);
        assert_eq!(zeroed(BEFORE, "pages_flushed"), blocks);
        for name in ["ubtrfs", BEFORE, "ubtrfs, ZERO_RANGE"] {
            let row = run.row("zeroed_range", &[who(name), ("blocks", blocks.into())]);
            judge_times(row, "wall_s", "cpu_s");
            let seconds = |column: &str| row[column].as_f64().unwrap();
            let sum = seconds("wall_s") + seconds("fsync_s");
            assert!((seconds("both_s") - sum).abs() < 1e-9, "{row}");
            assert!(seconds("both_times_ours") > 0.0, "{row}");
        }
    }
    let stored = run.row("mapped_store", &[who("ubtrfs")]);
    assert_eq!((&stored["wrong_bytes"], &stored["wrong_bytes_reopened"]), (&0.into(), &0.into()));
    let notes = run.notes("mapped_store");
    assert!(notes.contains("Goal, ubtrfs: no wrong bytes; found 0: met."), "{notes}");
}

fn judge_sequential(run: &Run) {
    let (by_64, by_4) = ("plain by 64 KiB", "plain by 4 KiB");
    let of_sources = "zstd:1 of sources";
    let to_pages = "plain to whole pages";
    let beside_plain = ["plain", to_pages, by_64, by_4, "copy"];
    let jobs: Vec<&str> =
        beside_plain.iter().flat_map(|job| [*job; 2]).chain(["zstd:1", of_sources]).collect();
    let rows = run.rows("sequential");
    assert!(rows.iter().map(|row| &row["job"]).eq(&jobs), "{rows:?}");
    for row in rows {
        judge_times(row, "write_s", "write_cpu_s");
        judge_times(row, "read_s", "read_cpu_s");
        assert_eq!(row["device_writes"].is_null(), row["who"] == "plain file", "{row}");
        let is_packed = row["job"].as_str().unwrap().starts_with("zstd");
        assert_eq!(row["stored_bytes"].as_u64().is_some_and(|bytes| bytes > 0), is_packed, "{row}");
    }
    for job in beside_plain.into_iter().chain(["zstd:1", of_sources]) {
        let count = |done: &str, column: &str| {
            let told = [("job", job.into()), who("ubtrfs"), what(done)];
            run.count("sequential_counts", &told, column)
        };
        // 4 MiB.
        assert_eq!(count("write", "pages_flushed"), 1024, "{job}");
        for column in ["tree_searches", "tree_blocks_written", "device_writes", "commits"] {
            assert!(count("write", column) > 0, "{job}: {column}");
        }
        for column in ["tree_searches", "tree_blocks_read", "device_reads"] {
            assert!(count("read", column) > 0, "{job}: {column}");
        }
        assert_eq!(count("read", "tree_blocks_written"), 0, "{job}");
    }
}

/// What is printed and the page have each table, with its notes.
fn judge_texts(run: &Run) {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let tables = run.figures["tables"].as_array().unwrap();
    let names: Vec<&str> = tables.iter().map(|table| table["name"].as_str().unwrap()).collect();
    let expected = [
        "seek",
        "seek_published",
        "seek_counts",
        "zeroing",
        "zeroing_published",
        "zeroing_counts",
        "zeroed_range",
        "mapped_store",
        "sequential",
        "sequential_counts",
    ];
    assert_eq!(names, expected);
    for table in tables {
        let title = table["title"].as_str().unwrap();
        assert!(run.stdout.contains(&format!("**{title}**\n\n|")), "{title}");
        assert!(run.page.contains(&format!(">{}</h2>", escaped(title))), "{title}");
        for note in table["notes"].as_array().unwrap() {
            let note = note.as_str().unwrap();
            assert!(run.stdout.contains(note) && run.page.contains(&escaped(note)), "{note}");
        }
    }
    let notes = tables[0]["notes"].to_string();
    for told in [
        "20 seeks, and 10 extents copied, in the middle of each tenth of the file",
        "131 extents, ubtrfs, before",
        "mounted is missing",
    ] {
        assert!(notes.contains(told), "{told}: {notes}");
    }
    // Goals are for what is as large as they say.
    let mut goals = 0;
    for goal in run.stdout.split("Goal, ").skip(1) {
        let goal = goal.split("Goal, ").next().unwrap();
        // Of bytes none may be wrong, however few there are.
        if goal.contains("no wrong bytes") {
            continue;
        }
        assert!(goal.contains("not judged") && !goal.contains(": met"), "{goal}");
        goals += 1;
    }
    assert!(goals >= 10, "{}", run.stdout);
    for told in [
        "ubtrfs: a seek, delalloc",
        "ubtrfs, default cache: a copy of 1 MiB, reopened",
        "an extent of a copy, synced, at any size",
    ] {
        assert!(notes.contains(told), "{told}: {notes}");
    }
    for table in ["seek", "sequential"] {
        let notes = run.notes(table);
        assert!(notes.contains("vm.dirty_background_") && notes.contains(", vm.dirty_"), "{notes}");
    }
    // A row for each of JSON's, beside headings, rules and text.
    let row_count: usize = names.iter().map(|name| run.rows(name).len()).sum();
    let printed = run.stdout.lines().filter(|line| line.starts_with('|')).count();
    assert_eq!(printed, row_count + 2 * names.len());

    // What was asked for, without the paths that were, and where the source stood.
    let arguments = "seek zeroing sequential --rounds 1 --scale 0.001 --vs none";
    assert_eq!(run.figures["arguments"], arguments);
    let commit = run.figures["commit"].as_str().unwrap();
    for price in ["syscall_ns", "fresh_page_ns_at_start", "fresh_page_ns_at_end"] {
        assert!(run.figures["machine"][price].as_f64().unwrap() > 0.0, "{price}");
    }
    assert!(run.stdout.contains("a page of fresh memory touched"));
    for text in [&run.stdout, &run.page] {
        assert!(text.contains(&format!("ubtrfs-bench {arguments}; at ")) && text.contains(commit));
    }
    assert!(run.page.starts_with("<!doctype html>") && run.page.ends_with("</html>\n"));
    assert!(run.page.matches("<svg").count() >= 5);
    // Those of writing and reading, whose bars are by job.
    for job in ["plain by 64 KiB", "plain by 4 KiB", "copy", "zstd:1 of sources"] {
        assert!(run.page.matches(&format!(">{job}</text>")).count() == 2, "{job}");
    }
    assert_eq!(run.page.matches("<svg").count(), run.page.matches("</svg>").count());
    for asks in ["http:", "https:", "<script", "<link", "<img", "src=", "@import", "url("] {
        assert!(!run.page.contains(asks), "{asks}");
    }
}
