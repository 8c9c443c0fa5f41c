//! How many requests each job needs: of ours, and of ours without what spares requests (`-o naive`).
//!
//! Invariants:
//! 1. Each job has a mount of its own, so that the counts of a mount are those of a job, its beginning with nothing cached included.
//! 2. The filesystem is the same for all jobs of a server, as each needs what those before it left.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::super::Context;
use super::{Job, Round, Work, perform};
use crate::error::{Error, Result};
use crate::peer::Peer;
use crate::report::{Cell, Table};

/// Before and after.
const SERVERS: [Peer; 2] = [Peer::UbtrfsNaive, Peer::Ubtrfs];
/// The file in which the server writes its counts.
const COUNTS: &str = "request-counts";
const NOT_COUNTED: &str = "mount: requests, not counted";

/// How often each operation was asked for, by its number in `linux/fuse.h`.
type Counts = BTreeMap<u32, u64>;

/// One server's, in the order of [`Job::ALL`].
type Counted = Vec<(Job, Counts)>;

/// The table of all requests a job, and that of each kind. Where they cannot be counted, they say so.
pub(super) fn tables(context: &Context<'_>, work: &Work) -> Result<Vec<Table>> {
    let mut all = Vec::new();
    let mut missing = Vec::new();
    for server in SERVERS {
        match count(context, server, work) {
            Ok(counted) => all.push(Some(counted)),
            Err(error) => {
                // What a command said has lines of its own.
                let why = error.to_string().replace('\n', " ");
                missing.push(format!("{} is left out: {}.", server.name(), why.trim_end()));
                all.push(None);
            }
        }
        server.clear(context.scratch)?;
    }
    let Ok([before, after]) = <[Option<Counted>; 2]>::try_from(all) else {
        return Err(Error::Input { what: "requests of two servers are counted".to_owned() });
    };
    let mut tables = if before.is_none() && after.is_none() {
        vec![Table::new("mount_requests", NOT_COUNTED, &TOTALS_COLUMNS)]
    } else {
        vec![totals(before.as_ref(), after.as_ref()), kinds(before.as_ref(), after.as_ref())]
    };
    for note in missing {
        tables[0].note(note);
    }
    Ok(tables)
}

fn count(context: &Context<'_>, server: Peer, work: &Work) -> Result<Counted> {
    let (options, scratch) = (context.options, context.scratch);
    server.make(options, scratch)?;
    let mut counted = Vec::new();
    for job in Job::ALL {
        let counts = scratch.absent(COUNTS)?;
        let mounted = server.mount_counted(options, scratch, &counts)?;
        perform(context, server, job, &mounted, work, &mut Round::default())?;
        mounted.end()?;
        counted.push((job, read(&counts)?));
    }
    scratch.absent(COUNTS)?;
    Ok(counted)
}

/// A line each: the operation's number, a space, how often.
fn read(path: &Path) -> Result<Counts> {
    let text = std::fs::read_to_string(path)
        .map_err(Error::io("read what the server counted (UBTRFS_REQUEST_COUNTS)"))?;
    parse(&text).ok_or_else(|| Error::Input { what: format!("{}: not counts", path.display()) })
}

fn parse(text: &str) -> Option<Counts> {
    let line = |line: &str| {
        let (operation, count) = line.split_once(' ')?;
        let operation: u32 = operation.parse().ok()?;
        let count: u64 = count.trim().parse().ok()?;
        Some((operation, count))
    };
    text.lines().map(line).collect()
}

const TOTALS_COLUMNS: [(&str, &str); 5] = [
    ("job", "job"),
    ("before", "naive"),
    ("after", "ubtrfs"),
    ("share", "share"),
    ("asked", "what ubtrfs is asked"),
];

fn of_job(counted: Option<&Counted>, job: Job) -> Option<&Counts> {
    counted?.iter().find(|(other, _)| *other == job).map(|(_, counts)| counts)
}

fn totals(before: Option<&Counted>, after: Option<&Counted>) -> Table {
    let title =
        "mount: requests a job, before and after what spares them; each job on a mount of its own";
    let mut table = Table::new("mount_requests", title, &TOTALS_COLUMNS);
    let total = |counts: Option<&Counts>| counts.map(|counts| counts.values().sum::<u64>());
    let cell = |count: Option<u64>| count.map_or(Cell::Missing, Cell::Count);
    for job in Job::ALL {
        let (before, after) = (of_job(before, job), of_job(after, job));
        let share = match (total(before), total(after)) {
            (Some(before), Some(after)) if before > 0 => Cell::Ratio(after as f64 / before as f64),
            _ => Cell::Missing,
        };
        table.push(vec![
            Cell::text(job.name()),
            cell(total(before)),
            cell(total(after)),
            share,
            Cell::text(after.map(in_words).unwrap_or_default()),
        ]);
    }
    table.note(
        "Naive: ubtrfs that answers OPEN, OPENDIR, FLUSH and RELEASE, lets names and attributes expire at once, and has no \
         READDIRPLUS. What a job does once before it is timed, so that what can be cached is, is counted here, too: tar back is two \
         of it, stat and readdir are six and the walk that finds what there is. Other than in the timing nothing is cached when a job \
         begins. INIT is not counted.",
    );
    table
}

