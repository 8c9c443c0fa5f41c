//! Each check of the checker, against the damage that it is there for; the same items undamaged
//! are accepted.

use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, Header, Leaf, NewBlock, Node};
use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::chunk::{Chunk, ChunkStripe};
use ubtrfs_ondisk::dir::{DirItem, FileType, write_entry};
use ubtrfs_ondisk::extent::{BackRef, ExtentItem, flags as extent_flags};
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::free_space::FreeSpaceInfo;
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::inode::{InodeItem, write_extref, write_ref};
use ubtrfs_ondisk::misc::{DevExtent, DevItem, OnDisk};
use ubtrfs_ondisk::root::{RootItem, RootRef};
use ubtrfs_ondisk::superblock::{MAGIC, Superblock};
use ubtrfs_ondisk::verify::{self, Expect, Geometry};
use ubtrfs_ondisk::{
    CsumType, DeviceId, Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, PhysicalAddr,
    Reason, Result, RootId, Uuid,
};
use zerocopy::{FromZeros, IntoBytes};

const NODESIZE_BYTES: usize = 16_384;
const ADDRESS: LogicalAddr = LogicalAddr(0x40_0000);

type Item = (Key, Vec<u8>);

fn geometry() -> Geometry {
    Geometry {
        nodesize_bytes: NODESIZE_BYTES,
        sectorsize_bytes: 4096,
        csum: CsumType::Crc32c,
        fsid: Uuid([7; 16]),
    }
}

fn new_block(owner: RootId) -> NewBlock {
    NewBlock {
        fsid: geometry().fsid,
        chunk_tree_uuid: Uuid([9; 16]),
        bytenr: ADDRESS,
        generation: Generation(11),
        owner,
        nodesize_bytes: NODESIZE_BYTES,
    }
}

fn expect() -> Expect {
    Expect { bytenr: ADDRESS, generation: None, level: None, first_key: None, owner: None }
}

/// A sealed leaf of `owner` with `items`.
fn leaf_bytes(owner: RootId, items: &[Item]) -> Vec<u8> {
    let mut leaf = Leaf::new(&new_block(owner));
    for (slot, (key, data)) in items.iter().enumerate() {
        leaf.insert(slot, *key, data.len()).copy_from_slice(data);
    }
    let mut block = Block::Leaf(leaf);
    block.seal(CsumType::Crc32c);
    block.as_bytes().to_vec()
}

/// Gives changed bytes their checksum again.
fn reseal(bytes: &mut [u8]) {
    let csum = CsumType::Crc32c.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&csum);
}

fn check(bytes: &[u8], expect: &Expect) -> Result<Block> {
    verify::block(bytes.into(), &geometry(), expect)
}

fn check_items(owner: RootId, items: &[Item]) -> Result<Block> {
    check(&leaf_bytes(owner, items), &expect())
}

#[track_caller]
fn accepted(owner: RootId, items: &[Item]) {
    check_items(owner, items).expect("items without damage");
}

#[track_caller]
fn refused(owner: RootId, items: &[Item], reason: Reason) {
    let error = check_items(owner, items).expect_err("damage is found");
    assert_eq!(error.reason, reason, "{error}");
    assert_eq!(error.block, Some(ADDRESS));
    assert!(error.slot.is_some() && !error.have.is_empty() && !error.expect.is_empty(), "{error}");
}

fn key(objectid: u64, ty: KeyType, offset: u64) -> Key {
    Key::new(ObjectId(objectid), ty, offset)
}

/// `item` with one byte changed.
fn with_byte(item: &Item, at: usize, value: u8) -> Item {
    let mut changed = item.clone();
    changed.1[at] = value;
    changed
}

fn with_offset(item: &Item, offset: u64) -> Item {
    (Key { offset, ..item.0 }, item.1.clone())
}

fn inode() -> Item {
    let item = InodeItem { mode: 0o100_644.into(), nlink: 1.into(), ..InodeItem::default() };
    (key(257, KeyType::INODE_ITEM, 0), item.as_bytes().to_vec())
}

fn entry(ty: KeyType, offset: u64, file_type: FileType, location: Key, data: &[u8]) -> Item {
    let mut bytes = Vec::new();
    write_entry(&mut bytes, &DirItem::new(location, Generation(5), file_type), b"name", data);
    (key(257, ty, offset), bytes)
}

fn target() -> Key {
    key(300, KeyType::INODE_ITEM, 0)
}

