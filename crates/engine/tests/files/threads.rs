//! Several threads that write at once.

use std::sync::Arc;

use ubtrfs_engine::{
    Filesystem, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation, mkfs,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_volume::MemDevice;

/// Checksums that one thread added while another turned the held ones into items were forgotten:
/// the data then read as having none.
#[test]
fn appenders_side_by_side_keep_every_checksum() {
    let runtime = Arc::new(Runtime::system());
    let device = Arc::new(MemDevice::new(1 << 30));
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let new = NewInode::new(0o100_644, Time::default());
    let ids: Vec<_> = (0..4)
        .map(|at| {
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            handle.create(fs.top_level(), format!("file{at}").as_bytes(), &new).unwrap()
        })
        .collect();
    // 2 GiB of sectors would be needed to fill what is held once; many small pieces interleave.
    let pieces = 700;
    std::thread::scope(|scope| {
        for (at, id) in (0_u8..).zip(&ids) {
            let fs = fs.clone();
            scope.spawn(move || {
                let options = fs.write_options(None);
                let mut appender = fs.appender(*id, 0).unwrap();
                for piece in 0..pieces {
                    let data = PreparedData::new(vec![at + 1; 256 << 10], &options);
                    appender.push(FileOffset(piece * (256 << 10)), data).unwrap();
                    if piece % 100 == 99 {
                        fs.commit().unwrap();
                    }
                }
                appender.finish().unwrap();
            });
        }
    });
    fs.commit().unwrap();
    let mut buf = vec![0; 256 << 10];
    for (at, id) in (0_u8..).zip(&ids) {
        for piece in 0..pieces {
            let read = fs.read(*id, FileOffset(piece * (256 << 10)), &mut buf).unwrap();
            assert!(read == buf.len() && buf.iter().all(|byte| *byte == at + 1), "file {at}");
        }
    }
}
