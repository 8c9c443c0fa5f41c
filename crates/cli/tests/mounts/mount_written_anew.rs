//! Programs that write a file in place of what it was, and sync nothing: what the kernel shows of the image after a crash.

use std::fs::{self, File};

use crate::place::Place;
use ubtrfs_testkit::KernelMount;

const OLD: &[u8] = &[b'o'; 600_000];
const NEW: &[u8] = &[b'n'; 500_000];

/// Both were empty then, as long as the server held their data: for half a minute.
#[test]
fn files_that_are_replaced_have_the_old_or_the_new_contents_after_a_crash() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = |name: &str| place.directory.join(name);
    for name in ["renamed", "cut"] {
        fs::write(path(name), OLD).unwrap();
        File::open(path(name)).unwrap().sync_all().unwrap();
    }
    fs::write(path("new"), NEW).unwrap();
    fs::rename(path("new"), path("renamed")).unwrap();
    // O_TRUNC, as a shell's `>`.
    fs::write(path("cut"), NEW).unwrap();
    // Somebody else's commit.
    File::create(path("other")).unwrap().sync_all().unwrap();

    // What the medium has of it, as the server goes on.
    let copy = place.image.with_extension("copy");
    fs::copy(&place.image, &copy).unwrap();
    let kernel = KernelMount::read_only(&copy, "");
    for name in ["renamed", "cut"] {
        let shown = fs::read(kernel.path().join(name)).unwrap();
        assert!(shown == NEW, "{name}: {} bytes, from {:?}", shown.len(), shown.first());
    }
    kernel.unmount();
    place.umount();
    place.assert_clean();
}