fn extent(offset: u64, change: impl Fn(&mut RegularExtent)) -> Item {
    let mut extent = RegularExtent {
        generation: Generation(5),
        ram_bytes: 8192,
        compression: Compression::None,
        disk_bytenr: LogicalAddr(1 << 20),
        disk_num_bytes: 8192,
        offset: 0,
        num_bytes: 8192,
    };
    change(&mut extent);
    let mut bytes = Vec::new();
    FileExtent::Regular(extent).write(&mut bytes);
    (key(257, KeyType::EXTENT_DATA, offset), bytes)
}

fn extent_item(refs: u64, flags: u64, inline: &[BackRef]) -> Vec<u8> {
    let item = ExtentItem { refs: refs.into(), generation: 5.into(), flags: flags.into() };
    let mut bytes = item.as_bytes().to_vec();
    for back_ref in inline {
        back_ref.write_inline(&mut bytes);
    }
    bytes
}

fn data_ref(inode: u64, offset: u64, count: u32) -> BackRef {
    BackRef::ExtentData { root: RootId::FS_TREE, inode: InodeNo(inode), offset, count }
}

#[test]
fn headers_that_do_not_fit_are_refused() {
    let good = leaf_bytes(RootId::FS_TREE, &[inode()]);
    let reason = |change: &dyn Fn(&mut Header), expect: &Expect| {
        let mut bytes = good.clone();
        change(Header::peek_mut(&mut bytes).unwrap());
        reseal(&mut bytes);
        check(&bytes, expect).unwrap_err().reason
    };
    let same = |_: &mut Header| {};
    let any = expect();
    assert!(check(&good, &any).is_ok());
    assert_eq!(reason(&|header| header.bytenr = 4096.into(), &any), Reason::WrongBytenr);
    assert_eq!(reason(&|header| header.fsid = [8; 16], &any), Reason::WrongFsid);
    assert_eq!(reason(&|header| header.level = 8, &any), Reason::WrongLevel);
    assert_eq!(reason(&|header| header.flags &= !FLAG_WRITTEN, &any), Reason::NotWritten);
    assert_eq!(reason(&|header| header.nritems = 5000.into(), &any), Reason::BadItemCount);
    assert_eq!(reason(&|header| header.nritems = u32::MAX.into(), &any), Reason::BadItemCount);
    let expect = Expect { generation: Some(Generation(12)), ..any };
    assert_eq!(reason(&same, &expect), Reason::WrongGeneration);
    let expect = Expect { level: Some(1), ..any };
    assert_eq!(reason(&same, &expect), Reason::WrongLevel);
    let expect = Expect { first_key: Some(Key::MIN), ..any };
    assert_eq!(reason(&same, &expect), Reason::WrongFirstKey);
    let expect = Expect { owner: Some(RootId::EXTENT_TREE), ..any };
    assert_eq!(reason(&same, &expect), Reason::WrongOwner);
    for shared in [RootId(300), RootId::TREE_LOG, RootId::TREE_RELOC] {
        assert!(check(&good, &Expect { owner: Some(shared), ..any }).is_ok());
    }
    let mut torn = good.clone();
    torn[9000] ^= 1;
    assert_eq!(check(&torn, &any).unwrap_err().reason, Reason::CsumMismatch);
    assert_eq!(check(&good[..4096], &any).unwrap_err().reason, Reason::Truncated);
}

#[test]
fn leaves_with_a_wrong_layout_are_refused() {
    let any = |number| (key(number, KeyType::STRING_ITEM, 0), vec![1; 30]);
    accepted(RootId::FS_TREE, &[any(1), any(2)]);
    refused(RootId::FS_TREE, &[any(2), any(1)], Reason::KeyOrder);
    refused(RootId::FS_TREE, &[any(2), any(2)], Reason::KeyOrder);
    for (slot, field) in [(0, 17), (0, 21), (1, 17), (1, 21)] {
        let mut bytes = leaf_bytes(RootId::FS_TREE, &[any(1), any(2)]);
        bytes[101 + slot * 25 + field] ^= 1;
        reseal(&mut bytes);
        let error = check(&bytes, &expect()).unwrap_err();
        assert_eq!(error.reason, Reason::ItemDataLayout, "{error}");
    }
    // Data that would reach into the item headers.
    let mut bytes = leaf_bytes(RootId::FS_TREE, &[any(1)]);
    bytes[101 + 17..][..8].copy_from_slice(&[8, 0, 0, 0, 0x93, 0x3f, 0, 0]);
    reseal(&mut bytes);
    assert_eq!(check(&bytes, &expect()).unwrap_err().reason, Reason::ItemDataLayout);
}

#[test]
fn empty_leaves_are_refused_in_trees_that_always_hold_something() {
    for owner in [1, 2, 3, 4, 5, 0, RootId::DATA_RELOC_TREE.0] {
        let error = check_items(RootId(owner), &[]).unwrap_err();
        assert_eq!(error.reason, Reason::BadItemCount);
    }
    for owner in [RootId::CSUM_TREE, RootId::UUID_TREE, RootId(300), RootId::TREE_LOG] {
        accepted(owner, &[]);
    }
}

