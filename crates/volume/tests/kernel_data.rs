//! The kernel and the chunk map agree where bytes lie, on every profile: what the kernel wrote is
//! read here, and what is written here the kernel reads.

mod common;

use std::path::{Path, PathBuf};

use common::{LoopDevice, Mount, judge, judge_kernel_mount, mkfs, open_devices, run};
use ubtrfs_ondisk::block::Block;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Generation, KeyType, LogicalAddr};
use ubtrfs_volume::{OpenMode, Volume, VolumeOptions};

const FILE_BYTES: usize = 3 << 20;

/// Adds every chunk of the chunk tree.
fn add_chunks(volume: &Volume) {
    let superblock = volume.superblock();
    let root = (LogicalAddr(superblock.chunk_root.get()), superblock.chunk_root_generation.get());
    let mut pending = vec![root];
    while let Some((bytenr, generation)) = pending.pop() {
        let geometry = volume.geometry();
        let generation = Some(Generation(generation));
        let expect = Expect { bytenr, generation, level: None, first_key: None, owner: None };
        let mut bytes = vec![0; geometry.nodesize_bytes].into_boxed_slice();
        volume
            .read(bytenr, &mut bytes, &|b| verify::block(b.into(), &geometry, &expect).map(drop))
            .unwrap();
        match verify::block(bytes, &geometry, &expect).unwrap() {
            Block::Leaf(leaf) => {
                for slot in 0..leaf.len() {
                    let key = leaf.key(slot);
                    if key.ty == KeyType::CHUNK_ITEM {
                        let chunk = Chunk::parse(LogicalAddr(key.offset), leaf.data(slot));
                        volume.add_chunk(chunk.unwrap()).unwrap();
                    }
                }
            }
            Block::Node(node) => pending.extend(
                (0..node.len()).map(|slot| (node.child(slot), node.child_generation(slot).0)),
            ),
        }
    }
}

/// The extents of a file as the kernel tells them: logical address and length in bytes.
fn extents(file: &Path) -> Vec<(LogicalAddr, usize)> {
    let table = run("filefrag", &["-v", "-b4096", file.to_str().unwrap()]);
    // `   0:        0..     767:       3328..      4095:    768:             last,eof`
    let rows = table.lines().filter(|line| line.matches("..").count() == 2);
    rows.map(|row| {
        let fields: Vec<&str> = row.split(':').map(str::trim).collect();
        let start: u64 = fields[2].split("..").next().unwrap().trim().parse().unwrap();
        let count: usize = fields[3].parse().unwrap();
        (LogicalAddr(start * 4096), count * 4096)
    })
    .collect()
}

fn pattern(seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    (0..FILE_BYTES)
        .map(|_| {
            // xorshift32 (Marsaglia 2003): no element equals another.
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[1]
        })
        .collect()
}

struct Attached {
    // Unmounted first, then detached.
    mount: Option<Mount>,
    loops: Vec<LoopDevice>,
}

fn mount(images: &[PathBuf], point: &Path) -> Attached {
    let loops: Vec<LoopDevice> = images.iter().map(|image| LoopDevice::new(image, &[])).collect();
    let devices = loops.iter().map(|device| format!("device={}", device.path.display()));
    let options = devices.chain(["nodatacow".to_owned()]).collect::<Vec<_>>().join(",");
    Attached { mount: Some(Mount::new(&options, &loops[0].path, point.to_owned())), loops }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.mount.take();
        for device in &self.loops {
            run("btrfs", &["device", "scan", "--forget", device.path.to_str().unwrap()]);
        }
    }
}

#[test]
fn data_of_each_profile_is_where_the_kernel_has_it() {
    if !judge_kernel_mount() || !judge(&["filefrag", "btrfs"]) {
        return;
    }
    let profiles = [
        ("single", 1),
        ("dup", 1),
        ("raid0", 2),
        ("raid0", 3),
        ("raid1", 3),
        ("raid10", 4),
        ("raid1c3", 3),
        ("raid1c4", 4),
    ];
    for (profile, count) in profiles {
        let dir = tempfile::tempdir().unwrap();
        let images = mkfs(dir.path(), count, &["-m", "dup", "-d", profile]).unwrap();
        let point = dir.path().join("mnt");
        let file = point.join("file");
        let (theirs, ours) = (pattern(1), pattern(2));

        let attached = mount(&images, &point);
        std::fs::write(&file, &theirs).unwrap();
        run("sync", &["-f", file.to_str().unwrap()]);
        let extents = extents(&file);
        drop(attached);
        assert_eq!(extents.iter().map(|(_, len)| len).sum::<usize>(), FILE_BYTES);

        let devices = open_devices(&images, OpenMode::ReadWrite);
        let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
        add_chunks(&volume);
        let mut offset = 0;
        for (at, len) in &extents {
            let mut have = vec![0; *len];
            for mirror in 0..volume.mirror_count(*at).unwrap() {
                volume.read_mirror(*at, mirror, &mut have).unwrap();
                assert!(have == theirs[offset..offset + len], "{profile}, copy {mirror}");
            }
            volume.write(*at, &ours[offset..offset + len]).unwrap();
            offset += len;
        }
        volume.flush().unwrap();
        drop(volume);

        let attached = mount(&images, &point);
        assert!(std::fs::read(&file).unwrap() == ours, "{profile}");
        drop(attached);
        if count == 1 {
            run("btrfs", &["check", "--readonly", images[0].to_str().unwrap()]);
        }
    }
}
