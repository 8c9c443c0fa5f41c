//! Running delayed refs: the only place that changes extent items.

use ubtrfs_ondisk::extent::{BackRef, ExtentItem, InlineRefs, TreeBlockInfo, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{
    Corruption, DiskKey, Generation, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId,
};
use zerocopy::IntoBytes;

use super::delayed_ref::{ExtentKind, Head};
use crate::btree::Editor;
use crate::error::{Error, Result};

/// What running a head did to the extent's space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// The extent is new in the extent tree.
    Allocated,
    /// The extent is gone from it.
    Freed,
    /// Its references changed.
    Changed,
}

/// How extent items are written in this filesystem.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// SKINNY_METADATA is set.
    pub(super) is_skinny: bool,
    pub(super) nodesize_bytes: u64,
    pub(super) generation: Generation,
}

impl Form {
    fn key(&self, addr: LogicalAddr, head: &Head) -> Key {
        let objectid = ObjectId(addr.0);
        match head.kind {
            ExtentKind::Block { level, .. } if self.is_skinny => {
                Key::new(objectid, KeyType::METADATA_ITEM, u64::from(level))
            }
            _ => Key::new(objectid, KeyType::EXTENT_ITEM, head.len_bytes),
        }
    }

    /// Inline references are added while the item stays below this length.
    fn item_len_max(&self) -> usize {
        let leaf_data = usize::try_from(self.nodesize_bytes).unwrap_or(usize::MAX) - 101;
        leaf_data / 16 - 25
    }
}

/// Brings one extent's item up to date.
pub(super) fn run(
    editor: &mut Editor<'_>,
    form: &Form,
    addr: LogicalAddr,
    head: &Head,
) -> Result<Outcome> {
    if head.is_new {
        insert(editor, form, addr, head)?;
        return Ok(Outcome::Allocated);
    }
    change(editor, form, addr, head)
}

/// An extent item taken apart.
struct Extent {
    refs: u64,
    generation: u64,
    flags: u64,
    block_info: Option<TreeBlockInfo>,
    inline: Vec<BackRef>,
}

impl Extent {
    fn parse(key: &Key, bytes: &[u8]) -> Result<Self> {
        let (item, rest) = ExtentItem::split(bytes)?;
        let is_block = item.flags.get() & flags::TREE_BLOCK != 0;
        let block_info = if key.ty == KeyType::EXTENT_ITEM && is_block {
            Some(*TreeBlockInfo::peek(rest)?)
        } else {
            None
        };
        let inline = InlineRefs::of_item(key.ty, bytes)?.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            refs: item.refs.get(),
            generation: item.generation.get(),
            flags: item.flags.get(),
            block_info,
            inline,
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let item = ExtentItem {
            refs: self.refs.into(),
            generation: self.generation.into(),
            flags: self.flags.into(),
        };
        let mut bytes = item.as_bytes().to_vec();
        if let Some(info) = &self.block_info {
            bytes.extend_from_slice(info.as_bytes());
        }
        for reference in &self.inline {
            reference.write_inline(&mut bytes);
        }
        bytes
    }

    fn len_bytes(&self) -> usize {
        let fixed =
            size_of::<ExtentItem>() + self.block_info.map_or(0, |_| size_of::<TreeBlockInfo>());
        fixed + self.inline.iter().map(BackRef::inline_len_bytes).sum::<usize>()
    }

    /// Puts a reference among the inline ones: types ascending, key offsets descending within.
    fn add_inline(&mut self, reference: BackRef) {
        let order = |r: &BackRef| (r.key_type(), std::cmp::Reverse(r.key_offset()));
        let place = self.inline.partition_point(|known| order(known) < order(&reference));
        self.inline.insert(place, reference);
    }
}

