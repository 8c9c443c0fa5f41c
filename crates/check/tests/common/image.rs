//! A small filesystem that the kernel wrote, in memory, to be damaged in single places.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, XattrFlags};
use ubtrfs_check::{CheckOptions, Finding, Report};
use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, Header, Leaf};
use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::chunk::{Chunk, ChunkStripe, STRIPE_LEN_BYTES};
use ubtrfs_ondisk::csum::CSUM_FIELD_BYTES;
use ubtrfs_ondisk::misc::{DevExtent, DevItem, OnDisk};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, PhysicalAddr, RootId};
use ubtrfs_testkit::{CheckMode, CheckOutcome, KernelMount, MkfsBtrfs, Prng, btrfs_check, run};
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};
use zerocopy::IntoBytes;

const PAGE_BYTES: usize = 64 << 10;
const IMAGE_BYTES: u64 = 160 << 20;

/// What an image holds that is not zero.
type Pages = Vec<(u64, Vec<u8>)>;

/// Which of the filesystems.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// One copy of everything.
    Single,
    /// Two copies of tree blocks.
    Dup,
    /// Holes have file extents.
    Holes,
}

impl Base {
    fn options(self) -> &'static str {
        match self {
            Self::Single => "-m single -d single",
            Self::Dup => "-m dup -d single",
            Self::Holes => "-m single -d single -O ^no-holes",
        }
    }

    fn pages(self) -> &'static Pages {
        static MADE: [OnceLock<Pages>; 3] = [const { OnceLock::new() }; 3];
        MADE[self as usize].get_or_init(|| {
            let directory = tempfile::tempdir().unwrap();
            let image = directory.path().join("image");
            MkfsBtrfs::new().options(self.options()).size_bytes(IMAGE_BYTES).make(&image);
            let mounted = KernelMount::read_write(&image, "noatime");
            fill(mounted.path());
            mounted.unmount();
            pages_of(&image)
        })
    }
}

fn pages_of(image: &Path) -> Pages {
    let file = File::open(image).unwrap();
    let mut pages = Vec::new();
    let mut page = vec![0; PAGE_BYTES];
    for at in (0..file.metadata().unwrap().len()).step_by(PAGE_BYTES) {
        file.read_exact_at(&mut page, at).unwrap();
        if page.iter().any(|byte| *byte != 0) {
            pages.push((at, page.clone()));
        }
    }
    pages
}

fn fill(top: &Path) {
    let mut prng = Prng::new(7);
    let path = |name: &str| top.join(name);
    let sync = || _ = run("btrfs", ["filesystem", "sync", top.to_str().unwrap()]);
    fs::write(path("data"), prng.bytes(400 << 10)).unwrap();
    fs::write(path("more"), prng.bytes(64 << 10)).unwrap();
    sync();
    let clone = File::create(path("clone")).unwrap();
    rustix::fs::ioctl_ficlone(&clone, File::open(path("data")).unwrap()).unwrap();
    sync();
    clone.write_all_at(&prng.bytes(100 << 10), 0).unwrap();
    let file = File::create(path("prealloc")).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 256 << 10).unwrap();
    let file = File::create(path("holey")).unwrap();
    file.write_all_at(&prng.bytes(4096), 0).unwrap();
    file.write_all_at(&prng.bytes(4096), 64 << 10).unwrap();
    let file = File::create(path("attributes")).unwrap();
    for number in 0..4 {
        let value = prng.bytes(12_000);
        let name = format!("user.{number}");
        rustix::fs::fsetxattr(&file, name, &value, XattrFlags::empty()).unwrap();
    }
    fs::write(path("small"), b"inline").unwrap();
    fs::hard_link(path("small"), path("other-name")).unwrap();
    symlink("small", path("symlink")).unwrap();
    fs::create_dir(path("directory")).unwrap();
    for number in 0..100 {
        fs::write(path(&format!("directory/file-{number}")), prng.text(500)).unwrap();
    }
    let subvolume = |words: &[&str], names: &[&str]| {
        let paths = names.iter().map(|name| path(name).into_os_string());
        let words = words.iter().map(std::ffi::OsString::from);
        run("btrfs", ["subvolume".into()].into_iter().chain(words).chain(paths));
    };
    subvolume(&["create"], &["sub"]);
    for number in 0..300 {
        fs::write(path(&format!("sub/file-{number}")), prng.text(500)).unwrap();
    }
    fs::write(path("sub/data"), prng.bytes(20_000)).unwrap();
    fs::write(path("sub/zzz-data"), prng.bytes(20_000)).unwrap();
    sync();
    subvolume(&["snapshot"], &["sub", "snap"]);
    sync();
    // Blocks of the one become shared with full back references, others shared by the owner.
    File::options().write(true).open(path("sub/data")).unwrap().write_all_at(b"new", 0).unwrap();
    fs::write(path("snap/file-100"), b"changed").unwrap();
    sync();
}

