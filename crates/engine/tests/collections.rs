//! Fuzzers' findings and broken filesystems: each image opens or gives a clear error, and so does
//! everything in it. No panic, no hang, no unbounded memory.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{Error, Filesystem, InodeId, OpenOptions};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_testkit::{Ending, Limits, Oracle, collections, oracle, run_limited};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Names the image to the process that reads it.
const IMAGE: &str = "UBTRFS_TEST_IMAGE";
const LIMITS: Limits = Limits { seconds: 60, memory_bytes: 1 << 30 };

#[test]
fn collected_images_each_open_or_give_an_error() {
    if !oracle::require(Oracle::ImageCollections) {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut failures = Vec::new();
    let mut readable = 0;
    for image in collections::images() {
        let arguments = ["--exact", "reader_of_one_image", "--nocapture"];
        let environment = [(IMAGE, image.path.as_os_str())];
        let (ending, said) = run_limited(program.as_os_str(), arguments, &environment, LIMITS);
        if ending != Ending::Exited(0) {
            failures.push(format!("{}: {ending:?}\n{said}", image.origin));
        }
        readable += usize::from(said.contains("READ "));
    }
    assert!(failures.is_empty(), "{} images\n{}", failures.len(), failures.join("\n"));
    // Most are whole enough for something to be read.
    assert!(readable > 60, "only {readable} could be opened");
}

/// The other process: reads all that it can of one image, and says what it met.
#[test]
fn reader_of_one_image() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    match open(Path::new(&image)) {
        Ok(fs) => {
            let mut reader = Reader { fs, seen: HashSet::new(), errors: 0, entries: 0 };
            reader.everything();
            println!("READ {} entries, {} errors", reader.entries, reader.errors);
        }
        Err(why) => println!("REFUSED {why}"),
    }
}

fn open(image: &Path) -> Result<Filesystem, String> {
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole)
        .map_err(|error| error.to_string())?;
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume =
        Volume::open(vec![Arc::new(device)], &options).map_err(|error| error.to_string())?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    Filesystem::open(volume, options).map_err(|error| error.to_string())
}

struct Reader {
    fs: Filesystem,
    /// Damaged directories may lie in each other.
    seen: HashSet<InodeId>,
    errors: usize,
    entries: usize,
}

impl Reader {
    fn everything(&mut self) {
        let usage = self.fs.usage();
        self.note(usage);
        let subvolumes = self.fs.subvolumes();
        let default = self.fs.default_subvolume();
        let mut roots = vec![self.fs.top_level()];
        roots.extend(self.note(default));
        for subvolume in self.note(subvolumes).into_iter().flatten() {
            roots.push(InodeId::root_of(subvolume.id));
        }
        while let Some(id) = roots.pop() {
            if self.seen.insert(id) {
                self.entry(id, &mut roots);
            }
        }
    }

    fn note<T>(&mut self, outcome: Result<T, Error>) -> Option<T> {
        outcome
            .inspect_err(|error| {
                self.errors += 1;
                assert!(!error.to_string().is_empty());
            })
            .ok()
    }

    fn entry(&mut self, id: InodeId, more: &mut Vec<InodeId>) {
        self.entries += 1;
        let (xattrs, links) = (self.fs.xattrs(id), self.fs.links(id));
        self.note(xattrs);
        self.note(links);
        let inode = self.fs.inode(id);
        let Some(inode) = self.note(inode) else { return };
        match inode.file_type() {
            FileType::Directory => {
                let entries = self.fs.read_dir(id, 0);
                for entry in self.note(entries).into_iter().flatten() {
                    let Some(entry) = self.note(entry) else { continue };
                    let found = self.fs.lookup(id, &entry.name);
                    self.note(found);
                    more.push(entry.target);
                }
            }
            FileType::Symlink => {
                let target = self.fs.read_link(id);
                self.note(target);
            }
            FileType::Regular => self.file(id),
            _ => {}
        }
    }

    fn file(&mut self, id: InodeId) {
        let extents = self.fs.file_extents(id, FileOffset(0));
        let file = self.fs.open_file(id);
        let (Some(extents), Some(mut file)) = (self.note(extents), self.note(file)) else { return };
        let mut buffer = vec![0; 1 << 20];
        for extent in extents {
            let Some(extent) = self.note(extent) else { continue };
            // Of a range that claims to be long, its beginning.
            let read = file.read(extent.offset, &mut buffer);
            self.note(read);
        }
    }
}
