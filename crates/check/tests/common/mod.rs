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
    check(volume, &options).unwrap()
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