/// An item and where it lies.
#[derive(Clone, Debug)]
pub struct Place {
    pub root: RootId,
    pub block: LogicalAddr,
    pub slot: usize,
    pub key: Key,
    pub data: Vec<u8>,
}

/// A filesystem to be damaged.
pub struct Image {
    pub device: Arc<MemDevice>,
    volume: Volume,
}

impl Image {
    pub fn of(base: Base) -> Self {
        Self::on(IMAGE_BYTES, base.pages())
    }

    fn on(len_bytes: u64, pages: &Pages) -> Self {
        let device = Arc::new(MemDevice::new(len_bytes));
        for (at, page) in pages {
            device.write_at(PhysicalAddr(*at), page).unwrap();
        }
        let devices = vec![device.clone() as Arc<dyn Device>];
        let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
        // Takes the chunks in, and shows that whatever is found later was made here.
        let report = super::check_twice(&volume, &CheckOptions::default()).unwrap();
        assert!(report.is_clean(), "{}", super::lines(&report));
        Self { device, volume }
    }

    /// An image file that others made.
    pub fn of_file(path: &Path) -> Self {
        let len_bytes = fs::metadata(path).unwrap().len();
        Self::on(len_bytes, &pages_of(path))
    }

    pub fn single() -> Self {
        Self::of(Base::Single)
    }

    /// Checks it as it is now, file data too, from a volume of its own.
    pub fn check(&self) -> Report {
        self.check_with(None)
    }

    /// The same, of another copy of the superblock.
    pub fn check_with(&self, super_copy: Option<usize>) -> Report {
        let volume = self.open(super_copy);
        super::check_twice(&volume, &CheckOptions { data: true, ..CheckOptions::default() })
            .unwrap()
    }

