//! An item of any key and content: alone in a leaf it is checked, parsed and printed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_fuzz::{ADDRESS, NODESIZE_BYTES, geometry};
use ubtrfs_ondisk::block::{ITEM_BYTES, Leaf, NewBlock};
use ubtrfs_ondisk::dir::{DirEntries, find_entry};
use ubtrfs_ondisk::extent::{BackRef, InlineRefs};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeRefs};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::root::{RootItem, RootRef};
use ubtrfs_ondisk::{DiskKey, Generation, RootId, Uuid, print};

fuzz_target!(|data: &[u8]| {
    let Ok((key, content)) = DiskKey::split(data) else { return };
    let key = key.key();
    let _ = print::item(key, content);
    let _ = DirEntries::new(content).count();
    let _ = find_entry(content, b"name");
    let _ = InlineRefs::of_item(key.ty, content).map(Iterator::count);
    let _ = BackRef::parse_keyed(key, content);
    let _ = InodeRefs::new(content).count();
    let _ = InodeExtrefs::new(content).count();
    let _ = RootItem::parse(content);
    let _ = RootRef::parse(content);
    if let Ok(extent) = FileExtent::parse(content) {
        let mut written = Vec::new();
        extent.write(&mut written);
        assert!(content.starts_with(&written));
    }
    let mut leaf = Leaf::new(&NewBlock {
        fsid: geometry().fsid,
        chunk_tree_uuid: Uuid::NIL,
        bytenr: ADDRESS,
        generation: Generation(1),
        owner: RootId::FS_TREE,
        nodesize_bytes: NODESIZE_BYTES,
    });
    if leaf.free_bytes() >= ITEM_BYTES + content.len() {
        leaf.insert(0, key, content.len()).copy_from_slice(content);
        let _ = ubtrfs_fuzz::block(leaf.as_bytes());
    }
});