#[test]
fn nodes_with_a_wrong_layout_are_refused() {
    let node = |pointers: &[(u64, u64)]| {
        let mut node = Node::new(&new_block(RootId::FS_TREE), 1);
        for (slot, (number, child)) in pointers.iter().enumerate() {
            node.insert(slot, key(*number, KeyType(1), 0), LogicalAddr(*child), Generation(3));
        }
        let mut block = Block::Node(node);
        block.seal(CsumType::Crc32c);
        check(block.as_bytes(), &expect()).map_err(|error| error.reason)
    };
    assert!(node(&[(1, 4096), (2, 8192)]).is_ok());
    assert_eq!(node(&[]).unwrap_err(), Reason::BadItemCount);
    assert_eq!(node(&[(2, 4096), (1, 8192)]).unwrap_err(), Reason::KeyOrder);
    assert_eq!(node(&[(1, 0)]).unwrap_err(), Reason::BadBlockPointer);
    assert_eq!(node(&[(1, 4097)]).unwrap_err(), Reason::BadBlockPointer);
}

#[test]
fn inodes_are_checked() {
    let tree = RootId::FS_TREE;
    let good = inode();
    accepted(tree, std::slice::from_ref(&good));
    refused(tree, &[with_offset(&good, 1)], Reason::BadKey);
    refused(tree, &[(key(100, KeyType::INODE_ITEM, 0), good.1.clone())], Reason::BadKey);
    refused(tree, &[(good.0, good.1[..159].to_vec())], Reason::BadItemLen);
    // Offsets of mode, flags and nlink in the item.
    refused(tree, &[with_byte(&good, 53, 0)], Reason::BadValue);
    refused(tree, &[with_byte(&good, 54, 1)], Reason::BadValue);
    refused(tree, &[with_byte(&good, 65, 0x10)], Reason::BadValue);
    let mut directory = with_byte(&good, 53, 0x41);
    accepted(tree, std::slice::from_ref(&directory));
    directory.1[40] = 2;
    refused(tree, &[directory], Reason::BadValue);
}

#[test]
fn references_are_checked() {
    let tree = RootId::FS_TREE;
    let mut short = Vec::new();
    write_ref(&mut short, 2, b"one");
    write_ref(&mut short, 3, b"other");
    let mut long = Vec::new();
    write_extref(&mut long, InodeNo(256), 2, b"one");
    for (ty, data) in [(KeyType::INODE_REF, short), (KeyType::INODE_EXTREF, long)] {
        let good = (key(257, ty, 256), data);
        accepted(tree, &[inode(), good.clone()]);
        accepted(tree, std::slice::from_ref(&good));
        refused(tree, &[inode(), (good.0, good.1[..good.1.len() - 1].to_vec())], Reason::Truncated);
        refused(tree, &[inode(), (good.0, Vec::new())], Reason::BadItemLen);
        let other = (key(258, ty, 256), good.1.clone());
        refused(tree, &[inode(), other.clone()], Reason::NoInode);
        accepted(RootId::TREE_LOG, &[inode(), other]);
    }
    let mut empty_name = Vec::new();
    write_ref(&mut empty_name, 2, b"a");
    write_ref(&mut empty_name, 2, b"");
    let item = (key(257, KeyType::INODE_REF, 256), empty_name);
    refused(tree, &[inode(), item], Reason::BadValue);
    let mut overlong = Vec::new();
    write_ref(&mut overlong, 2, &[b'x'; 256]);
    let item = (key(257, KeyType::INODE_REF, 256), overlong);
    refused(tree, &[inode(), item], Reason::BadValue);
}

