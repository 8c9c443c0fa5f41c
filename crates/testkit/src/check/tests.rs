use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use ubtrfs_ondisk::inode::{InodeExtref, InodeItem};

use super::extended_refs::{Access, Leaves, is_bare_summary, make_modes_comparable};
use super::*;
use crate::{KernelMount, MkfsBtrfs, Oracle};
use ubtrfs_ondisk::KeyType;
use ubtrfs_ondisk::misc::OnDisk;

/// An image of the kernel's with one file that has a name in one directory and so many in another:
/// its references begin in the leaf of its inode item, which is then not the leaf's last.
fn linked(directory: &Path, link_count: usize, permissions: u32) -> PathBuf {
    let image = directory.join("image");
    MkfsBtrfs::new().make(&image);
    let mounted = KernelMount::read_write(&image, "noatime");
    let [one, many] = ["one", "many"].map(|name| mounted.path().join(name));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&many).unwrap();
    fs::write(one.join("first"), "x").unwrap();
    let wanted = fs::Permissions::from_mode(permissions);
    fs::set_permissions(one.join("first"), wanted).unwrap();
    for number in 0..link_count {
        fs::hard_link(one.join("first"), many.join(format!("{number:03}{}", "l".repeat(200))))
            .unwrap();
    }
    mounted.unmount();
    image
}

fn extended_ref_count(image: &Path) -> usize {
    let mut count = 0;
    Leaves::of(image, Access::Read).for_each(|leaf| {
        let keys = leaf.items().iter().map(|item| item.key.key());
        count += keys.filter(|key| key.ty == KeyType::INODE_EXTREF).count();
        false
    });
    count
}

fn lowmem(image: &Path) -> Vec<CheckOutcome> {
    btrfs_checks(image, &[CheckMode::Lowmem]).map(|(_, outcome)| outcome).collect()
}

/// What the exception rests on: one extended reference raises the alarm, in an image that the
/// kernel made, unless the permissions happen to end with the number of the inode's type.
#[test]
fn alarm_of_lowmem_mode_is_raised_by_one_extended_reference() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let full = linked(directory.path(), 76, 0o644);
    assert_eq!(extended_ref_count(&full), 0);
    assert_checks_clean(&full);
    assert!(catch_unwind(|| assert_checks_clean_but_for_extended_refs(&full)).is_err());

    let more = linked(directory.path(), 77, 0o644);
    assert!(extended_ref_count(&more) > 0);
    assert!(lowmem(&more).iter().all(is_bare_summary));
    assert!(catch_unwind(|| assert_checks_clean(&more)).is_err());
    assert_checks_clean_but_for_extended_refs(&more);

    assert_checks_clean(&linked(directory.path(), 77, 0o401));
}

/// The alarm hid what only the lowmem mode's walk of the references themselves finds: it has no
/// line for that.
#[test]
fn reference_to_no_name_is_found_behind_the_alarm() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = linked(directory.path(), 77, 0o644);
    Leaves::of(&image, Access::Write).for_each(|leaf| {
        let wanted = |slot: &usize| leaf.key(*slot).ty == KeyType::INODE_EXTREF;
        let Some(slot) = (0..leaf.len()).find(wanted) else { return false };
        let (mut key, ghost) = (leaf.key(slot), leaf.data(slot).to_vec());
        key.offset += 1;
        let item = leaf.insert(slot + 1, key, ghost.len());
        item.copy_from_slice(&ghost);
        InodeExtref::peek_mut(item).unwrap().index += 1000;
        true
    });
    Leaves::of(&image, Access::Write).for_each(|leaf| {
        let of_inode = |slot: usize| InodeItem::peek(leaf.data(slot)).unwrap().nlink.get() == 78;
        let wanted = |slot: &usize| leaf.key(*slot).ty == KeyType::INODE_ITEM && of_inode(*slot);
        let Some(slot) = (0..leaf.len()).find(wanted) else { return false };
        InodeItem::peek_mut(leaf.data_mut(slot)).unwrap().nlink += 1;
        true
    });
    for outcome in lowmem(&image) {
        assert!(is_bare_summary(&outcome), "as without the fault: {}", outcome.transcript);
    }
    assert!(catch_unwind(|| assert_checks_clean_but_for_extended_refs(&image)).is_err());
    assert!(make_modes_comparable(&image) == 1);
    assert!(lowmem(&image).iter().all(|outcome| !outcome.is_clean));
}
