//! Peak memory under the cache option.

use super::Context;
use crate::child;
use crate::error::Result;
use crate::report::{Cell, Table};

const CACHE_MIB: [u64; 4] = [16, 64, 128, 512];
/// The default's bound.
const DEFAULT_PEAK_BYTES_MAX: u64 = 512 << 20;

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let source = context.source()?;
    let mut table = Table::new(
        "memory",
        format!(
            "memory: peak of import and export of {} files, {} MB, by the cache option",
            source.file_count,
            source.bytes / 1_000_000
        ),
        &[
            ("job", "job"),
            ("cache_bytes", "cache MiB"),
            ("peak_bytes", "peak MiB"),
            ("beyond_bytes", "beyond the cache"),
            ("wall_s", "wall s"),
        ],
    );
    for (job, arguments) in
        [("import plain", &[][..]), ("import zstd:1", &["--compress", "zstd:1"][..])]
    {
        for cache in [None].into_iter().chain(CACHE_MIB.map(Some)) {
            let image = context.scratch.absent("image")?;
            let mut import = context.import(&source.directory, &image, source.image_bytes());
            let usage = child::run(import.args(arguments).args(cache_arguments(cache)))?;
            push(&mut table, job, cache, &usage);
        }
    }
    for cache in [None].into_iter().chain(CACHE_MIB.map(Some)) {
        let mut export = context.ubtrfs();
        export.arg("export").args(cache_arguments(cache)).arg(context.scratch.path("image"));
        let usage = child::run_into_pipe(export.args(["/", "-"]))?;
        push(&mut table, "export zstd:1", cache, &usage);
    }
    context.scratch.absent("image")?;
    let peaks = table.rows.iter().filter_map(|row| match (&row[1], &row[2]) {
        (Cell::Text(_), Cell::Bytes(peak)) => Some(*peak),
        _ => None,
    });
    let most = peaks.max().unwrap_or(0);
    let met = if most <= DEFAULT_PEAK_BYTES_MAX { "met" } else { "NOT met" };
    table.note(format!(
        "Goal: ≤ {} MiB with the default cache; most of all: {} MiB: {met}.",
        DEFAULT_PEAK_BYTES_MAX >> 20,
        most >> 20
    ));
    Ok(vec![table])
}

fn cache_arguments(cache_mib: Option<u64>) -> Vec<String> {
    cache_mib.map_or_else(Vec::new, |mib| vec!["--cache".to_owned(), format!("{mib}M")])
}

fn push(table: &mut Table, job: &str, cache_mib: Option<u64>, usage: &child::Usage) {
    let cache = cache_mib.map(|mib| mib << 20);
    table.push(vec![
        Cell::text(job),
        cache.map_or_else(|| Cell::text("default"), Cell::Bytes),
        Cell::Bytes(usage.peak_bytes),
        cache.map_or(Cell::Missing, |cache| Cell::Bytes(usage.peak_bytes.saturating_sub(cache))),
        Cell::Seconds(usage.wall.as_secs_f64()),
    ]);
}
