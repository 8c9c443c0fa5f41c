//! A tar archive of any bytes is read to its end or to an error, and never leads out of its
//! destination. The first byte says how it is changed: with every header's checksum made right, so
//! that most changes reach further than the checksum.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use ubtrfs_archive::batch::{Batch, Place, Source, Step};
use ubtrfs_archive::source::tar::{BLOCK_BYTES, TarSource, checksum};
use ubtrfs_rt::Executor;

const ALIGN_BYTES: u64 = 4096;

/// A file whose map says more than this is left alone: it would only be zeros.
const SIZE_BYTES_MAX: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let [choice, data @ ..] = data else { return };
    let mut archive = data.to_vec();
    if choice & 1 == 0 {
        for block in archive.chunks_exact_mut(BLOCK_BYTES) {
            let block: &mut [u8; BLOCK_BYTES] = block.try_into().expect("exact chunks");
            if block[257..].starts_with(b"ustar") {
                let sum = format!("{:06o}\0 ", checksum(block));
                block[148..156].copy_from_slice(sum.as_bytes());
            }
        }
    }
    let input = Box::new(Cursor::new(archive));
    let Ok(mut source) = TarSource::new(input, ALIGN_BYTES, Executor::Inline) else { return };
    let (mut end, mut size) = (0, 0);
    loop {
        let mut batch = Batch::default();
        let more = source.fill(&mut batch);
        for step in &batch.steps {
            match step {
                Step::File { entry, size_bytes, .. } => {
                    check_path(entry.place, &batch);
                    (end, size) = (0, *size_bytes);
                    assert!(i64::try_from(size).is_ok());
                }
                Step::Directory(entry) | Step::Special { entry, .. } => {
                    check_path(entry.place, &batch);
                }
                Step::Link { place, .. } => check_path(*place, &batch),
                Step::Data { offset, len_bytes, data } => {
                    assert!(*offset >= end && offset.is_multiple_of(ALIGN_BYTES));
                    assert_eq!(data.len(), *len_bytes);
                    end = offset + *len_bytes as u64;
                    assert!(end <= size);
                }
                Step::End | Step::Warning(_) => {}
                Step::Enter(_) | Step::Leave => panic!("an archive names paths"),
            }
        }
        if !more.unwrap_or(false) || end > SIZE_BYTES_MAX {
            return;
        }
    }
});

fn check_path(place: Place, batch: &Batch<Vec<u8>>) {
    let Place::Path(path) = place else { panic!("an archive names paths") };
    let path = batch.text.bytes(path);
    assert!(!path.contains(&0));
    if !path.is_empty() {
        for component in path.split(|&byte| byte == b'/') {
            assert!(!matches!(component, b"" | b"." | b".."), "{path:?}");
        }
    }
}
