//! Whether time a file stays the same as the tree grows.

use super::Context;
use crate::child;
use crate::contest::{Contestant, alternate};
use crate::error::{Error, Result};
use crate::report::{Cell, Table};

/// Time a unit stays within this factor over the three sizes.
const GROWTH_MAX: f64 = 1.3;
const FRACTIONS: [(&str, f64); 3] = [("1/10", 0.1), ("1/3", 1.0 / 3.0), ("1", 1.0)];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let all = context.source()?;
    let mut table = Table::new(
        "growth",
        format!(
            "growth: ubtrfs import of parts of the tree, {} rounds",
            context.options.round_count
        ),
        &[
            ("job", "job"),
            ("size", "size"),
            ("files", "files"),
            ("bytes", "MiB"),
            ("wall_s", "wall s"),
            ("us_per_file", "µs a file"),
            ("cpu_us_per_file", "CPU µs a file"),
        ],
    );
    let mut samples = Vec::new();
    for (name, fraction) in FRACTIONS {
        let directory = context.scratch.path(&format!("part-{}", samples.len()));
        let part = if fraction < 1.0 { all.sample(fraction, &directory)? } else { all.clone() };
        samples.push((name, part));
    }
    for (job, arguments) in [("plain", &[][..]), ("zstd:1", &["--compress", "zstd:1"][..])] {
        let contestants = samples
            .iter()
            .map(|(name, part)| {
                Contestant::new(*name, || {
                    let image = context.scratch.absent("image")?;
                    // One length for all, so that only the files differ.
                    let len_bytes = all.image_bytes();
                    child::run(context.import(&part.directory, &image, len_bytes).args(arguments))
                })
            })
            .collect();
        let series = alternate(contestants, context.options.round_count)?;
        let mut per_file = Vec::new();
        for ((name, part), one) in samples.iter().zip(&series) {
            let files = part.file_count as f64;
            per_file.push(one.wall_s() / files);
            table.push(vec![
                Cell::text(job),
                Cell::text(*name),
                Cell::Count(part.file_count),
                Cell::Bytes(part.bytes),
                Cell::Seconds(one.wall_s()),
                Cell::Ratio(one.wall_s() * 1e6 / files),
                Cell::Ratio(one.cpu_s() * 1e6 / files),
            ]);
        }
        let growth = per_file[per_file.len() - 1] / per_file[0];
        let met = if growth <= GROWTH_MAX { "met" } else { "NOT met" };
        table.note(format!(
            "Goal, {job}: time a file at full size ≤ {GROWTH_MAX} × that at a tenth; measured \
             {growth:.2}: {met}."
        ));
    }
    context.scratch.absent("image")?;
    for (index, (_, part)) in samples.iter().enumerate() {
        if part.directory != all.directory {
            std::fs::remove_dir_all(&part.directory)
                .map_err(Error::io(format!("remove part {index}")))?;
        }
    }
    Ok(vec![table])
}