#[test]
fn entries_are_checked() {
    let tree = RootId::FS_TREE;
    let hash = name_hash(b"name");
    let regular = FileType::Regular;
    let by_hash = entry(KeyType::DIR_ITEM, hash, regular, target(), b"");
    let by_index = entry(KeyType::DIR_INDEX, 2, regular, target(), b"");
    let xattr = entry(KeyType::XATTR_ITEM, hash, FileType::Xattr, Key::MIN, b"value");
    accepted(tree, &[inode(), xattr.clone(), by_hash.clone(), by_index]);
    refused(tree, &[inode(), with_offset(&by_hash, hash + 1)], Reason::WrongNameHash);
    refused(tree, &[inode(), with_offset(&xattr, hash + 1)], Reason::WrongNameHash);
    refused(tree, &[inode(), with_byte(&by_hash, 29, 9)], Reason::BadValue);
    refused(tree, &[inode(), with_byte(&by_hash, 29, 8)], Reason::BadValue);
    refused(tree, &[inode(), with_byte(&xattr, 29, 1)], Reason::BadValue);
    let with_data = entry(KeyType::DIR_ITEM, hash, regular, target(), b"data");
    refused(tree, &[inode(), with_data], Reason::BadValue);
    let location = key(300, KeyType::EXTENT_DATA, 0);
    let elsewhere = entry(KeyType::DIR_INDEX, 2, regular, location, b"");
    refused(tree, &[inode(), elsewhere], Reason::BadValue);
    let subvolume = key(300, KeyType::ROOT_ITEM, u64::MAX);
    accepted(tree, &[inode(), entry(KeyType::DIR_INDEX, 2, FileType::Directory, subvolume, b"")]);
    let extent_tree = key(2, KeyType::ROOT_ITEM, u64::MAX);
    let wrong_tree = entry(KeyType::DIR_INDEX, 2, FileType::Directory, extent_tree, b"");
    refused(tree, &[inode(), wrong_tree], Reason::BadValue);
    let cut = (by_hash.0, by_hash.1[..by_hash.1.len() - 1].to_vec());
    refused(tree, &[inode(), cut], Reason::Truncated);
}

#[test]
fn file_extents_are_checked() {
    let tree = RootId::FS_TREE;
    let good = extent(8192, |_| {});
    accepted(tree, &[inode(), extent(0, |_| {}), good.clone()]);
    refused(tree, &[inode(), with_offset(&good, 100)], Reason::Unaligned);
    refused(tree, &[inode(), extent(4096, |_| {}), good.clone()], Reason::Overlap);
    refused(tree, &[inode(), extent(0, |extent| extent.num_bytes = 100)], Reason::Unaligned);
    refused(tree, &[inode(), extent(0, |extent| extent.ram_bytes = 1)], Reason::Unaligned);
    refused(tree, &[inode(), extent(0, |extent| extent.offset = 1)], Reason::Unaligned);
    refused(tree, &[inode(), extent(0, |extent| extent.disk_num_bytes = 1)], Reason::Unaligned);
    let disk = LogicalAddr(1);
    refused(tree, &[inode(), extent(0, |extent| extent.disk_bytenr = disk)], Reason::Unaligned);
    let end = u64::MAX - 4095;
    refused(tree, &[inode(), extent(8192, |extent| extent.num_bytes = end)], Reason::BadValue);
    refused(tree, &[inode(), with_byte(&good, 20, 3)], Reason::BadValue);
    refused(tree, &[inode(), with_byte(&good, 16, 4)], Reason::BadValue);
    refused(tree, &[inode(), with_byte(&good, 17, 1)], Reason::BadValue);
    refused(tree, &[inode(), (good.0, good.1[..52].to_vec())], Reason::BadItemLen);

    let inline = |offset, ram_bytes, compression| {
        let generation = Generation(5);
        let mut bytes = Vec::new();
        FileExtent::Inline { generation, ram_bytes, compression, data: b"data" }.write(&mut bytes);
        (key(257, KeyType::EXTENT_DATA, offset), bytes)
    };
    accepted(tree, &[inode(), inline(0, 4, Compression::None), extent(4096, |_| {})]);
    accepted(tree, &[inode(), inline(0, 100, Compression::Zstd)]);
    refused(tree, &[inode(), inline(4096, 4, Compression::None)], Reason::BadKey);
    refused(tree, &[inode(), inline(0, 5, Compression::None)], Reason::BadValue);
    refused(
        tree,
        &[inode(), inline(0, 5000, Compression::Zlib), extent(4096, |_| {})],
        Reason::Overlap,
    );
}

#[test]
fn csums_are_checked() {
    let tree = RootId::CSUM_TREE;
    let id = ObjectId::EXTENT_CSUM.0;
    let csum = |offset, len| (key(id, KeyType::EXTENT_CSUM, offset), vec![1; len]);
    accepted(tree, &[csum(4096, 8), csum(4096 * 3, 4)]);
    refused(tree, &[csum(4096, 8), csum(8192, 4)], Reason::Overlap);
    refused(tree, &[csum(4097, 8)], Reason::Unaligned);
    refused(tree, &[csum(4096, 7)], Reason::BadItemLen);
    refused(tree, &[(key(5, KeyType::EXTENT_CSUM, 4096), vec![1; 4])], Reason::BadKey);
}

