//! Fuzzers' findings and broken filesystems: exporting each ends, in an archive or an error.

use std::path::Path;
use std::sync::Arc;

use ubtrfs_archive::codec::Compression;
use ubtrfs_archive::export;
use ubtrfs_archive::progress::Silent;
use ubtrfs_engine::{Filesystem, OpenOptions};
use ubtrfs_testkit::{Ending, Limits, Oracle, collections, oracle, run_limited};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Names the image to the process that exports it.
const IMAGE: &str = "UBTRFS_TEST_IMAGE";
const LIMITS: Limits = Limits { seconds: 60, memory_bytes: 1 << 30 };

#[test]
fn collected_images_export_or_give_an_error() {
    if !oracle::require(Oracle::ImageCollections) {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut failures = Vec::new();
    let mut exported = 0;
    for image in collections::images() {
        let arguments = ["--exact", "exporter_of_one_image", "--nocapture"];
        let environment = [(IMAGE, image.path.as_os_str())];
        let (ending, said) = run_limited(program.as_os_str(), arguments, &environment, LIMITS);
        if ending != Ending::Exited(0) {
            failures.push(format!("{}: {ending:?}\n{said}", image.origin));
        }
        exported += usize::from(said.contains("EXPORTED "));
    }
    assert!(failures.is_empty(), "{} images\n{}", failures.len(), failures.join("\n"));
    assert!(exported > 40, "only {exported} could be exported");
}

/// The other process: exports all of one image.
#[test]
fn exporter_of_one_image() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    match export(Path::new(&image)) {
        Ok(files) => println!("EXPORTED {files} files"),
        Err(why) => println!("REFUSED {why}"),
    }
}

fn export(image: &Path) -> Result<u64, String> {
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let device =
        FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).map_err(|e| said(&e))?;
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device)], &options).map_err(|e| said(&e))?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let fs = Filesystem::open(volume, options).map_err(|e| said(&e))?;
    let output = std::io::sink();
    let (summary, _) = export::to_tar(&fs, fs.top_level(), output, Compression::None, &mut Silent)
        .map_err(|e| said(&e))?;
    Ok(summary.files)
}
