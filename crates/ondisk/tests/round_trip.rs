//! What is written is read back the same, for every struct and item.

use proptest::collection::vec;
use proptest::prelude::*;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::{Chunk, ChunkStripe};
use ubtrfs_ondisk::dir::{DirEntries, DirItem, FileType, find_entry, write_entry};
use ubtrfs_ondisk::extent::{BackRef, InlineRefs};
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::inode::{ExtrefName, InodeExtrefs, InodeRefs, RefName};
use ubtrfs_ondisk::misc::{OnDisk, Timespec};
use ubtrfs_ondisk::root::{ROOT_ITEM_V1_BYTES, RootItem, RootRef};
use ubtrfs_ondisk::superblock::{
    LABEL_BYTES, MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock,
};
use ubtrfs_ondisk::{
    CsumType, DeviceId, DiskKey, Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId,
    PhysicalAddr, Reason, RootId, Uuid,
};
use zerocopy::IntoBytes;

fn key() -> impl Strategy<Value = Key> {
    (any::<u64>(), any::<u8>(), any::<u64>())
        .prop_map(|(objectid, ty, offset)| Key::new(ObjectId(objectid), KeyType(ty), offset))
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..300)
}

fn file_type() -> impl Strategy<Value = FileType> {
    (0..9u8).prop_map(FileType::from_disk)
}

fn compression() -> impl Strategy<Value = Compression> {
    (0..4u8).prop_map(|number| Compression::from_disk(number).unwrap())
}

fn regular() -> impl Strategy<Value = RegularExtent> {
    (any::<[u64; 6]>(), compression()).prop_map(|(fields, compression)| RegularExtent {
        generation: Generation(fields[0]),
        ram_bytes: fields[1],
        compression,
        disk_bytenr: LogicalAddr(fields[2]),
        disk_num_bytes: fields[3],
        offset: fields[4],
        num_bytes: fields[5],
    })
}

fn back_ref() -> impl Strategy<Value = BackRef> {
    prop_oneof![
        any::<u64>().prop_map(|root| BackRef::TreeBlock { root: RootId(root) }),
        any::<u64>().prop_map(|parent| BackRef::SharedBlock { parent: LogicalAddr(parent) }),
        (any::<[u64; 3]>(), any::<u32>()).prop_map(|([root, inode, offset], count)| {
            BackRef::ExtentData { root: RootId(root), inode: InodeNo(inode), offset, count }
        }),
        (any::<u64>(), any::<u32>())
            .prop_map(|(parent, count)| BackRef::SharedData { parent: LogicalAddr(parent), count }),
        any::<u64>().prop_map(|root| BackRef::Owner { root: RootId(root) }),
    ]
}

fn chunk() -> impl Strategy<Value = Chunk> {
    (
        0..u64::MAX / 2,
        1..u64::MAX / 2,
        any::<[u64; 2]>(),
        any::<[u32; 3]>(),
        any::<u16>(),
        vec((any::<[u64; 2]>(), any::<[u8; 16]>()), 1..5),
    )
        .prop_map(|(start, len_bytes, words, sizes, sub_stripes, stripes)| Chunk {
            start: LogicalAddr(start),
            len_bytes,
            stripe_len_bytes: words[0],
            flags: BlockGroupFlags(words[1]),
            io_align: sizes[0],
            io_width: sizes[1],
            sector_size: sizes[2],
            sub_stripes,
            stripes: stripes
                .into_iter()
                .map(|([device, offset], uuid)| ChunkStripe {
                    device: DeviceId(device),
                    offset: PhysicalAddr(offset),
                    device_uuid: Uuid(uuid),
                })
                .collect(),
        })
}

/// A superblock of arbitrary bytes, but for what [`Superblock::parse`] asks for.
fn superblock() -> impl Strategy<Value = Box<Superblock>> {
    (vec(any::<u8>(), SUPERBLOCK_BYTES), 0..4u16).prop_map(|(bytes, csum_type)| {
        let mut superblock = Box::new(*Superblock::peek(&bytes).unwrap());
        superblock.magic = MAGIC.into();
        superblock.csum_type = csum_type.into();
        superblock
    })
}