#[test]
fn extent_items_are_checked() {
    let tree = RootId::EXTENT_TREE;
    let metadata = |bytenr, level, bytes| (key(bytenr, KeyType::METADATA_ITEM, level), bytes);
    let data = |bytenr, len, bytes| (key(bytenr, KeyType::EXTENT_ITEM, len), bytes);
    let block = extent_flags::TREE_BLOCK;
    let by_root = |root| BackRef::TreeBlock { root: RootId(root) };
    let by_parent = |parent| BackRef::SharedBlock { parent: LogicalAddr(parent) };

    accepted(tree, &[metadata(16_384, 0, extent_item(1, block, &[by_root(5)]))]);
    let descending = [by_root(9), by_root(5), by_parent(8192), by_parent(4096)];
    accepted(tree, &[metadata(16_384, 0, extent_item(4, block, &descending))]);
    let ascending = [by_root(5), by_root(9)];
    refused(tree, &[metadata(16_384, 0, extent_item(2, block, &ascending))], Reason::RefOrder);
    let types = [by_parent(4096), by_root(5)];
    refused(tree, &[metadata(16_384, 0, extent_item(2, block, &types))], Reason::RefOrder);
    let unaligned = [by_parent(4097)];
    refused(tree, &[metadata(16_384, 0, extent_item(1, block, &unaligned))], Reason::Unaligned);
    let two = [by_root(9), by_root(5)];
    refused(tree, &[metadata(16_384, 0, extent_item(1, block, &two))], Reason::WrongRefCount);
    refused(tree, &[metadata(16_384, 8, extent_item(1, block, &[]))], Reason::WrongLevel);
    refused(tree, &[metadata(16_385, 0, extent_item(1, block, &[]))], Reason::Unaligned);
    refused(tree, &[metadata(16_384, 0, extent_item(1, 1, &[]))], Reason::BadKey);
    refused(tree, &[metadata(16_384, 0, extent_item(1, 3, &[]))], Reason::BadValue);
    refused(tree, &[metadata(16_384, 0, extent_item(1, 0, &[]))], Reason::BadValue);
    let mut padded = extent_item(1, block, &[by_root(5)]);
    padded.push(0);
    refused(tree, &[metadata(16_384, 0, padded)], Reason::Truncated);
    let first = metadata(16_384, 0, extent_item(1, block, &[by_root(5)]));
    let second = metadata(20_480, 0, extent_item(1, block, &[by_root(5)]));
    refused(tree, &[first, second], Reason::Overlap);

    accepted(tree, &[data(4096, 8192, extent_item(3, 1, &[data_ref(257, 0, 3)]))]);
    refused(tree, &[data(4096, 100, extent_item(1, 1, &[]))], Reason::Unaligned);
    refused(tree, &[data(4096, 4096, extent_item(1, 0x101, &[]))], Reason::BadValue);
    refused(
        tree,
        &[data(4096, 4096, extent_item(1, 1, &[data_ref(257, 7, 1)]))],
        Reason::Unaligned,
    );
    refused(tree, &[data(4096, 4096, extent_item(1, 1, &[data_ref(1, 0, 1)]))], Reason::BadValue);
    let zero = extent_item(1, 1, &[data_ref(257, 0, 0)]);
    refused(tree, &[data(4096, 4096, zero)], Reason::WrongRefCount);
    refused(tree, &[data(16_384, 4096, extent_item(1, block, &[]))], Reason::BadKey);
    let mut unknown = extent_item(1, 1, &[]);
    unknown.extend([199; 9]);
    refused(tree, &[data(4096, 4096, unknown)], Reason::BadValue);
    let owner = BackRef::Owner { root: RootId::FS_TREE };
    accepted(tree, &[data(4096, 4096, extent_item(1, 1, &[owner, data_ref(257, 0, 1)]))]);
}

#[test]
fn keyed_references_are_checked() {
    let tree = RootId::EXTENT_TREE;
    let keyed = |back_ref: BackRef| {
        let mut bytes = Vec::new();
        back_ref.write_keyed(&mut bytes);
        (back_ref.key(LogicalAddr(4096)), bytes)
    };
    let by_root = keyed(BackRef::TreeBlock { root: RootId(5) });
    let by_parent = keyed(BackRef::SharedBlock { parent: LogicalAddr(8192) });
    let by_file = keyed(data_ref(257, 0, 1));
    let by_leaf = keyed(BackRef::SharedData { parent: LogicalAddr(8192), count: 2 });
    accepted(tree, &[by_root.clone(), by_file.clone(), by_parent.clone(), by_leaf.clone()]);
    refused(tree, &[(by_root.0, vec![0])], Reason::BadItemLen);
    refused(tree, &[with_offset(&by_parent, 100)], Reason::Unaligned);
    refused(tree, &[with_offset(&by_leaf, 100)], Reason::Unaligned);
    refused(tree, &[with_byte(&by_leaf, 0, 0)], Reason::WrongRefCount);
    refused(tree, &[with_byte(&by_file, 24, 0)], Reason::WrongRefCount);
    refused(tree, &[(by_file.0, by_file.1[..27].to_vec())], Reason::Truncated);
}

