//! Every file read back as a tar archive, cold.

use std::path::Path;

use ubtrfs_testkit::{KernelMount, command};

use super::{CONTEST_COLUMNS, Context, making, push_contest, verdict};
use crate::child::{self, Usage};
use crate::contest::{Contestant, alternate};
use crate::error::{Error, Result};
use crate::report::Table;

const GOAL_S: f64 = 1.2;

/// An archive holds at least this share of the bytes that went in.
const OUTPUT_SHARE_MIN: f64 = 0.99;

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let source = context.source()?;
    let title = format!(
        "readback: {} files, {} MB, from an image on {} to a tar archive in a pipe, cold, {} rounds",
        source.file_count,
        source.bytes / 1_000_000,
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut table = Table::new("readback", title, &CONTEST_COLUMNS);
    let mut verdicts = Vec::new();
    for (form, arguments) in [("plain", &[][..]), ("zstd:1", &["--compress", "zstd:1"][..])] {
        let image = context.scratch.absent("image")?;
        let mut import = context.import(&source.directory, &image, source.image_bytes());
        child::run(import.args(arguments))?;
        context.check("image", source.file_count)?;
        let whole = |usage: Usage| whole(usage, source.bytes);
        let mut contestants = vec![Contestant::new("ubtrfs export", || {
            child::run_into_pipe(context.ubtrfs().arg("export").arg(&image).args(["/", "-"]))
                .and_then(whole)
        })];
        if context.kernel().is_ok() {
            contestants.push(Contestant::new("kernel tar", || kernel_tar(&image).and_then(whole)));
        }
        let series = alternate(contestants, context.options.round_count)?;
        push_contest(&mut table, form, &series);
        if context.options.scale >= 1.0 && form == "plain" {
            verdicts.push(verdict(form, series[0].wall_s(), GOAL_S, "s"));
        }
    }
    context.scratch.absent("image")?;
    table.note(verdicts.join(" "));
    if let Err(missing) = context.kernel() {
        table.note(format!("The kernel's rows are missing: {missing}."));
    }
    table.note(
        "Cold: a new process, or a new mount, finds nothing cached above the image; mount and \
         umount are counted.",
    );
    Ok(vec![table])
}

fn kernel_tar(image: &Path) -> Result<Usage> {
    let start = std::time::Instant::now();
    let mount = KernelMount::mount(&[image.to_owned()], &making::kernel_options(""), true)
        .map_err(|what| Error::Input { what })?;
    let mounting = start.elapsed();
    let tar =
        child::run_into_pipe(command("tar").args(["cf", "-", "-C"]).arg(mount.path()).arg("."));
    let mut usage = tar?;
    let start = std::time::Instant::now();
    mount.unmount();
    usage.wall += mounting + start.elapsed();
    Ok(usage)
}

/// Refuses a run that did not read everything.
fn whole(usage: Usage, source_bytes: u64) -> Result<Usage> {
    let wanted = source_bytes as f64 * OUTPUT_SHARE_MIN;
    if (usage.output_bytes as f64) < wanted {
        return Err(Error::Input {
            what: format!("{} bytes came out of {source_bytes}", usage.output_bytes),
        });
    }
    Ok(usage)
}
