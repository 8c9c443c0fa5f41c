//! Every tree block that mkfs.btrfs and Linux write must be accepted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, Header};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Expect, Geometry, UnknownFeatures};
use ubtrfs_ondisk::{KeyType, LogicalAddr};

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("ubtrfs-ondisk-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether the judge is there. Where it is required, its absence fails.
fn judge(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    assert!(
        found || std::env::var_os("UBTRFS_REQUIRE_ORACLES").is_none(),
        "{program} is required and missing"
    );
    if !found {
        eprintln!("skipped: {program} is missing");
    }
    found
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Checks all superblocks and every block of the filesystem that lies anywhere in the image,
/// current or not; returns how many.
fn verify_all_blocks(image: &Path) -> usize {
    let bytes = std::fs::read(image).unwrap();
    let mut geometry = None;
    for at in SUPERBLOCK_OFFSETS {
        let start = usize::try_from(at.0).unwrap();
        let Some(copy) = bytes.get(start..start + SUPERBLOCK_BYTES) else { continue };
        let superblock = Superblock::parse(copy, at).unwrap();
        verify::superblock(&superblock).unwrap();
        assert_eq!(verify::unknown_features(&superblock), UnknownFeatures::default());
        assert!(verify::suspicions(&superblock).is_empty());
        geometry.get_or_insert(Geometry {
            nodesize_bytes: superblock.nodesize.get().try_into().unwrap(),
            sectorsize_bytes: superblock.sectorsize.get().try_into().unwrap(),
            csum: superblock.csum_type().unwrap(),
            fsid: superblock.header_fsid(),
        });
    }
    let geometry = geometry.unwrap();
    let mut count = 0;
    let mut keys: BTreeSet<KeyType> = BTreeSet::new();
    for start in (0..bytes.len()).step_by(geometry.sectorsize_bytes) {
        let Some(block) = bytes.get(start..start + geometry.nodesize_bytes) else { break };
        let header = Header::peek(block).unwrap();
        let is_superblock = SUPERBLOCK_OFFSETS.iter().any(|at| at.0 == start as u64);
        if header.fsid != geometry.fsid.0
            || is_superblock
            || !geometry.csum.matches(&header.csum, &block[32..])
        {
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
        match verify::block(block.into(), &geometry, &expect) {
            Ok(Block::Leaf(leaf)) => {
                keys.extend((0..leaf.len()).map(|slot| leaf.key(slot).ty));
            }
            Ok(Block::Node(_)) => {}
            Err(error) => panic!("{}, block at byte {start}: {error}", image.display()),
        }
        count += 1;
    }
    eprintln!("{}: {count} blocks, items {keys:?}", image.display());
    count
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
    if !judge("mkfs.btrfs") {
        return;
    }
    let folder = Folder::new("mkfs");
    let root = folder.path("root");
    populate(&root);
    let image = folder.path("image");
    let options: &[&[&str]] = &[
        &[],
        &["-m", "single", "-d", "single"],
        &["-m", "dup", "-d", "dup"],
        &["--csum", "xxhash"],
        &["--csum", "sha256"],
        &["--csum", "blake2"],
        &["-n", "4096"],
        &["-n", "32768"],
        &["-n", "65536"],
        &["--mixed"],
        &["-O", "^no-holes"],
        &["-O", "^skinny-metadata"],
        &["-O", "^extref"],
        &["-O", "quota"],
        &["-R", "^free-space-tree"],
        &["-R", "block-group-tree"],
        &["-s", "16384", "-n", "65536"],
    ];
    for option in options {
        let _ = std::fs::remove_file(&image);
        std::fs::File::create(&image).unwrap().set_len(160 << 20).unwrap();
        let known = Command::new("mkfs.btrfs")
            .arg("--quiet")
            .args(*option)
            .arg("--rootdir")
            .arg(&root)
            .arg(&image)
            .output()
            .unwrap();
        if !known.status.success() {
            let message = String::from_utf8_lossy(&known.stderr);
            eprintln!("skipped: mkfs.btrfs {option:?}: {message}");
            continue;
        }
        let count = verify_all_blocks(&image);
        assert!(count > 20, "{option:?}: {count} blocks");
    }
}

#[test]
fn blocks_that_linux_writes_verify() {
    if !judge("mkfs.btrfs") {
        return;
    }
    if !is_root() {
        eprintln!("skipped: mounting needs root");
        return;
    }
    let folder = Folder::new("linux");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/linux.sh");
    let scenarios: &[(&str, &str, &str)] = &[
        ("plain", "", ""),
        ("small-nodes", "-n 4096", "compress-force=zstd"),
        ("large-nodes", "-n 65536 --csum blake2", "compress-force=lzo"),
        ("no-tree", "-R ^free-space-tree", "space_cache=v1,compress-force=zlib"),
        ("mixed", "--mixed --csum sha256", "max_inline=0"),
        ("holes", "-O ^no-holes,^skinny-metadata", "nodatacow"),
    ];
    for (name, mkfs, mount) in scenarios {
        let image = folder.path(name);
        std::fs::File::create(&image).unwrap().set_len(600 << 20).unwrap();
        let directory = folder.path(&format!("{name}.mount"));
        std::fs::create_dir(&directory).unwrap();
        run(
            "unshare",
            &[
                "-m",
                "bash",
                script.to_str().unwrap(),
                image.to_str().unwrap(),
                directory.to_str().unwrap(),
                mkfs,
                mount,
            ],
        );
        for copy in ["logged", "balancing", "end"] {
            let copy = folder.path(&format!("{name}.{copy}"));
            let count = verify_all_blocks(&copy);
            assert!(count > 100, "{name}: {count} blocks");
            std::fs::remove_file(copy).unwrap();
        }
        std::fs::remove_file(image).unwrap();
    }
}

fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}
