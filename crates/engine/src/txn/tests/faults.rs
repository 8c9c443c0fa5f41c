//! Devices that fail: the filesystem is then aborted with the first cause, reads go on, and what
//! opens again is the last commit.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_testkit::crash::{CutDevice, RecordingDevice};

use super::*;
use crate::Error;

/// A device whose writes and flushes fail from the nth on.
#[derive(Debug)]
struct FaultyDevice {
    under: Arc<CutDevice>,
    left: AtomicU64,
}

impl FaultyDevice {
    /// What opening writes is let through.
    fn opened(under: Arc<CutDevice>, nth: u64) -> Filesystem {
        let faulty = Arc::new(Self { under, left: AtomicU64::new(u64::MAX) });
        let fs = open_on(Arc::clone(&faulty) as Arc<dyn Device>);
        faulty.left.store(nth, Ordering::SeqCst);
        fs
    }

    fn count(&self) -> io::Result<()> {
        let took = self.left.try_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        took.map(|_| ()).map_err(|_| io::Error::other("the nth request fails"))
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> String {
        "faulty".to_owned()
    }
    fn len_bytes(&self) -> u64 {
        self.under.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        self.under.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.count()?;
        self.under.write_at(at, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.count()
    }
    fn discard(&self, _at: PhysicalAddr, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn resize(&self, _len_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

#[test]
fn commit_whose_nth_request_fails_aborts_and_leaves_the_last_state() {
    let mut random = Prng::of_test(31);
    let device = Arc::new(RecordingDevice::new(64 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    for at in 0..300 {
        insert(&fs, key(at, 0), &random.bytes(200));
    }
    fs.commit().unwrap();
    let durable = contents(&fs);
    drop(fs);
    let count = device.recording().event_count();
    let mut failures = 0;
    for nth in 0.. {
        let under = Arc::new(device.recording().cut_after(count));
        let fs = FaultyDevice::opened(Arc::clone(&under), nth);
        let mut model = durable.clone();
        for _ in 0..40 {
            change(&fs, &mut model, &mut random, 600, false);
        }
        let result = fs.commit();
        assert!(contents(&fs) == model, "reads go on");
        let Err(error) = result else {
            drop(fs);
            assert!(contents(&open_on(under)) == model);
            break;
        };
        failures += 1;
        let Error::Aborted { first_cause, .. } = &error else { panic!("request {nth}: {error}") };
        let first_cause = first_cause.to_string();
        for error in [fs.begin(Reservation::items(1)).unwrap_err(), fs.commit().unwrap_err()] {
            let Error::Aborted { first_cause: again, .. } = error else { panic!("{error}") };
            assert_eq!(again.to_string(), first_cause);
        }
        assert!(contents(&fs) == model, "reads go on");
        drop(fs);
        let again = contents(&open_on(under));
        // From the primary superblock on, the new state may be the one that is there.
        assert!(again == durable || again == model, "request {nth}");
    }
    assert!(failures > 20, "{failures}");
}

/// The superblock was compared when the tree blocks had been written: over those of whoever had committed meanwhile, who has taken the
/// same free space.
#[test]
fn commit_after_another_committed_aborts_and_writes_nothing() {
    let mut random = Prng::of_test(32);
    let device = Arc::new(RecordingDevice::new(64 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    insert(&fs, key(1, 0), &random.bytes(200));
    fs.commit().unwrap();
    insert(&fs, key(2, 0), &random.bytes(200));
    let other = open_on(Arc::clone(&device) as Arc<dyn Device>);
    for at in 0..300 {
        insert(&other, key(3, at), &random.bytes(200));
    }
    other.commit().unwrap();
    let model = contents(&other);
    drop(other);
    let count = device.recording().event_count();
    for _ in 0..2 {
        let error = fs.commit().unwrap_err();
        let Error::Aborted { first_cause, .. } = &error else { panic!("{error}") };
        assert!(first_cause.to_string().contains("something else has written to it"), "{error}");
        assert_eq!(device.recording().event_count(), count);
    }
    assert!(matches!(fs.begin(Reservation::items(1)), Err(Error::Aborted { .. })));
    drop(fs);
    assert!(contents(&open_on(device)) == model);
}

/// A thread that waited for a commit which then failed went on with the failed transaction, in the
/// moment before the filesystem was marked as aborted, and could commit it half done.
#[test]
fn commit_after_a_failed_one_never_succeeds() {
    let device = Arc::new(RecordingDevice::new(64 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    fs.commit().unwrap();
    drop(fs);
    let count = device.recording().event_count();
    for nth in 0..20 {
        let under = Arc::new(device.recording().cut_after(count));
        let fs = FaultyDevice::opened(under, nth % 4);
        insert(&fs, key(1, 0), &[1; 8]);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| fs.commit())).collect();
            for thread in threads {
                assert!(matches!(thread.join().unwrap(), Err(Error::Aborted { .. })));
            }
        });
    }
}