fn insert(editor: &mut Editor<'_>, form: &Form, addr: LogicalAddr, head: &Head) -> Result<()> {
    let key = form.key(addr, head);
    let (mut item_flags, block_info) = match head.kind {
        ExtentKind::Data => (flags::DATA, None),
        ExtentKind::Block { level, first_key } => {
            let info = TreeBlockInfo { key: DiskKey::new(first_key), level };
            (flags::TREE_BLOCK, (!form.is_skinny).then_some(info))
        }
    };
    if head.sets_full_backref {
        item_flags |= flags::FULL_BACKREF;
    }
    let mut extent = Extent {
        refs: 0,
        generation: form.generation.0,
        flags: item_flags,
        block_info,
        inline: Vec::with_capacity(head.changes.len()),
    };
    let mut keyed = Vec::new();
    for (reference, count) in head.changes.iter() {
        let count = u32::try_from(*count).map_err(|_| below_zero(addr, reference))?;
        extent.refs += u64::from(count);
        let reference = with_count(*reference, count);
        if extent.len_bytes() + reference.inline_len_bytes() < form.item_len_max() {
            extent.add_inline(reference);
        } else {
            keyed.push(reference);
        }
    }
    let bytes = extent.to_bytes();
    editor.insert(key, bytes.len(), |to| to.copy_from_slice(&bytes))?;
    for reference in keyed {
        add_keyed(editor, addr, reference)?;
    }
    Ok(())
}

fn change(editor: &mut Editor<'_>, form: &Form, addr: LogicalAddr, head: &Head) -> Result<Outcome> {
    let (key, bytes) = find_item(editor, form, addr, head)?;
    let mut extent = Extent::parse(&key, &bytes)?;
    let adds = head.changes.iter().filter(|(_, count)| *count > 0);
    let drops = head.changes.iter().filter(|(_, count)| *count < 0);
    for (reference, count) in adds.chain(drops) {
        apply(editor, form, addr, &mut extent, *reference, *count)?;
    }
    if extent.refs == 0 {
        editor.remove(&key)?;
        return Ok(Outcome::Freed);
    }
    if head.sets_full_backref {
        extent.flags |= flags::FULL_BACKREF;
    }
    let bytes = extent.to_bytes();
    editor.replace(&key, &bytes)?;
    Ok(Outcome::Changed)
}

/// The extent's item. One that was written before SKINNY_METADATA was switched on keeps its form.
fn find_item(
    editor: &mut Editor<'_>,
    form: &Form,
    addr: LogicalAddr,
    head: &Head,
) -> Result<(Key, Vec<u8>)> {
    let key = form.key(addr, head);
    if let Some(bytes) = editor.get(&key, <[u8]>::to_vec)? {
        return Ok((key, bytes));
    }
    let long = Key::new(ObjectId(addr.0), KeyType::EXTENT_ITEM, head.len_bytes);
    if let Some(bytes) = editor.get(&long, <[u8]>::to_vec)? {
        return Ok((long, bytes));
    }
    Err(Error::Corrupt(
        Corruption::new(Reason::Missing)
            .in_root(RootId::EXTENT_TREE)
            .have("no extent item")
            .expect(key),
    ))
}

/// Adds `count` (negative to drop) to one reference.
fn apply(
    editor: &mut Editor<'_>,
    form: &Form,
    addr: LogicalAddr,
    extent: &mut Extent,
    reference: BackRef,
    count: i64,
) -> Result<()> {
    extent.refs =
        extent.refs.checked_add_signed(count).ok_or_else(|| below_zero(addr, &reference))?;
    if let Some(at) = extent.inline.iter().position(|known| same(known, &reference)) {
        let have = i64::try_from(extent.inline[at].count()).unwrap_or(i64::MAX);
        let left =
            u32::try_from(have.saturating_add(count)).map_err(|_| below_zero(addr, &reference))?;
        if left == 0 {
            extent.inline.remove(at);
        } else {
            extent.inline[at] = with_count(reference, left);
        }
        return Ok(());
    }
    if let Some((key, have)) = find_keyed(editor, addr, &reference, count < 0)? {
        let left =
            u32::try_from(have.saturating_add(count)).map_err(|_| below_zero(addr, &reference))?;
        if left == 0 {
            return editor.remove(&key);
        }
        let bytes = keyed_bytes(&with_count(reference, left));
        return editor.replace(&key, &bytes);
    }
    let count = u32::try_from(count).map_err(|_| below_zero(addr, &reference))?;
    let reference = with_count(reference, count);
    if extent.len_bytes() + reference.inline_len_bytes() < form.item_len_max() {
        extent.add_inline(reference);
        Ok(())
    } else {
        add_keyed(editor, addr, reference)
    }
}