proptest! {
    #[test]
    fn key_and_its_disk_form_are_equal_and_order_alike(a in key(), b in key()) {
        prop_assert_eq!(DiskKey::new(a).key(), a);
        prop_assert_eq!(
            a.cmp(&b),
            (a.objectid, a.ty, a.offset).cmp(&(b.objectid, b.ty, b.offset))
        );
        if let Some(next) = a.successor() {
            prop_assert!(next > a);
            prop_assert_eq!(next.predecessor(), Some(a));
        }
    }

    #[test]
    fn uuid_key_holds_both_halves(bytes in any::<[u8; 16]>()) {
        let key = Key::of_uuid(Uuid(bytes), KeyType::UUID_KEY_SUBVOL);
        prop_assert_eq!(&key.objectid.0.to_le_bytes()[..], &bytes[..8]);
        prop_assert_eq!(&key.offset.to_le_bytes()[..], &bytes[8..]);
        prop_assert_eq!(Uuid::parse(&Uuid(bytes).to_string()), Some(Uuid(bytes)));
    }

    #[test]
    fn timespec_keeps_seconds_and_nanoseconds(sec in any::<i64>(), nsec in any::<u32>()) {
        let time = Timespec::new(sec, nsec);
        let again = Timespec::peek(time.as_bytes()).unwrap();
        prop_assert_eq!((again.sec.get(), again.nsec.get()), (sec, nsec));
    }

    #[test]
    fn dir_entries_written_are_read_back_and_found(
        entries in vec((key(), any::<u64>(), file_type(), name(), name()), 0..5),
    ) {
        let mut bytes = Vec::new();
        for (location, transid, file_type, name, data) in &entries {
            let item = DirItem::new(*location, Generation(*transid), *file_type);
            write_entry(&mut bytes, &item, name, data);
        }
        let read: Vec<_> = DirEntries::new(&bytes).map(Result::unwrap).collect();
        prop_assert_eq!(read.len(), entries.len());
        for (entry, (location, transid, file_type, name, data)) in read.iter().zip(&entries) {
            prop_assert_eq!(entry.item.location.key(), *location);
            prop_assert_eq!(entry.item.transid.get(), *transid);
            prop_assert_eq!(entry.file_type(), *file_type);
            prop_assert_eq!((entry.name, entry.data), (&name[..], &data[..]));
            let (range, found) = find_entry(&bytes, name).unwrap().unwrap();
            prop_assert_eq!(range.len(), found.len_bytes());
            prop_assert_eq!(found.name, &name[..]);
            prop_assert_eq!(DirEntries::new(&bytes[range]).next().unwrap().unwrap(), found);
        }
        if let Some(cut) = bytes.len().checked_sub(1) {
            prop_assert!(DirEntries::new(&bytes[..cut]).any(|entry| entry.is_err()));
        }
    }

    #[test]
    fn inode_refs_written_are_read_back(names in vec((any::<u64>(), any::<u64>(), name()), 0..5)) {
        let (mut refs, mut extrefs) = (Vec::new(), Vec::new());
        let (mut refs_len, mut extrefs_len) = (0, 0);
        let short: Vec<_> = names.iter().map(|(_, index, name)| RefName { index: *index, name }).collect();
        let long: Vec<_> = names
            .iter()
            .map(|(parent, index, name)| ExtrefName { parent: InodeNo(*parent), index: *index, name })
            .collect();
        for (short, long) in short.iter().zip(&long) {
            short.write(&mut refs);
            long.write(&mut extrefs);
            refs_len += short.len_bytes();
            extrefs_len += long.len_bytes();
        }
        prop_assert_eq!((refs.len(), extrefs.len()), (refs_len, extrefs_len));
        prop_assert_eq!(InodeRefs::new(&refs).map(Result::unwrap).collect::<Vec<_>>(), short);
        prop_assert_eq!(InodeExtrefs::new(&extrefs).map(Result::unwrap).collect::<Vec<_>>(), long);
        if !names.is_empty() {
            prop_assert!(InodeRefs::new(&refs[..refs.len() - 1]).any(|name| name.is_err()));
            prop_assert!(InodeExtrefs::new(&extrefs[..extrefs.len() - 1]).any(|name| name.is_err()));
        }
    }

    #[test]
    fn root_ref_written_is_read_back(dir in any::<u64>(), index in any::<u64>(), name in name()) {
        let mut bytes = Vec::new();
        RootRef::write(&mut bytes, InodeNo(dir), index, &name);
        let (root_ref, read) = RootRef::parse(&bytes).unwrap();
        prop_assert_eq!((root_ref.dirid.get(), root_ref.sequence.get()), (dir, index));
        prop_assert_eq!(read, &name[..]);
    }

    #[test]
    fn root_item_of_either_length_is_read(bytes in vec(any::<u8>(), size_of::<RootItem>())) {
        let mut item = *RootItem::peek(&bytes).unwrap();
        item.generation_v2 = item.generation;
        prop_assert_eq!(RootItem::parse(item.as_bytes()).unwrap(), item);

        let old = RootItem::parse(&item.as_bytes()[..ROOT_ITEM_V1_BYTES]).unwrap();
        prop_assert_eq!(&old.as_bytes()[..ROOT_ITEM_V1_BYTES], &item.as_bytes()[..ROOT_ITEM_V1_BYTES]);
        prop_assert!(old.as_bytes()[ROOT_ITEM_V1_BYTES..].iter().all(|byte| *byte == 0));

        // An old kernel wrote the first part of a long item: what is behind is stale.
        item.generation_v2 = (item.generation.get().wrapping_sub(1)).into();
        prop_assert_eq!(RootItem::parse(item.as_bytes()).unwrap().uuid, [0; 16]);
    }

    #[test]
    fn file_extents_written_are_read_back(
        regular in regular(), data in name(), ram_bytes in any::<u64>(), compression in compression(),
    ) {
        let generation = regular.generation;
        let data = &data[..];
        for extent in [
            FileExtent::Regular(regular),
            FileExtent::Prealloc(regular),
            FileExtent::Inline { generation, ram_bytes, compression, data },
        ] {
            let mut bytes = Vec::new();
            extent.write(&mut bytes);
            prop_assert_eq!(FileExtent::parse(&bytes).unwrap(), extent);
        }
    }

    #[test]
    fn back_refs_inline_and_keyed_are_read_back(refs in vec(back_ref(), 0..6)) {
        let mut bytes = Vec::new();
        for back_ref in &refs {
            let before = bytes.len();
            back_ref.write_inline(&mut bytes);
            prop_assert_eq!(bytes.len() - before, back_ref.inline_len_bytes());
            let mut keyed = Vec::new();
            back_ref.write_keyed(&mut keyed);
            let key = back_ref.key(LogicalAddr(4096));
            prop_assert_eq!(BackRef::parse_keyed(key, &keyed).unwrap(), *back_ref);
        }
        prop_assert_eq!(InlineRefs::new(&bytes).map(Result::unwrap).collect::<Vec<_>>(), refs);
    }

    #[test]
    fn chunk_written_is_read_back(chunk in chunk()) {
        let bytes = chunk.to_bytes();
        prop_assert_eq!(&Chunk::parse(chunk.start, &bytes).unwrap(), &chunk);
        prop_assert!(Chunk::parse(chunk.start, &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn system_chunks_written_are_read_back(
        mut superblock in superblock(), chunks in vec(chunk(), 0..20), label in name(),
    ) {
        let fits = chunks.iter().map(|chunk| 17 + chunk.to_bytes().len()).sum::<usize>() <= 2048;
        match superblock.set_sys_chunks(&chunks) {
            Ok(()) => {
                prop_assert!(fits);
                prop_assert_eq!(superblock.sys_chunks().unwrap(), chunks);
            }
            Err(error) => {
                prop_assert!(!fits);
                prop_assert_eq!(error.reason, Reason::BadItemLen);
            }
        }
        if superblock.set_label(&label).is_ok() {
            prop_assert_eq!(superblock.label(), &label[..]);
        } else {
            prop_assert!(label.len() >= LABEL_BYTES || label.contains(&0) || label.contains(&b'\n'));
        }
    }

    #[test]
    fn superblock_sealed_is_read_at_its_place_only(mut superblock in superblock()) {
        superblock.seal(SUPERBLOCK_OFFSETS[1]).unwrap();
        let bytes = superblock.as_bytes();
        prop_assert_eq!(&Superblock::parse(bytes, SUPERBLOCK_OFFSETS[1]).unwrap(), &superblock);
        let elsewhere = Superblock::parse(bytes, SUPERBLOCK_OFFSETS[0]).unwrap_err();
        prop_assert_eq!(elsewhere.reason, Reason::WrongBytenr);
        let mut torn = bytes.to_vec();
        torn[2000] ^= 1;
        let torn = Superblock::parse(&torn, SUPERBLOCK_OFFSETS[1]).unwrap_err();
        prop_assert_eq!(torn.reason, Reason::CsumMismatch);
    }

    #[test]
    fn parsers_take_any_bytes(bytes in vec(any::<u8>(), 0..600), at in any::<u64>(), ty in any::<u8>()) {
        let _ = Chunk::parse(LogicalAddr(at), &bytes);
        let _ = FileExtent::parse(&bytes);
        let _ = RootItem::parse(&bytes);
        let _ = RootRef::parse(&bytes);
        let _ = DirEntries::new(&bytes).count();
        let _ = InodeRefs::new(&bytes).count();
        let _ = InodeExtrefs::new(&bytes).count();
        let _ = InlineRefs::of_item(KeyType(ty), &bytes).map(Iterator::count);
        let _ = BackRef::parse_keyed(Key::new(ObjectId(at), KeyType(ty), at), &bytes);
        let _ = Superblock::parse(&bytes, PhysicalAddr(at));
    }
}

#[test]
fn csum_of_sectors_is_that_of_each() {
    let data: Vec<u8> = (0..10_000u32).map(|number| number.to_le_bytes()[0]).collect();
    for csum in [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2] {
        let mut out = vec![0; 3 * csum.len_bytes()];
        csum.compute_sectors(&data, 4096, &mut out);
        for (sector, stored) in data.chunks(4096).zip(out.chunks(csum.len_bytes())) {
            assert!(csum.matches(stored, sector));
        }
    }
}