#[test]
fn free_space_is_checked() {
    let tree = RootId::FREE_SPACE_TREE;
    let info = |count: u32, flags: u32| {
        let item = FreeSpaceInfo { extent_count: count.into(), flags: flags.into() };
        (key(1 << 20, KeyType::FREE_SPACE_INFO, 8 << 20), item.as_bytes().to_vec())
    };
    let extent = (key(1 << 20, KeyType::FREE_SPACE_EXTENT, 4096), Vec::new());
    let bitmap = (key(1 << 20, KeyType::FREE_SPACE_BITMAP, 8 << 20), vec![0; 256]);
    accepted(tree, &[info(2048, 1), extent.clone(), bitmap.clone()]);
    refused(tree, &[info(2049, 1)], Reason::BadValue);
    refused(tree, &[info(1, 2)], Reason::BadValue);
    refused(tree, &[with_offset(&info(1, 0), 100)], Reason::Unaligned);
    refused(tree, &[(extent.0, vec![0])], Reason::BadItemLen);
    refused(tree, &[with_offset(&extent, 0)], Reason::BadKey);
    refused(tree, &[(bitmap.0, vec![0; 255])], Reason::BadItemLen);
}

#[test]
fn roots_are_checked() {
    let tree = RootId::ROOT_TREE;
    let item = RootItem { bytenr: 65_536.into(), ..RootItem::default() };
    let good = (key(5, KeyType::ROOT_ITEM, 0), item.as_bytes().to_vec());
    accepted(tree, std::slice::from_ref(&good));
    accepted(tree, &[(good.0, good.1[..239].to_vec())]);
    refused(tree, &[(good.0, good.1[..240].to_vec())], Reason::BadItemLen);
    refused(tree, &[(key(0, KeyType::ROOT_ITEM, 0), good.1.clone())], Reason::BadKey);
    let copy_of_no_subvolume = key(RootId::TREE_RELOC.0, KeyType::ROOT_ITEM, 2);
    refused(tree, &[(copy_of_no_subvolume, good.1.clone())], Reason::BadKey);
    let copy = key(RootId::TREE_RELOC.0, KeyType::ROOT_ITEM, RootId::DATA_RELOC_TREE.0);
    accepted(tree, &[(copy, good.1.clone())]);
    refused(tree, &[with_byte(&good, 176, 1)], Reason::Unaligned);
    refused(tree, &[with_byte(&good, 238, 8)], Reason::WrongLevel);
    refused(tree, &[with_byte(&good, 220, 1)], Reason::BadValue);
    refused(tree, &[with_byte(&good, 209, 2)], Reason::BadValue);

    let mut bytes = Vec::new();
    RootRef::write(&mut bytes, InodeNo(256), 2, b"name");
    let root_ref = (key(5, KeyType::ROOT_REF, 256), bytes);
    accepted(tree, std::slice::from_ref(&root_ref));
    refused(tree, &[(root_ref.0, root_ref.1[..21].to_vec())], Reason::Truncated);
    let mut padded = root_ref.clone();
    padded.1.push(0);
    refused(tree, &[padded], Reason::BadItemLen);
    refused(tree, &[(root_ref.0, vec![0; 18])], Reason::BadValue);
}

fn chunk() -> Chunk {
    let stripe = |offset| ChunkStripe {
        device: DeviceId(1),
        offset: PhysicalAddr(offset),
        device_uuid: Uuid([3; 16]),
    };
    Chunk {
        start: LogicalAddr(1 << 20),
        len_bytes: 8 << 20,
        stripe_len_bytes: 65_536,
        flags: BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP,
        io_align: 65_536,
        io_width: 65_536,
        sector_size: 4096,
        sub_stripes: 1,
        stripes: vec![stripe(1 << 20), stripe(16 << 20)],
    }
}

