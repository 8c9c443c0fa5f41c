//! Every tree block that mkfs.btrfs and Linux write must be accepted.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{SeekFrom, seek};
use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, HEADER_BYTES, Header};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Expect, Geometry, UnknownFeatures};
use ubtrfs_ondisk::{Corruption, KeyType, LogicalAddr, PhysicalAddr, print};
use ubtrfs_testkit::{MkfsBtrfs, Oracle, collections, corpus, oracle};

/// What a walk over an image came upon.
#[derive(Default)]
struct Walk {
    block_count: usize,
    types: BTreeSet<KeyType>,
    findings: Vec<Corruption>,
}

fn read(image: &File, at: u64, len_bytes: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len_bytes];
    image.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
}

fn superblock(image: &File, at: PhysicalAddr) -> Option<Box<Superblock>> {
    Superblock::parse(&read(image, at.0, SUPERBLOCK_BYTES)?, at).ok()
}

/// Checks every block of the filesystem that lies anywhere in the image, current or not.
fn walk(image: &File, superblock: &Superblock) -> Walk {
    let geometry = Geometry {
        nodesize_bytes: superblock.nodesize.get().try_into().unwrap(),
        sectorsize_bytes: superblock.sectorsize.get().try_into().unwrap(),
        csum: superblock.csum_type().unwrap(),
        fsid: superblock.header_fsid(),
    };
    let sectorsize = geometry.sectorsize_bytes as u64;
    let mut walk = Walk::default();
    let mut next = 0;
    // Holes are skipped: the images are sparse.
    while let Ok(data) = seek(image, SeekFrom::Data(next)) {
        let at = next.max(data / sectorsize * sectorsize);
        next = at + sectorsize;
        let Some(bytes) = read(image, at, HEADER_BYTES) else { break };
        let header = *Header::peek(&bytes).unwrap();
        let is_superblock = SUPERBLOCK_OFFSETS.contains(&PhysicalAddr(at));
        if header.fsid != geometry.fsid.0 || is_superblock {
            continue;
        }
        let Some(bytes) = read(image, at, geometry.nodesize_bytes) else { break };
        if !geometry.csum.matches(&header.csum, &bytes[32..]) {
            continue;
        }
        // mkfs.btrfs first makes a small filesystem and then replaces all its blocks; of those
        // that are left behind, some were never marked.
        if header.flags.get() & FLAG_WRITTEN == 0 && header.generation.get() <= 1 {
            continue;
        }
        let expect = Expect {
            bytenr: LogicalAddr(header.bytenr.get()),
            generation: None,
            level: None,
            first_key: None,
            owner: None,
        };
        walk.block_count += 1;
        match verify::block(bytes.into(), &geometry, &expect) {
            Ok(block) => {
                let _ = print::block(&block);
                if let Block::Leaf(leaf) = block {
                    walk.types.extend((0..leaf.len()).map(|slot| leaf.key(slot).ty));
                }
            }
            Err(error) => walk.findings.push(*error),
        }
    }
    walk
}

/// The walk over a sound image, in which all superblocks and blocks are right.
#[track_caller]
fn walk_sound(path: &Path) -> Walk {
    let image = File::open(path).unwrap();
    let mut last = None;
    for at in SUPERBLOCK_OFFSETS {
        let Some(bytes) = read(&image, at.0, SUPERBLOCK_BYTES) else { continue };
        let superblock = Superblock::parse(&bytes, at).unwrap();
        verify::superblock(&superblock).unwrap();
        assert_eq!(verify::unknown_features(&superblock), UnknownFeatures::default());
        assert!(verify::suspicions(&superblock).is_empty());
        let _ = print::superblock(&superblock);
        last = Some(superblock);
    }
    let walk = walk(&image, &last.expect("a superblock"));
    assert!(walk.findings.is_empty(), "{}: {}", path.display(), walk.findings[0]);
    walk
}

/// A tree of files with something of everything that needs no privilege.
fn populate(root: &Path) {
    use std::os::unix::fs::symlink;
    for dir in 0..20 {
        let dir = root.join(format!("directory {dir}"));
        std::fs::create_dir_all(&dir).unwrap();
        for file in 0..40_usize {
            let content = vec![u8::try_from(file).unwrap(); file * file * 7];
            std::fs::write(dir.join(format!("file {file}")), content).unwrap();
        }
        std::fs::hard_link(dir.join("file 3"), dir.join("x".repeat(250))).unwrap();
        symlink("file 4", dir.join("symlink")).unwrap();
    }
    let linked = root.join("linked");
    std::fs::write(&linked, "many names").unwrap();
    for number in 0..300 {
        std::fs::hard_link(&linked, root.join(format!("{}{number}", "n".repeat(200)))).unwrap();
    }
}

