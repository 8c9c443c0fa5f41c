//! What the tests share; each uses a part of it.
#![allow(dead_code)]

pub mod image;

use std::path::Path;
use std::sync::Arc;

use ubtrfs_check::{CheckOptions, Report, check};
use ubtrfs_rt::Executor;
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Opens image files for reading.
pub fn open(images: &[impl AsRef<Path>]) -> Volume {
    let devices = images
        .iter()
        .map(|image| {
            let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
            Arc::new(device) as Arc<dyn Device>
        })
        .collect();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    Volume::open(devices, &options).unwrap()
}

/// Checks everything, on two threads.
pub fn check_all(volume: &Volume) -> Report {
    let options =
        CheckOptions { data: true, executor: Executor::Threads(2), ..CheckOptions::default() };
    check_twice(volume, &options).unwrap()
}

/// With so little most of the tables of a small image lie in a file at any time.
pub const TINY_BYTES: u64 = 16 << 10;
/// An image of so many blocks has tables beyond that.
const SPILLING_BLOCKS: u64 = 60;

/// Checks twice: with room for all tables, and with hardly any, which must make no difference but
/// to what is said of memory.
pub fn check_twice(
    volume: &Volume,
    options: &CheckOptions<'_>,
) -> Result<Report, ubtrfs_check::Error> {
    let report = check(volume, options);
    let tiny = check(volume, &CheckOptions { memory_bytes_max: TINY_BYTES, ..*options });
    let (report, tiny) = match (report, tiny) {
        (Ok(report), Ok(tiny)) => (report, tiny),
        (Err(error), Err(same)) => {
            assert_eq!(error.to_string(), same.to_string());
            return Err(error);
        }
        (one, other) => panic!("{one:?} and {other:?}"),
    };
    let (wide, narrow) = (report.statistics, tiny.statistics);
    assert_eq!(wide.spilled_bytes, 0);
    assert!(wide.block_count < SPILLING_BLOCKS || narrow.spilled_bytes > 0, "{narrow:?}");
    assert!(narrow.table_bytes_peak <= TINY_BYTES, "{narrow:?}");
    let mut same = tiny;
    same.statistics.table_bytes_peak = wide.table_bytes_peak;
    same.statistics.spilled_bytes = wide.spilled_bytes;
    assert_eq!(same, report, "\n{}\n\n{}", lines(&same), lines(&report));
    Ok(report)
}

/// All that a report says.
pub fn lines(report: &Report) -> String {
    let lines = report.findings.iter().map(|it| format!("{:?} {}: {it}", it.severity(), it.kind()));
    let mut text = lines.collect::<Vec<_>>().join("\n");
    if report.left_out_count > 0 {
        text.push_str(&format!("\nand {} more", report.left_out_count));
    }
    text
}
