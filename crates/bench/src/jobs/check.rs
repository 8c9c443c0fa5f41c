//! Checking an image on all cores.

use ubtrfs_check::{CheckOptions, check};
use ubtrfs_rt::Arc;
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

use super::{Args, Checked, Outcome, Timing, runtime, timed};
use crate::error::{Error, Result};

/// Opens and checks the image, which must be clean and hold `count` inodes at least.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let executor = runtime().executor;
    let (spent, report) = timed(|| {
        let device = FileDevice::open(&args.path, OpenMode::ReadOnly, Window::Whole)?;
        let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(vec![Arc::new(device)], &read_only)?;
        let options = CheckOptions { data: false, executor, ..CheckOptions::default() };
        check(&volume, &options).map_err(|error| Error::Input { what: format!("check: {error}") })
    })?;
    if let Some(finding) = report.errors().next() {
        let what = format!("{} errors found, first {finding:?}", report.error_count);
        return Err(Error::Input { what });
    }
    super::require(report.statistics.inode_count >= args.count)?;
    let checked = Checked {
        block_bytes: report.statistics.block_bytes,
        inode_count: report.statistics.inode_count,
    };
    let timings = vec![Timing::new("check", report.statistics.block_count, spent)];
    Ok(Outcome { timings, checked: Some(checked), ..Outcome::default() })
}
