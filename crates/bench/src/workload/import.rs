//! An image from a directory.

use std::path::Path;

use ubtrfs_testkit::{KernelMount, command};

use super::{CONTEST_COLUMNS, Context, making, push_contest, verdict};
use crate::child::{self, Usage};
use crate::contest::{Contestant, Series, alternate};
use crate::error::{Error, Result};
use crate::report::Table;
use crate::source::Source;

/// Issue: at least so many times as fast as `mkfs.btrfs --rootdir`.
const TIMES_MKFS_MIN: f64 = 3.0;

/// A way of storing file data.
struct Form {
    name: &'static str,
    ours: &'static [&'static str],
    mount_options: &'static str,
    goal_s: f64,
}

const FORMS: [Form; 2] = [
    Form { name: "plain", ours: &[], mount_options: "", goal_s: 2.0 },
    Form {
        name: "zstd:1",
        ours: &["--compress", "zstd:1"],
        mount_options: "compress=zstd:1",
        goal_s: 4.0,
    },
];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let source = context.source()?;
    let title = format!(
        "import: an image from a directory of {} files, {} MB, all on {}, {} rounds",
        source.file_count,
        source.bytes / 1_000_000,
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut table = Table::new("import", title, &CONTEST_COLUMNS);
    let mut verdicts = Vec::new();
    for form in &FORMS {
        let series = contest(context, source, form)?;
        push_contest(&mut table, form.name, &series);
        let ours = series[0].wall_s();
        if context.options.scale >= 1.0 {
            verdicts.push(verdict(form.name, ours, form.goal_s, "s"));
        }
        if let Some(mkfs) = series.iter().find(|one| one.name.starts_with("mkfs")) {
            let times = mkfs.wall_s() / ours;
            let met = if times >= TIMES_MKFS_MIN { "met" } else { "NOT met" };
            verdicts.push(format!(
                "Goal, {} against {}: ≥ {TIMES_MKFS_MIN} times as fast; measured {times:.2}: {met}.",
                form.name, mkfs.name
            ));
        }
    }
    table.note(verdicts.join(" "));
    for missing in [context.kernel().err(), context.mkfs_btrfs().err()].into_iter().flatten() {
        table.note(format!("A column is missing: {missing}."));
    }
    table.note(
        "kernel: mkfs.btrfs, mount over a loop device with nodiscard, cp -a, umount, all counted; the time of \
         kernel threads is not in its CPU s. mkfs.btrfs --rootdir is given a blank image of the \
         same length.",
    );
    Ok(vec![table])
}

fn contest(context: &Context<'_>, source: &Source, form: &Form) -> Result<Vec<Series>> {
    let len_bytes = source.image_bytes();
    let mut contestants = vec![Contestant::new("ubtrfs import", || {
        let image = context.scratch.absent("image")?;
        child::run(context.import(&source.directory, &image, len_bytes).args(form.ours))
    })];
    if context.mkfs_btrfs().is_ok() {
        let compress = (!form.ours.is_empty())
            .then_some(form.ours[form.ours.len().saturating_sub(1)..].first().copied())
            .flatten();
        if compress.is_none() || mkfs_compresses() {
            contestants.push(Contestant::new("mkfs.btrfs --rootdir", move || {
                let image = context.scratch.blank("image", len_bytes)?;
                rootdir(&source.directory, &image, compress)
            }));
        }
    }
    if context.kernel().is_ok() {
        contestants.push(Contestant::new("kernel cp -a", || {
            let image = context.scratch.blank("image", len_bytes)?;
            kernel_copy(&source.directory, &image, form.mount_options)
        }));
    }
    let series = alternate(contestants, context.options.round_count)?;
    check_ours(context, source, form, len_bytes)?;
    Ok(series)
}

fn rootdir(source: &Path, image: &Path, compress: Option<&str>) -> Result<Usage> {
    let mut mkfs = command("mkfs.btrfs");
    mkfs.args(["--quiet", "--rootdir"]).arg(source);
    if let Some(compress) = compress {
        mkfs.args(["--compress", compress]);
    }
    child::run(mkfs.arg(image))
}

/// mkfs.btrfs compresses since 6.13.
fn mkfs_compresses() -> bool {
    let output = command("mkfs.btrfs").arg("--help").output();
    output.is_ok_and(|output| {
        [output.stdout, output.stderr]
            .iter()
            .any(|said| String::from_utf8_lossy(said).contains("--compress"))
    })
}

fn kernel_copy(source: &Path, image: &Path, mount_options: &str) -> Result<Usage> {
    let mut usage = child::run(command("mkfs.btrfs").arg("--quiet").arg(image))?;
    let start = std::time::Instant::now();
    let mount_options = making::kernel_options(mount_options);
    let mount = KernelMount::mount(&[image.to_owned()], &mount_options, false)
        .map_err(|what| Error::Input { what })?;
    usage.wall += start.elapsed();
    usage += child::run(command("cp").arg("-a").arg(source.join(".")).arg(mount.path()))?;
    let start = std::time::Instant::now();
    mount.unmount();
    usage.wall += start.elapsed();
    Ok(usage)
}

/// A wrong image is no result: what was timed is made once more and checked.
fn check_ours(context: &Context<'_>, source: &Source, form: &Form, len_bytes: u64) -> Result<()> {
    let image = context.scratch.absent("image")?;
    child::run(context.import(&source.directory, &image, len_bytes).args(form.ours))?;
    context.check("image", source.file_count)?;
    if context.btrfs_progs().is_ok() {
        child::run(command("btrfs").args(["check", "--readonly"]).arg(&image))?;
    }
    context.scratch.absent("image")?;
    Ok(())
}