    /// Writes it to a file.
    pub fn save(&self, path: &Path) {
        let file = File::create(path).unwrap();
        let len_bytes = self.device.len_bytes();
        file.set_len(len_bytes).unwrap();
        let mut page = vec![0; PAGE_BYTES];
        for at in (0..len_bytes).step_by(PAGE_BYTES) {
            let rest = usize::try_from(len_bytes - at).unwrap();
            let page = &mut page[..PAGE_BYTES.min(rest)];
            self.device.read_at(PhysicalAddr(at), page).unwrap();
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, at).unwrap();
            }
        }
    }

    /// What `btrfs check` says of it.
    pub fn theirs(&self, mode: CheckMode) -> CheckOutcome {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        self.save(&path);
        btrfs_check(&path, mode)
    }

    /// Whether Linux mounts it for writing.
    pub fn is_mounted(&self) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        self.save(&path);
        KernelMount::mount(&[path], "", false).is_ok()
    }

    /// Asserts that `btrfs check` finds damage too.
    pub fn expect_theirs(&self) {
        let theirs = self.theirs(CheckMode::Original);
        assert!(!theirs.is_clean, "{}", theirs.transcript);
    }

    /// A volume of its own, read-only.
    pub fn open(&self, super_copy: Option<usize>) -> Volume {
        let devices = vec![self.device.clone() as Arc<dyn Device>];
        let options = VolumeOptions { read_only: true, super_copy, ..VolumeOptions::default() };
        Volume::open(devices, &options).unwrap()
    }

    /// Makes used bytes and free space what the extents leave of each group.
    pub fn settle_space(&self) {
        let items = self.items(RootId::EXTENT_TREE);
        let nodesize = self.volume.geometry().nodesize_bytes as u64;
        let mut settled = Vec::new();
        for group in items.iter().filter(|item| item.key.ty == KeyType::BLOCK_GROUP_ITEM) {
            let (start, len) = (group.key.objectid.0, group.key.offset);
            let (mut used, mut at, mut free) = (0, start, Vec::new());
            let inside = |item: &&Place| (start..start + len).contains(&item.key.objectid.0);
            for extent in items.iter().filter(inside) {
                let len = match extent.key.ty {
                    KeyType::EXTENT_ITEM => extent.key.offset,
                    KeyType::METADATA_ITEM => nodesize,
                    _ => continue,
                };
                free.push((at, extent.key.objectid.0 - at));
                at = extent.key.objectid.0 + len;
                used += len;
            }
            free.push((at, start + len - at));
            free.retain(|(_, len)| *len > 0);
            self.edit::<BlockGroupItem>(group, |item| item.used = used.into());
            let count = u32::try_from(free.len()).unwrap();
            let info = [count.to_le_bytes(), [0; 4]].concat();
            settled.push((start, KeyType::FREE_SPACE_INFO, len, info));
            let extents = free.into_iter();
            let ty = KeyType::FREE_SPACE_EXTENT;
            settled.extend(extents.map(|(at, len)| (at, ty, len, Vec::new())));
        }
        self.edit_leaf(self.root(RootId::FREE_SPACE_TREE), |leaf| {
            leaf.remove(0..leaf.len());
            for (slot, (at, ty, len, data)) in settled.iter().enumerate() {
                let key = Key::new(ObjectId(*at), *ty, *len);
                leaf.insert(slot, key, data.len()).copy_from_slice(data);
            }
        });
    }

    /// Adds an empty block group of metadata, of one copy, that begins so many bytes behind a multiple of the
    /// stripe length, behind all others.
    pub fn add_metadata_group(&self, behind_bytes: u64) -> LogicalAddr {
        let len: u64 = 8 << 20;
        let last = self.items(RootId::CHUNK_TREE).pop().unwrap();
        let template = Chunk::parse(LogicalAddr(last.key.offset), &last.data).unwrap();
        let start = LogicalAddr(template.end().0.next_multiple_of(STRIPE_LEN_BYTES) + behind_bytes);
        let place = PhysicalAddr(self.device.len_bytes() - len);
        let stripe = ChunkStripe { offset: place, ..template.stripes[0] };
        let flags = BlockGroupFlags::METADATA;
        let chunk = Chunk { start, len_bytes: len, flags, stripes: vec![stripe], ..template };
        self.insert(RootId::CHUNK_TREE, Key { offset: start.0, ..last.key }, &chunk.to_bytes());
        let extent = self.items(RootId::DEV_TREE).pop().unwrap();
        let place =
            self.insert(RootId::DEV_TREE, Key { offset: place.0, ..extent.key }, &extent.data);
        self.edit::<DevExtent>(&place, |extent| {
            extent.chunk_offset = start.0.into();
            extent.length = len.into();
        });
        let item = self.find(RootId::CHUNK_TREE, |key, _| key.ty == KeyType::DEV_ITEM);
        self.edit::<DevItem>(&item, |item| item.bytes_used += len);
        self.edit_super(|superblock| superblock.dev_item.bytes_used += len);
        let group = BlockGroupItem {
            chunk_objectid: 256.into(),
            flags: flags.0.into(),
            ..BlockGroupItem::default()
        };
        let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, len);
        self.insert(RootId::EXTENT_TREE, key, group.as_bytes());
        self.settle_space();
        self.volume.add_chunk(chunk).unwrap();
        start
    }

    /// Addresses inside block groups of metadata where there is no tree block, the last ones.
    pub fn free_blocks(&self, count: usize) -> Vec<LogicalAddr> {
        let nodesize = self.volume.geometry().nodesize_bytes as u64;
        let items = self.items(RootId::EXTENT_TREE);
        let is_group = |item: &&Place| {
            item.key.ty == KeyType::BLOCK_GROUP_ITEM && item.data[16..24] == 4_u64.to_le_bytes()
        };
        let group = items.iter().rfind(is_group).expect("a group of single metadata").key;
        let (start, end) = (group.objectid.0, group.objectid.0 + group.offset);
        let is_used = |at: u64| items.iter().any(|item| item.key.objectid.0 == at);
        let places = (1..).map(|index| end - index * nodesize).take_while(|at| *at >= start);
        let places = places.filter(|at| !is_used(*at));
        let places: Vec<LogicalAddr> = places.take(count).map(LogicalAddr).collect();
        assert_eq!(places.len(), count);
        places
    }

    /// Checks it, and asserts that the errors are of these kinds, in this order, and no others.
    pub fn expect(&self, kinds: &[&str]) -> Vec<Finding> {
        let report = self.check();
        let errors: Vec<Finding> = report.errors().cloned().collect();
        let found: Vec<&str> = errors.iter().map(Finding::kind).collect();
        assert_eq!(found, kinds, "\n{}", super::lines(&report));
        errors
    }

    /// Checks it, and asserts that there is no error and that the notes are of these kinds, beside
    /// those that any image made by an old mkfs.btrfs has.
    pub fn expect_notes(&self, kinds: &[&str]) -> Vec<Finding> {
        let report = self.check();
        assert!(report.is_clean(), "\n{}", super::lines(&report));
        let is_own = |note: &&Finding| note.kind() != "free-space-without-group";
        let notes: Vec<Finding> = report.notes().filter(is_own).cloned().collect();
        let found: Vec<&str> = notes.iter().map(Finding::kind).collect();
        assert_eq!(found, kinds, "\n{}", super::lines(&report));
        notes
    }

    pub fn superblock(&self) -> Superblock {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        self.device.read_at(SUPERBLOCK_OFFSETS[0], &mut bytes).unwrap();
        *Superblock::parse(&bytes, SUPERBLOCK_OFFSETS[0]).unwrap()
    }

    /// Changes both copies of the superblock.
    pub fn edit_super(&self, edit: impl Fn(&mut Superblock)) {
        self.edit_super_copy(0, &edit);
        self.edit_super_copy(1, &edit);
    }

    pub fn edit_super_copy(&self, copy: usize, edit: impl Fn(&mut Superblock)) {
        let at = SUPERBLOCK_OFFSETS[copy];
        let mut bytes = [0; SUPERBLOCK_BYTES];
        self.device.read_at(at, &mut bytes).unwrap();
        let mut superblock = *Superblock::peek(&bytes).unwrap();
        let bytenr = superblock.bytenr;
        edit(&mut superblock);
        let is_moved = superblock.bytenr != bytenr;
        let moved_to = superblock.bytenr.get();
        superblock.seal(if is_moved { PhysicalAddr(moved_to) } else { at }).unwrap();
        self.device.write_at(at, superblock.as_bytes()).unwrap();
    }

    /// Bytes of a block, from its first copy.
    pub fn bytes(&self, at: LogicalAddr) -> Box<[u8]> {
        let mut bytes = vec![0; self.volume.geometry().nodesize_bytes].into_boxed_slice();
        self.volume.read_mirror(at, 0, &mut bytes).unwrap();
        bytes
    }

    pub fn block(&self, at: LogicalAddr) -> Block {
        let expect =
            Expect { bytenr: at, generation: None, level: None, first_key: None, owner: None };
        verify::block(self.bytes(at), &self.volume.geometry(), &expect).unwrap()
    }

    /// Writes a block with its checksum, all copies.
    pub fn write(&self, at: LogicalAddr, mut bytes: Box<[u8]>) {
        let csum = self.volume.geometry().csum.compute(&bytes[CSUM_FIELD_BYTES..]);
        bytes[..CSUM_FIELD_BYTES].copy_from_slice(&csum);
        self.volume.write(at, &bytes).unwrap();
    }

    pub fn edit_bytes(&self, at: LogicalAddr, edit: impl FnOnce(&mut [u8])) {
        let mut bytes = self.bytes(at);
        edit(&mut bytes);
        self.write(at, bytes);
    }

    /// Where the first copy of an address lies.
    pub fn physical(&self, at: LogicalAddr) -> PhysicalAddr {
        self.volume.runs(at, 1).unwrap()[0].copies[0].at
    }

    /// Breaks one copy of a block.
    pub fn spoil(&self, at: LogicalAddr, mirror: usize) {
        let place = self.volume.runs(at, 4096).unwrap()[0].copies[mirror];
        let mut bytes = [0; 4096];
        self.device.read_at(place.at, &mut bytes).unwrap();
        bytes[200] ^= 0x10;
        self.device.write_at(place.at, &bytes).unwrap();
    }

    pub fn edit_header(&self, at: LogicalAddr, edit: impl FnOnce(&mut Header)) {
        self.edit_bytes(at, |bytes| edit(Header::peek_mut(bytes).unwrap()));
    }

    pub fn edit_leaf(&self, at: LogicalAddr, edit: impl FnOnce(&mut Leaf)) {
        let Block::Leaf(mut leaf) = self.block(at) else { panic!("{at} is no leaf") };
        edit(&mut leaf);
        assert_ne!(leaf.header().flags.get() & FLAG_WRITTEN, 0);
        self.write(at, leaf.as_bytes().into());
    }

    /// Changes an item's data in place.
    pub fn edit<T: OnDisk>(&self, place: &Place, edit: impl FnOnce(&mut T)) {
        self.edit_leaf(place.block, |leaf| {
            edit(T::peek_mut(leaf.data_mut(place.slot)).unwrap());
        });
    }

    /// Changes an item's data in place, behind `skip` bytes.
    pub fn edit_behind<T: OnDisk>(&self, place: &Place, skip: usize, edit: impl FnOnce(&mut T)) {
        self.edit_leaf(place.block, |leaf| {
            edit(T::peek_mut(&mut leaf.data_mut(place.slot)[skip..]).unwrap());
        });
    }

    pub fn remove(&self, place: &Place) {
        assert!(place.slot > 0, "the parent's key stays right");
        self.edit_leaf(place.block, |leaf| leaf.remove(place.slot..place.slot + 1));
    }

    /// Inserts an item into the leaf where it belongs.
    pub fn insert(&self, root: RootId, key: Key, data: &[u8]) -> Place {
        let before = self.items(root).into_iter().rfind(|item| item.key < key).unwrap();
        self.edit_leaf(before.block, |leaf| {
            leaf.insert(before.slot + 1, key, data.len()).copy_from_slice(data);
        });
        Place { slot: before.slot + 1, key, data: data.to_vec(), ..before }
    }

    /// The address of a tree's root block.
    pub fn root(&self, root: RootId) -> LogicalAddr {
        let superblock = self.superblock();
        LogicalAddr(match root {
            RootId::ROOT_TREE => superblock.root.get(),
            RootId::CHUNK_TREE => superblock.chunk_root.get(),
            _ => RootItem::parse(&self.root_item(root).data).unwrap().bytenr.get(),
        })
    }

    pub fn root_item(&self, root: RootId) -> Place {
        self.find(RootId::ROOT_TREE, |key, _| {
            key.ty == KeyType::ROOT_ITEM && key.objectid.0 == root.0
        })
    }

    /// The root of the subvolume of that name.
    pub fn subvolume(&self, name: &str) -> RootId {
        let place = self.find(RootId::ROOT_TREE, |key, data| {
            key.ty == KeyType::ROOT_REF && data.ends_with(name.as_bytes())
        });
        RootId(place.key.offset)
    }

    /// The blocks of a tree, each node before its children, with their parents and slots.
    pub fn blocks(&self, root: RootId) -> Vec<(Block, Option<(LogicalAddr, usize)>)> {
        let mut blocks = Vec::new();
        let mut pending = vec![(self.root(root), None)];
        while let Some((at, parent)) = pending.pop() {
            let block = self.block(at);
            if let Block::Node(node) = &block {
                let children = (0..node.len()).map(|slot| (node.child(slot), Some((at, slot))));
                pending.extend(children.rev());
            }
            blocks.push((block, parent));
        }
        blocks
    }

    /// The leaves of a tree with their parents and slots there.
    pub fn leaves(&self, root: RootId) -> Vec<(Leaf, Option<(LogicalAddr, usize)>)> {
        let leaves = self.blocks(root).into_iter().filter_map(|(block, parent)| match block {
            Block::Leaf(leaf) => Some((leaf, parent)),
            Block::Node(_) => None,
        });
        leaves.collect()
    }

    pub fn items(&self, root: RootId) -> Vec<Place> {
        let mut items = Vec::new();
        for (leaf, _) in self.leaves(root) {
            let block = LogicalAddr(leaf.header().bytenr.get());
            items.extend((0..leaf.len()).map(|slot| Place {
                root,
                block,
                slot,
                key: leaf.key(slot),
                data: leaf.data(slot).to_vec(),
            }));
        }
        items
    }

    /// The first item that is asked for.
    pub fn find(&self, root: RootId, ask: impl Fn(Key, &[u8]) -> bool) -> Place {
        let items = self.items(root);
        let found = items.into_iter().find(|item| ask(item.key, &item.data));
        found.expect("there is such an item")
    }

    /// The item of that key.
    pub fn item(&self, root: RootId, objectid: u64, ty: KeyType, offset: u64) -> Place {
        self.find(root, |key, _| (key.objectid.0, key.ty, key.offset) == (objectid, ty, offset))
    }

    /// The inode of a name in the top directory of a tree.
    pub fn inode(&self, root: RootId, name: &str) -> u64 {
        let place = self.find(root, |key, data| {
            key.objectid.0 == 256
                && key.ty == KeyType::DIR_INDEX
                && data.ends_with(name.as_bytes())
                && data.len() == 30 + name.len()
        });
        u64::from_le_bytes(place.data[..8].try_into().unwrap())
    }
}