#[test]
fn chunks_are_checked() {
    let bad = |change: &dyn Fn(&mut Chunk)| {
        let mut chunk = chunk();
        change(&mut chunk);
        let incompat = Some(Incompat::MIXED_BACKREF);
        verify::chunk(&chunk, 4096, incompat).unwrap_err().reason
    };
    verify::chunk(&chunk(), 4096, None).unwrap();
    assert_eq!(bad(&|chunk| chunk.start = LogicalAddr(1)), Reason::Unaligned);
    assert_eq!(bad(&|chunk| chunk.len_bytes = 1), Reason::Unaligned);
    assert_eq!(bad(&|chunk| chunk.len_bytes = 0), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.start = LogicalAddr(u64::MAX - 4095)), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.stripe_len_bytes = 4096), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.sector_size = 512), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.stripes.truncate(1)), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.flags = BlockGroupFlags::DUP), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.flags = BlockGroupFlags(7)), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.flags.0 |= 1 << 40), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.flags.0 |= 1 << 3), Reason::BadValue);
    assert_eq!(bad(&|chunk| chunk.flags = BlockGroupFlags(0x25)), Reason::BadValue);
    // Profile, stripes that fit, and whether RAID10 says its pairs.
    for (profile, stripes) in
        [(0, 1), (8, 1), (16, 2), (32, 2), (64, 4), (128, 2), (256, 3), (512, 3), (1024, 4)]
    {
        let mut chunk = chunk();
        chunk.flags = BlockGroupFlags(1 | profile);
        chunk.sub_stripes = 2;
        chunk.stripes = vec![chunk.stripes[0]; stripes];
        verify::chunk(&chunk, 4096, None).unwrap();
        chunk.stripes.pop();
        assert!(verify::chunk(&chunk, 4096, None).is_err(), "profile {profile}");
    }
    let tree = RootId::CHUNK_TREE;
    let item = (key(256, KeyType::CHUNK_ITEM, 1 << 20), chunk().to_bytes());
    accepted(tree, std::slice::from_ref(&item));
    refused(tree, &[(item.0, item.1[..100].to_vec())], Reason::Truncated);
    refused(tree, &[with_byte(&item, 24, 0)], Reason::BadValue);
}

#[test]
fn devices_and_block_groups_are_checked() {
    let device = DevItem {
        devid: 1.into(),
        total_bytes: 9.into(),
        bytes_used: 9.into(),
        ..DevItem::default()
    };
    let device = (key(1, KeyType::DEV_ITEM, 1), device.as_bytes().to_vec());
    accepted(RootId::CHUNK_TREE, std::slice::from_ref(&device));
    refused(RootId::CHUNK_TREE, &[with_offset(&device, 2)], Reason::BadKey);
    refused(RootId::CHUNK_TREE, &[with_byte(&device, 16, 10)], Reason::BadValue);
    refused(
        RootId::CHUNK_TREE,
        &[(key(2, KeyType::DEV_ITEM, 1), device.1.clone())],
        Reason::BadKey,
    );

    let extent = |offset| {
        let item = DevExtent {
            chunk_tree: 3.into(),
            chunk_objectid: 256.into(),
            chunk_offset: 4096.into(),
            length: 8192.into(),
            chunk_tree_uuid: [0; 16],
        };
        (key(1, KeyType::DEV_EXTENT, offset), item.as_bytes().to_vec())
    };
    accepted(RootId::DEV_TREE, &[extent(4096), extent(12_288)]);
    refused(RootId::DEV_TREE, &[extent(4096), extent(8192)], Reason::Overlap);
    refused(RootId::DEV_TREE, &[extent(100)], Reason::Unaligned);
    refused(RootId::DEV_TREE, &[with_byte(&extent(4096), 0, 4)], Reason::BadValue);
    refused(RootId::DEV_TREE, &[with_byte(&extent(4096), 24, 1)], Reason::Unaligned);

    let group = |used: u64, flags: u64| {
        let item =
            BlockGroupItem { used: used.into(), chunk_objectid: 256.into(), flags: flags.into() };
        (key(1 << 20, KeyType::BLOCK_GROUP_ITEM, 1 << 20), item.as_bytes().to_vec())
    };
    let tree = RootId::EXTENT_TREE;
    accepted(tree, &[group(1 << 20, 0x24)]);
    refused(tree, &[group((1 << 20) + 1, 0x24)], Reason::BadValue);
    refused(tree, &[group(0, 0x34)], Reason::BadValue);
    refused(tree, &[group(0, 0x20)], Reason::BadValue);
    refused(tree, &[group(0, 6)], Reason::BadValue);
    refused(tree, &[with_offset(&group(0, 4), 0)], Reason::BadKey);
    refused(tree, &[with_byte(&group(0, 4), 8, 1)], Reason::BadValue);
}