#[test]
fn blocks_of_mkfs_with_each_option_verify() {
    if !oracle::require(Oracle::MkfsBtrfs) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    populate(&root);
    for options in [
        "",
        "-m single -d single",
        "-m dup -d dup",
        "--csum xxhash",
        "--csum sha256",
        "--csum blake2",
        "-n 4096",
        "-n 32768",
        "-n 65536",
        "--mixed",
        "-O ^no-holes",
        "-O ^skinny-metadata",
        "-R ^free-space-tree",
        "-s 16384 -n 65536",
    ] {
        let image = folder.path().join("image");
        let options = format!("{options} --rootdir {}", root.display());
        MkfsBtrfs::new().options(&options).size_bytes(160 << 20).make(&image);
        let walk = walk_sound(&image);
        assert!(walk.block_count > 20, "{options}: {} blocks", walk.block_count);
        assert!(walk.types.contains(&KeyType::EXTENT_DATA));
    }
}

/// Every image of the corpus, on whatever devices.
#[test]
fn blocks_of_the_kernels_images_verify() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for image in corpus::kernel_images() {
        for device in &image.devices {
            assert!(walk_sound(device).block_count > 0, "{}", image.name);
        }
    }
}

/// What the corpus does not catch: a log tree, a balance half done, deleted snapshots.
#[test]
fn blocks_that_linux_leaves_amid_its_work_verify() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::MkfsBtrfs]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/linux.sh");
    for (name, mkfs, mount) in [
        ("plain", "", "noatime"),
        ("small-nodes", "-n 4096", "compress-force=zstd"),
        ("no-tree", "-R ^free-space-tree", "space_cache=v1,compress-force=zlib"),
        ("holes", "-O ^no-holes,^skinny-metadata", "nodatacow"),
    ] {
        let image = folder.path().join(name);
        File::create(&image).unwrap().set_len(600 << 20).unwrap();
        let directory = folder.path().join(format!("{name}.mount"));
        std::fs::create_dir(&directory).unwrap();
        let output = Command::new("unshare")
            .args(["-m", "bash"])
            .args([&script, &image, &directory])
            .args([mkfs, mount])
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        for copy in ["logged", "balancing", "end"] {
            let copy = folder.path().join(format!("{name}.{copy}"));
            let walk = walk_sound(&copy);
            assert!(walk.block_count > 100, "{name}: {} blocks", walk.block_count);
            assert!(walk.types.contains(&KeyType::DIR_LOG_INDEX), "{name}");
            std::fs::remove_file(copy).unwrap();
        }
        std::fs::remove_file(image).unwrap();
    }
}

/// Images of the collections that Linux, in its time, wrote so: their blocks must be accepted,
/// old forms and all. In the others anything may be found, but nothing may panic.
#[test]
fn blocks_of_the_collections_verify_where_they_are_sound() {
    const SOUND: &[&str] = &[
        "012-leaf-corruption",
        "019-non-skinny-false-alert",
        "020-extent-ref-cases",
        "021-partially-dropped-snapshot-case",
        "022-qgroup-rescan-halfway",
        "023-qgroup-stack-overflow",
        "029-valid-orphan-item",
        "030-reflinked-prealloc-extents",
        "036-rescan-not-kicked-in",
        "063-log-missing-csum",
        "064-deprecated-inode-cache",
        "065-valid-log-tree",
        "025-zstd-compression",
        "060-ino-cache-clean",
    ];
    if !oracle::require(Oracle::ImageCollections) {
        return;
    }
    let mut sound_count = 0;
    for found in collections::images() {
        let image = File::open(&found.path).unwrap();
        let Some(superblock) = superblock(&image, SUPERBLOCK_OFFSETS[0]) else { continue };
        let verdict = verify::superblock(&superblock);
        let _ = print::superblock(&superblock);
        if verdict.as_ref().is_err_and(|error| error.reason == ubtrfs_ondisk::Reason::BadGeometry) {
            continue;
        }
        let walk = walk(&image, &superblock);
        if SOUND.iter().any(|name| found.origin.contains(name)) {
            sound_count += 1;
            assert_eq!(verdict, Ok(()), "{}", found.origin);
            assert!(walk.findings.is_empty(), "{}: {}", found.origin, walk.findings[0]);
        }
    }
    assert!(sound_count >= SOUND.len(), "{sound_count} sound images");
}
