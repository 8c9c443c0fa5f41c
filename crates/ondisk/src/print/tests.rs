use proptest::prelude::*;
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::dir::{DirItem, FileType, write_entry};
use crate::types::Generation;

#[test]
fn time_prints_the_date_of_known_seconds() {
    assert_eq!(time(&Timespec::new(0, 5)), "0.000000005 (1970-01-01 00:00:00)");
    assert_eq!(time(&Timespec::new(951_782_400, 0)), "951782400.000000000 (2000-02-29 00:00:00)");
    assert_eq!(
        time(&Timespec::new(4_107_542_399, 0)),
        "4107542399.000000000 (2100-02-28 23:59:59)"
    );
    assert_eq!(time(&Timespec::new(-1, 0)), "-1.000000000 (1969-12-31 23:59:59)");
    assert_eq!(time(&Timespec::new(i64::MIN, 0)), format!("{}.000000000", i64::MIN));
}

#[test]
fn names_are_escaped_where_they_are_no_text() {
    assert_eq!(bytes("häß".as_bytes()), "häß");
    assert_eq!(bytes(b"a\nb\\c\xff"), "a\\nb\\\\c\\xff");
}

#[test]
fn keys_name_trees_and_objects() {
    let key = |objectid, ty, offset| super::key(Key::new(ObjectId(objectid), ty, offset));
    assert_eq!(key(5, KeyType::ROOT_ITEM, 0), "(FS_TREE ROOT_ITEM 0)");
    assert_eq!(key(5, KeyType::ROOT_ITEM, u64::MAX), "(FS_TREE ROOT_ITEM -1)");
    assert_eq!(key(257, KeyType::ROOT_BACKREF, 5), "(257 ROOT_BACKREF FS_TREE)");
    assert_eq!(key(5, KeyType::INODE_ITEM, 0), "(5 INODE_ITEM 0)");
    assert_eq!(key(ObjectId::ORPHAN.0, KeyType::ORPHAN_ITEM, 300), "(ORPHAN ORPHAN_ITEM 300)");
    assert_eq!(key(0, KeyType::QGROUP_INFO, 1 << 48 | 3), "(0 QGROUP_INFO 1/3)");
}

#[test]
fn xattr_prints_its_name_and_value() {
    let mut data = Vec::new();
    let item = DirItem::new(Key::MIN, Generation(7), FileType::Xattr);
    write_entry(&mut data, &item, b"user.a", b"1");
    let key = Key::new(ObjectId(257), KeyType::XATTR_ITEM, 1);
    assert_eq!(
        super::item(key, &data),
        "location (0 UNKNOWN.0 0) type xattr transid 7 name user.a value 1"
    );
    data.pop();
    assert!(super::item(key, &data).contains("damage"));
}

#[test]
fn superblock_prints_all_its_parts() {
    let mut superblock = Superblock::new_zeroed();
    superblock.incompat_flags = 0x341.into();
    superblock.set_label(b"backup").unwrap();
    let record = super::superblock(&superblock);
    let field = |name: &str| record.iter().find(|(field, _)| *field == name).unwrap().1.as_str();
    assert_eq!(field("label"), "backup");
    assert_eq!(
        field("incompat_flags"),
        "0x341 (MIXED_BACKREF|EXTENDED_IREF|SKINNY_METADATA|NO_HOLES)"
    );
}

proptest! {
    #[test]
    fn printing_takes_any_bytes(
        objectid in any::<u64>(), ty in any::<u8>(), offset in any::<u64>(),
        data in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let key = Key::new(ObjectId(objectid), KeyType(ty), offset);
        let _ = super::item(key, &data);
        let _ = super::key(key);
    }

    #[test]
    fn printing_takes_any_superblock(data in prop::collection::vec(any::<u8>(), 4096)) {
        let mut superblock = Superblock::new_zeroed();
        superblock.as_mut_bytes().copy_from_slice(&data);
        let _ = line(&super::superblock(&superblock));
    }
}