/// The most frequent first.
fn in_words(counts: &Counts) -> String {
    let mut sorted: Vec<(&u32, &u64)> = counts.iter().collect();
    sorted.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    let words: Vec<String> = sorted
        .into_iter()
        .map(|(operation, count)| format!("{} {count}", name(*operation)))
        .collect();
    words.join(", ")
}

fn kinds(before: Option<&Counted>, after: Option<&Counted>) -> Table {
    let columns =
        [("job", "job"), ("request", "request"), ("before", "naive"), ("after", "ubtrfs")];
    let mut table = Table::new("mount_request_kinds", "mount: requests a job, by kind", &columns);
    for job in Job::ALL {
        let sides = [of_job(before, job), of_job(after, job)];
        let operations: BTreeSet<u32> =
            sides.iter().flatten().flat_map(|counts| counts.keys().copied()).collect();
        for operation in operations {
            // What was counted at all, and is not among it, was not asked for.
            let cell = |counts: Option<&Counts>| match counts {
                Some(counts) => Cell::Count(counts.get(&operation).copied().unwrap_or(0)),
                None => Cell::Missing,
            };
            let words = [Cell::text(job.name()), Cell::text(name(operation))];
            table.push(words.into_iter().chain(sides.map(cell)).collect());
        }
    }
    table
}

/// As `linux/fuse.h` has it.
fn name(operation: u32) -> String {
    let name = match operation {
        1 => "LOOKUP",
        2 => "FORGET",
        3 => "GETATTR",
        4 => "SETATTR",
        5 => "READLINK",
        6 => "SYMLINK",
        8 => "MKNOD",
        9 => "MKDIR",
        10 => "UNLINK",
        11 => "RMDIR",
        12 => "RENAME",
        13 => "LINK",
        14 => "OPEN",
        15 => "READ",
        16 => "WRITE",
        17 => "STATFS",
        18 => "RELEASE",
        20 => "FSYNC",
        21 => "SETXATTR",
        22 => "GETXATTR",
        23 => "LISTXATTR",
        24 => "REMOVEXATTR",
        25 => "FLUSH",
        27 => "OPENDIR",
        28 => "READDIR",
        29 => "RELEASEDIR",
        30 => "FSYNCDIR",
        34 => "ACCESS",
        35 => "CREATE",
        36 => "INTERRUPT",
        38 => "DESTROY",
        39 => "IOCTL",
        42 => "BATCH_FORGET",
        43 => "FALLOCATE",
        44 => "READDIRPLUS",
        45 => "RENAME2",
        46 => "LSEEK",
        47 => "COPY_FILE_RANGE",
        50 => "SYNCFS",
        51 => "TMPFILE",
        52 => "STATX",
        other => return other.to_string(),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_server_are_read_and_told_with_the_most_frequent_first() {
        let counts = parse("1 20\n16 300\n4 20\n999 1\n").unwrap();
        assert_eq!(in_words(&counts), "WRITE 300, LOOKUP 20, SETATTR 20, 999 1");
        assert_eq!(parse(""), Some(Counts::new()));
        assert!(parse("1\n").is_none() && parse("LOOKUP 3\n").is_none());
    }

    #[test]
    fn tables_have_before_and_after_of_each_job() {
        let of = |count: u64| vec![(Job::Untar, Counts::from([(1, count), (35, 10)]))];
        let (before, after) = (of(90), of(10));
        let json = totals(Some(&before), Some(&after)).to_json();
        assert_eq!(json["rows"].as_array().unwrap().len(), Job::ALL.len());
        assert_eq!(json["rows"][0]["before"], 100);
        assert_eq!(json["rows"][0]["after"], 20);
        assert_eq!(json["rows"][0]["share"], 0.2);
        assert!(json["rows"][1]["after"].is_null());
        let json = kinds(None, Some(&after)).to_json();
        assert_eq!(json["rows"][1]["request"], "CREATE");
        assert!(json["rows"][1]["before"].is_null());
        assert_eq!(json["rows"][1]["after"], 10);
    }
}