#[test]
fn other_items_have_their_lengths_checked() {
    let tree = RootId::ROOT_TREE;
    for (ty, objectid, offset, len) in [
        (KeyType::DIR_LOG_INDEX, 257, 0, 8),
        (KeyType::UUID_KEY_SUBVOL, 1, 1, 8),
        (KeyType::QGROUP_STATUS, 0, 0, 32),
        (KeyType::QGROUP_INFO, 0, 5, 40),
        (KeyType::QGROUP_LIMIT, 0, 5, 40),
        (KeyType::TEMPORARY_ITEM, ObjectId::BALANCE.0, 0, 448),
        (KeyType::DEV_REPLACE, 0, 0, 72),
        (KeyType::FREE_SPACE_HEADER, ObjectId::FREE_SPACE.0, 4096, 41),
        (KeyType::RAID_STRIPE, 4096, 4096, 16),
        (KeyType::VERITY_DESC_ITEM, 257, 0, 25),
    ] {
        accepted(tree, &[(key(objectid, ty, offset), vec![0; len])]);
        refused(tree, &[(key(objectid, ty, offset), vec![0; len - 1])], Reason::BadItemLen);
    }
    accepted(tree, &[(key(7, KeyType(250), 1 << 60), vec![0; 100])]);
    accepted(tree, &[(key(7, KeyType(77), 3), vec![0; 100])]);
}

#[test]
fn superblocks_are_checked() {
    let mut good = Superblock::new_zeroed();
    good.magic = MAGIC.into();
    good.sectorsize = 4096.into();
    good.nodesize = 16_384.into();
    good.leafsize = 16_384.into();
    good.stripesize = 4096.into();
    good.bytes_used = (6 * 16_384).into();
    good.num_devices = 1.into();
    good.root = (1 << 20).into();
    good.chunk_root = (2 << 20).into();
    good.set_sys_chunks(&[chunk()]).unwrap();
    verify::superblock(&good).unwrap();
    let bad = |change: &dyn Fn(&mut Superblock)| {
        let mut superblock = good;
        change(&mut superblock);
        verify::superblock(&superblock).unwrap_err().reason
    };
    assert_eq!(bad(&|sb| sb.csum_type = 4.into()), Reason::UnknownCsumType);
    assert_eq!(bad(&|sb| sb.sectorsize = 2048.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.sectorsize = 5000.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.nodesize = 2048.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.nodesize = 131_072.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.leafsize = 4096.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.stripesize = 0.into()), Reason::BadGeometry);
    assert_eq!(bad(&|sb| sb.flags = (1 << 35).into()), Reason::BadValue);
    assert_eq!(bad(&|sb| sb.root_level = 8), Reason::WrongLevel);
    assert_eq!(bad(&|sb| sb.chunk_root_level = 8), Reason::WrongLevel);
    assert_eq!(bad(&|sb| sb.log_root_level = 8), Reason::WrongLevel);
    assert_eq!(bad(&|sb| sb.root = 100.into()), Reason::Unaligned);
    assert_eq!(bad(&|sb| sb.chunk_root = 100.into()), Reason::Unaligned);
    assert_eq!(bad(&|sb| sb.log_root = 100.into()), Reason::Unaligned);
    assert_eq!(bad(&|sb| sb.dev_item.fsid = [1; 16]), Reason::WrongFsid);
    assert_eq!(bad(&|sb| sb.bytes_used = 1.into()), Reason::BadValue);
    assert_eq!(bad(&|sb| sb.num_devices = 0.into()), Reason::BadValue);
    assert_eq!(bad(&|sb| sb.sys_chunk_array_size = 0.into()), Reason::BadItemLen);
    assert_eq!(bad(&|sb| sb.sys_chunk_array_size = 2049.into()), Reason::BadItemLen);
    assert_eq!(bad(&|sb| sb.sys_chunk_array_size = 100.into()), Reason::Truncated);
    assert_eq!(bad(&|sb| sb.sys_chunk_array[8] = 1), Reason::BadKey);
    assert_eq!(
        bad(&|sb| sb.compat_ro_flags = CompatRo::BLOCK_GROUP_TREE.0.into()),
        Reason::BadFeatures
    );
    assert_eq!(bad(&|sb| sb.incompat_flags = Incompat::MIXED_GROUPS.0.into()), Reason::BadFeatures);
    let data = Chunk { flags: BlockGroupFlags::DATA | BlockGroupFlags::DUP, ..chunk() };
    assert_eq!(
        bad(&|sb| sb.set_sys_chunks(std::slice::from_ref(&data)).unwrap()),
        Reason::BadValue
    );

    let mut strange = good;
    strange.incompat_flags = (Incompat::NO_HOLES.0 | 1 << 60).into();
    strange.compat_ro_flags = (1 << 50).into();
    strange.chunk_root_generation = 5.into();
    strange.cache_generation = 5.into();
    verify::superblock(&strange).unwrap();
    assert_eq!(verify::unknown_features(&strange).incompat, Incompat(1 << 60));
    assert_eq!(verify::unknown_features(&strange).compat_ro, CompatRo(1 << 50));
    assert_eq!(verify::suspicions(&strange).len(), 2);
    good.cache_generation = u64::MAX.into();
    assert!(verify::suspicions(&good).is_empty());
}
