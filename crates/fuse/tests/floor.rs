//! The server that does nothing takes the requests of everyday jobs.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::mpsc;

use ubtrfs_fuse::floor;
use ubtrfs_testkit::{Oracle, oracle};

#[test]
fn floor_remembers_names_and_sizes() {
    if !oracle::require_all(&[Oracle::Root, Oracle::Fuse]) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let (top, served) = (scratch.path().to_owned(), scratch.path().to_owned());
    let (say, hear) = mpsc::channel();
    let serving = std::thread::spawn(move || {
        floor::run(&served, || say.send(()).unwrap()).unwrap();
    });
    hear.recv().unwrap();
    fs::create_dir(top.join("dir")).unwrap();
    for number in 0..300 {
        fs::write(top.join(format!("dir/file {number}")), [1; 5000]).unwrap();
    }
    symlink("dir/file 1", top.join("link")).unwrap();
    fs::hard_link(top.join("dir/file 2"), top.join("second")).unwrap();
    fs::rename(top.join("dir/file 3"), top.join("dir/file 4")).unwrap();
    fs::remove_file(top.join("dir/file 5")).unwrap();
    assert_eq!(fs::read_dir(top.join("dir")).unwrap().count(), 298);
    // What it has written itself the kernel may show still.
    assert_eq!(fs::read(top.join("link")).unwrap().len(), 5000);
    assert_eq!(fs::metadata(top.join("second")).unwrap().len(), 5000);
    assert!(!top.join("dir/file 3").exists());
    assert!(fs::remove_dir(top.join("nothing")).is_err());
    let mount = ubtrfs_fuse::reached(&top).unwrap().unwrap().mount;
    while ubtrfs_fuse::unmount(&top, mount).is_err() {
        // A process that another test starts has all files of this one open for a moment.
        std::thread::yield_now();
    }
    serving.join().unwrap();
}