/// Whether two references are the same but for their counts.
fn same(a: &BackRef, b: &BackRef) -> bool {
    with_count(*a, 1) == with_count(*b, 1)
}

fn with_count(reference: BackRef, new: u32) -> BackRef {
    match reference {
        BackRef::ExtentData { root, inode, offset, .. } => {
            BackRef::ExtentData { root, inode, offset, count: new }
        }
        BackRef::SharedData { parent, .. } => BackRef::SharedData { parent, count: new },
        other => other,
    }
}

/// A keyed reference's item: a data reference is the whole struct, a shared one its count, and the
/// others are their key alone.
fn keyed_bytes(reference: &BackRef) -> Vec<u8> {
    let mut inline = Vec::new();
    reference.write_inline(&mut inline);
    match reference {
        BackRef::ExtentData { .. } => inline.split_off(1),
        BackRef::SharedData { .. } => inline.split_off(9),
        _ => Vec::new(),
    }
}

/// Finds the keyed item of a reference and its count. Data references whose hashes collide lie at
/// the offsets behind; one that `must_be_there` is looked for beyond what others of its hash left
/// free, as Linux does.
fn find_keyed(
    editor: &mut Editor<'_>,
    addr: LogicalAddr,
    reference: &BackRef,
    must_be_there: bool,
) -> Result<Option<(Key, i64)>> {
    let mut key = Key::new(ObjectId(addr.0), reference.key_type(), reference.key_offset());
    loop {
        let Some((found_key, bytes)) = editor.at_or_after(&key)? else { return Ok(None) };
        let is_ours = found_key.objectid == key.objectid && found_key.ty == key.ty;
        if !is_ours || (found_key != key && !must_be_there) {
            return Ok(None);
        }
        match reference {
            BackRef::ExtentData { .. } => {
                let found = BackRef::from_data_ref(OnDisk::peek(&bytes)?);
                if same(&found, reference) {
                    let count = i64::try_from(found.count()).unwrap_or(i64::MAX);
                    return Ok(Some((found_key, count)));
                }
                let Some(next) = found_key.offset.checked_add(1) else { return Ok(None) };
                key.offset = next;
            }
            _ if found_key != key => return Ok(None),
            BackRef::SharedData { .. } => {
                let found: &ubtrfs_ondisk::extent::SharedDataRef = OnDisk::peek(&bytes)?;
                return Ok(Some((key, i64::from(found.count.get()))));
            }
            _ => return Ok(Some((key, 1))),
        }
    }
}

fn add_keyed(editor: &mut Editor<'_>, addr: LogicalAddr, reference: BackRef) -> Result<()> {
    let bytes = keyed_bytes(&reference);
    let mut key = Key::new(ObjectId(addr.0), reference.key_type(), reference.key_offset());
    loop {
        match editor.insert(key, bytes.len(), |to| to.copy_from_slice(&bytes)) {
            Err(Error::Exists { .. }) if matches!(reference, BackRef::ExtentData { .. }) => {
                key.offset = key.offset.wrapping_add(1);
            }
            other => return other,
        }
    }
}

#[cold]
fn below_zero(addr: LogicalAddr, reference: &BackRef) -> Error {
    Error::Corrupt(
        Corruption::new(Reason::BadValue)
            .in_root(RootId::EXTENT_TREE)
            .have(format!("references of extent {addr} below zero by {reference:?}"))
            .expect("as many as there are"),
    )
}
