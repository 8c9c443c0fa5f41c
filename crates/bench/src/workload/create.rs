//! Small files whose contents are kept in the tree.

use super::{Context, delayed_refs, making, verdict_at_least};
use crate::contest::alternate;
use crate::error::Result;
use crate::report::Table;

const FILES: u64 = 500_000;
/// At least so many times as fast as on the kernel's mount.
const TIMES_KERNEL_MIN: f64 = 5.0;

const SHAPE: [&str; 4] = ["--bytes", "2000", "--per-directory", "1000"];
const LARGE_CACHE: [&str; 6] =
    ["--bytes", "2000", "--per-directory", "1000", "--cache-mib", "1024"];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let count = context.scaled(FILES);
    let mut contestants = vec![
        making::ours(context, "ubtrfs", count, &SHAPE),
        making::ours(context, "ubtrfs, cache 1 GiB", count, &LARGE_CACHE),
    ];
    if context.kernel().is_ok() {
        contestants.push(making::kernel(context, count, "max_inline=2048", &SHAPE));
    }
    let series = alternate(contestants, context.options.round_count)?;
    let title = format!(
        "create: {count} files of 2000 bytes inline, 1000 a directory, one thread, on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut table = Table::new("create", title, &making::COLUMNS);
    making::push(&mut table, &series);
    for ours in series.iter().filter(|one| one.name != "kernel") {
        if let Some(times) = making::times_kernel(ours, &series) {
            let what = format!("{} against the kernel, commit included", ours.name);
            table.note(verdict_at_least(&what, times, TIMES_KERNEL_MIN, "times as fast"));
        }
    }
    if let Err(missing) = context.kernel() {
        table.note(format!("The kernel's row is missing: {missing}."));
    }
    table.note(
        "Ours in process, each file an operation of its own; the kernel's by openat, write, close \
         on a mount with max_inline=2048, then syncfs. Two copies of metadata for both. The time of \
         kernel threads is not in its CPU s.",
    );
    Ok(vec![table, delayed_refs::histogram("create", &series)])
}
