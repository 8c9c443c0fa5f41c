//! Making a filesystem: an ordinary transaction, the first.
//!
//! The trees begin as empty leaves in memory and the block groups as chunks that only the chunk
//! map knows; the commit of transaction 1 writes all of it. There are no rules here that any other
//! transaction does not follow.

use ubtrfs_ondisk::block::Leaf;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::dir::{DirItem, FileType};
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::inode::{self, InodeItem, InodeRef};
use ubtrfs_ondisk::misc::{DevItem, Timespec};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::{self, LABEL_BYTES, Superblock};
use ubtrfs_ondisk::{
    CsumType, DeviceId, DiskKey, Generation, InodeNo, Key, KeyType, ObjectId, PhysicalAddr, RootId,
    Uuid, hash,
};
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_volume::{Device, Volume};
use zerocopy::IntoBytes;

use crate::alloc::{AllocOptions, Allocator};
use crate::btree::{Roots, Store, Tree};
use crate::error::{Error, Result};
use crate::filesystem::CACHE_BYTES_DEFAULT;
use crate::txn::{Core, Handle};

const MIB: u64 = 1 << 20;
/// Zeroed at the front of each device, so that nothing else is recognised there.
const WIPE_BYTES: u64 = MIB;
/// Blocks that the least metadata block group holds: the reservation of one operation and what a
/// commit keeps back.
const METADATA_BLOCKS_MIN: u64 = 256;

/// What to make. The defaults are those of current `mkfs.btrfs`.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// The label, at most 255 bytes.
    pub label: Vec<u8>,
    /// The filesystem's uuid; random when `None`.
    pub uuid: Option<Uuid>,
    /// Bytes of a tree block: a power of two from the sector size to 64 KiB.
    pub nodesize_bytes: u32,
    /// Bytes of a sector: 4096 unless another kernel's page size is aimed at.
    pub sectorsize_bytes: u32,
    /// The checksum of blocks and data.
    pub csum: CsumType,
    /// Holes have no file extents.
    pub no_holes: bool,
    /// Free space is kept in a tree.
    pub free_space_tree: bool,
    /// Block group items are kept in a tree of their own; needs the two above.
    pub block_group_tree: bool,
    /// Profile of metadata and system: none of the bits is SINGLE. `None` is DUP on one device and
    /// RAID1 on several.
    pub metadata_profile: Option<BlockGroupFlags>,
    /// Profile of data. `None` is SINGLE.
    pub data_profile: Option<BlockGroupFlags>,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            label: Vec::new(),
            uuid: None,
            nodesize_bytes: 16 * 1024,
            sectorsize_bytes: 4096,
            csum: CsumType::Crc32c,
            no_holes: true,
            free_space_tree: true,
            block_group_tree: true,
            metadata_profile: None,
            data_profile: None,
        }
    }
}

impl MkfsOptions {
    /// Bytes that the smallest device may have.
    pub fn device_bytes_min(&self) -> u64 {
        let metadata = METADATA_BLOCKS_MIN * u64::from(self.nodesize_bytes);
        let others = 2 * MIB + 2 * (MIB + metadata);
        match self.data_profile {
            // Two copies of a tenth of the device.
            Some(BlockGroupFlags::DUP) => (others * 5 / 4 + MIB).next_multiple_of(MIB),
            _ => others + MIB,
        }
    }

    fn incompat(&self) -> Incompat {
        let mut bits =
            Incompat::MIXED_BACKREF | Incompat::EXTENDED_IREF | Incompat::SKINNY_METADATA;
        if self.no_holes {
            bits.insert(Incompat::NO_HOLES);
        }
        if self.nodesize_bytes > 4096 {
            bits.insert(Incompat::BIG_METADATA);
        }
        let profiles = [self.metadata_profile, self.data_profile];
        let many = BlockGroupFlags::RAID1C3 | BlockGroupFlags::RAID1C4;
        if profiles.iter().flatten().any(|profile| profile.intersects(many)) {
            bits.insert(Incompat::RAID1C34);
        }
        bits
    }

    fn compat_ro(&self) -> CompatRo {
        let mut bits = CompatRo::default();
        if self.free_space_tree {
            bits.insert(CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID);
        }
        if self.block_group_tree {
            bits.insert(CompatRo::BLOCK_GROUP_TREE);
        }
        bits
    }

    fn check(&self, devices: &[Arc<dyn Device>]) -> Result<()> {
        let invalid = |what: String| Err(Error::InvalidArgument { what });
        let (nodesize, sectorsize) = (self.nodesize_bytes, self.sectorsize_bytes);
        if !sectorsize.is_power_of_two() || !(4096..=65536).contains(&sectorsize) {
            return invalid(format!(
                "sector size {sectorsize}, must be a power of two, 4096 to 65536"
            ));
        }
        if !nodesize.is_power_of_two() || nodesize < sectorsize || nodesize > 65536 {
            return invalid(format!(
                "node size {nodesize}, must be a power of two from the sector size {sectorsize} to 65536"
            ));
        }
        if self.label.len() >= LABEL_BYTES || self.label.contains(&0) || self.label.contains(&b'\n')
        {
            return invalid("label, must be at most 255 bytes without NUL and newline".to_owned());
        }
        if self.block_group_tree && !(self.free_space_tree && self.no_holes) {
            return invalid("block-group-tree needs free-space-tree and no-holes".to_owned());
        }
        if devices.is_empty() {
            return invalid("no device".to_owned());
        }
        for device in devices {
            if device.len_bytes() < self.device_bytes_min() {
                return Err(Error::NoSpace {
                    what: "a filesystem",
                    needed_bytes: self.device_bytes_min(),
                    available_bytes: device.len_bytes(),
                });
            }
        }
        Ok(())
    }
}

/// Makes a filesystem on the devices; what they held is lost. Durable when it returns.
///
/// # Errors
/// `InvalidArgument` for options that do not go together, `NoSpace` for a device that is too
/// small, `Unsupported` for a profile that is not made, or the device's error.
pub fn mkfs(
    devices: Vec<Arc<dyn Device>>,
    options: &MkfsOptions,
    runtime: &Arc<Runtime>,
) -> Result<Volume> {
    options.check(&devices)?;
    for device in &devices {
        wipe(&**device)?;
    }
    let fsid = options.uuid.unwrap_or_else(|| Uuid(runtime.identifiers.uuid()));
    let chunk_tree_uuid = Uuid(runtime.identifiers.uuid());
    let superblock = first_superblock(&devices, options, fsid, runtime)?;
    let volume = Arc::new(Volume::create(devices, superblock)?);
    let core = first_trees(&volume, options, &superblock, chunk_tree_uuid, runtime)?;
    core.commit()?;
    drop(core);
    Ok(Arc::into_inner(volume).expect("the core that shared it is gone"))
}

fn wipe(device: &dyn Device) -> Result<()> {
    let len = device.len_bytes();
    let failed = |error| {
        Error::from(ubtrfs_volume::Error::Io {
            device: device.name(),
            op: ubtrfs_volume::Op::Write,
            offset: PhysicalAddr(0),
            source: error,
        })
    };
    // Best effort: a device that cannot discard keeps what no one refers to any more.
    let _ = device.discard(PhysicalAddr(0), len);
    let zeros = vec![0; usize::try_from(WIPE_BYTES).expect("1 MiB")];
    device.write_at(PhysicalAddr(0), &zeros).map_err(failed)?;
    for copy in &superblock::SUPERBLOCK_OFFSETS[1..] {
        if copy.0 + 4096 <= len {
            device.write_at(*copy, &zeros[..4096]).map_err(failed)?;
        }
    }
    Ok(())
}

fn first_superblock(
    devices: &[Arc<dyn Device>],
    options: &MkfsOptions,
    fsid: Uuid,
    runtime: &Runtime,
) -> Result<Superblock> {
    let item = device_item(DeviceId(1), &*devices[0], options, fsid, runtime);
    let mut label = [0; LABEL_BYTES];
    label[..options.label.len()].copy_from_slice(&options.label);
    let mut superblock = Superblock {
        fsid: fsid.0,
        flags: superblock::flags::WRITTEN.into(),
        magic: superblock::MAGIC.into(),
        generation: 0.into(),
        root_dir_objectid: ObjectId::ROOT_TREE_DIR.0.into(),
        num_devices: (devices.len() as u64).into(),
        sectorsize: options.sectorsize_bytes.into(),
        nodesize: options.nodesize_bytes.into(),
        leafsize: options.nodesize_bytes.into(),
        stripesize: options.sectorsize_bytes.into(),
        compat_ro_flags: options.compat_ro().0.into(),
        incompat_flags: options.incompat().0.into(),
        csum_type: options.csum.to_disk().into(),
        dev_item: item,
        label,
        // No v1 cache was ever written; 0 where the free space tree stands in for it.
        cache_generation: if options.free_space_tree { 0 } else { u64::MAX }.into(),
        ..Superblock::default()
    };
    superblock.total_bytes = devices.iter().map(|device| device.len_bytes()).sum::<u64>().into();
    superblock.seal(superblock::SUPERBLOCK_OFFSETS[0])?;
    Ok(superblock)
}

fn device_item(
    devid: DeviceId,
    device: &dyn Device,
    options: &MkfsOptions,
    fsid: Uuid,
    runtime: &Runtime,
) -> DevItem {
    let sectorsize = u64::from(options.sectorsize_bytes);
    DevItem {
        devid: devid.0.into(),
        total_bytes: (device.len_bytes() / sectorsize * sectorsize).into(),
        io_align: options.sectorsize_bytes.into(),
        io_width: options.sectorsize_bytes.into(),
        sector_size: options.sectorsize_bytes.into(),
        uuid: runtime.identifiers.uuid(),
        fsid: fsid.0,
        ..DevItem::default()
    }
}

/// Everything of transaction 1, ready to be committed.
fn first_trees(
    volume: &Arc<Volume>,
    options: &MkfsOptions,
    superblock: &Superblock,
    chunk_tree_uuid: Uuid,
    runtime: &Arc<Runtime>,
) -> Result<Core> {
    let store = Arc::new(Store::new(Arc::clone(volume), CACHE_BYTES_DEFAULT));
    let alloc =
        Allocator::new(Arc::clone(&store), superblock, chunk_tree_uuid, AllocOptions::default());
    add_devices(&alloc, volume, options, superblock, runtime);
    add_groups(&alloc, options)?;
    let generation = Generation(1);
    let empty = |root: RootId| -> Result<Arc<Tree>> {
        let addr = alloc.allocate_block(root, 0, Key::MIN)?;
        let leaf = Leaf::new(&alloc.new_block(addr, generation, root));
        Ok(Arc::new(Tree::new_empty(root, Arc::clone(&store), leaf)))
    };
    let roots =
        Roots::new(Arc::clone(&store), empty(RootId::ROOT_TREE)?, empty(RootId::CHUNK_TREE)?);
    let core = Core::new(roots, alloc, Arc::clone(runtime), *superblock, None, u64::MAX);
    let mut handle = core.begin_first()?;
    let now = runtime.clock.now();
    let now = Timespec::new(now.sec, now.nsec);
    let mut plain = vec![RootId::EXTENT_TREE, RootId::DEV_TREE, RootId::CSUM_TREE];
    if options.free_space_tree {
        plain.push(RootId::FREE_SPACE_TREE);
    }
    if options.block_group_tree {
        plain.push(RootId::BLOCK_GROUP_TREE);
    }
    for root in plain {
        handle.create_tree(root, &root_item(now, Uuid::NIL, 0))?;
    }
    add_root_directory(&mut handle, now)?;
    let uuid = Uuid(runtime.identifiers.uuid());
    handle.create_tree(RootId::FS_TREE, &root_item(now, uuid, InodeNo::SUBVOLUME_ROOT.0))?;
    add_first_inode(&mut handle, RootId::FS_TREE, now)?;
    let reloc = root_item(now, Uuid::NIL, InodeNo::SUBVOLUME_ROOT.0);
    handle.create_tree(RootId::DATA_RELOC_TREE, &reloc)?;
    add_first_inode(&mut handle, RootId::DATA_RELOC_TREE, now)?;
    handle.create_tree(RootId::UUID_TREE, &root_item(now, Uuid::NIL, 0))?;
    handle.insert(
        RootId::UUID_TREE,
        uuid_key(uuid, KeyType::UUID_KEY_SUBVOL),
        &RootId::FS_TREE.0.to_le_bytes(),
    )?;
    drop(handle);
    Ok(core)
}

/// Key of a subvolume's entry in the uuid tree: the uuid's halves as object id and offset.
pub(crate) fn uuid_key(uuid: Uuid, ty: KeyType) -> Key {
    let half = |at: usize| u64::from_le_bytes(uuid.0[at..at + 8].try_into().expect("eight bytes"));
    Key::new(ObjectId(half(0)), ty, half(8))
}

fn add_devices(
    alloc: &Allocator,
    volume: &Volume,
    options: &MkfsOptions,
    superblock: &Superblock,
    runtime: &Runtime,
) {
    alloc.add_device(superblock.dev_item);
    for devid in 2..=superblock.num_devices.get() {
        let devid = DeviceId(devid);
        let Some(device) = volume.device(devid) else { continue };
        let fsid = Uuid(superblock.fsid);
        alloc.add_device(device_item(devid, &*device, options, fsid, runtime));
    }
}

fn add_groups(alloc: &Allocator, options: &MkfsOptions) -> Result<()> {
    let total = alloc.devices_bytes();
    let several = alloc.device_ids().len() > 1;
    let metadata_default = if several { BlockGroupFlags::RAID1 } else { BlockGroupFlags::DUP };
    let metadata = options.metadata_profile.unwrap_or(metadata_default);
    let data = options.data_profile.unwrap_or_default();
    let metadata_min = METADATA_BLOCKS_MIN * u64::from(options.nodesize_bytes);
    let groups = [
        (BlockGroupFlags::SYSTEM | metadata, (total / 64).clamp(MIB, 8 * MIB)),
        (BlockGroupFlags::METADATA | metadata, (total / 10).clamp(metadata_min, 256 * MIB)),
        (BlockGroupFlags::DATA | data, (total / 10).clamp(MIB, 8 * MIB)),
    ];
    for (flags, bytes) in groups {
        if !alloc.add_chunk(flags, bytes / (64 * 1024) * (64 * 1024))? {
            return Err(Error::NoSpace {
                what: "a first block group",
                needed_bytes: bytes,
                available_bytes: total,
            });
        }
    }
    Ok(())
}

fn root_item(now: Timespec, uuid: Uuid, root_dirid: u64) -> RootItem {
    let inode = InodeItem {
        generation: 1.into(),
        size: 3.into(),
        nbytes: 16384.into(),
        nlink: 1.into(),
        mode: 0o40755.into(),
        flags: inode::flags::ROOT_ITEM_INIT.into(),
        ..InodeItem::default()
    };
    let is_subvolume = !uuid.is_nil();
    RootItem {
        inode,
        root_dirid: root_dirid.into(),
        refs: 1.into(),
        uuid: uuid.0,
        otime: if is_subvolume { now } else { Timespec::default() },
        ctime: if is_subvolume { now } else { Timespec::default() },
        ..RootItem::default()
    }
}

/// The inode of a directory that is being made.
fn directory_inode(now: Timespec) -> InodeItem {
    InodeItem {
        generation: 1.into(),
        transid: 1.into(),
        nlink: 1.into(),
        mode: 0o40755.into(),
        atime: now,
        ctime: now,
        mtime: now,
        otime: now,
        ..InodeItem::default()
    }
}

fn add_parent_ref(handle: &mut Handle<'_>, root: RootId, inode: ObjectId) -> Result<()> {
    let mut bytes = InodeRef { index: 0.into(), name_len: 2.into() }.as_bytes().to_vec();
    bytes.extend_from_slice(b"..");
    handle.insert(root, Key::new(inode, KeyType::INODE_REF, inode.0), &bytes)
}

fn add_first_inode(handle: &mut Handle<'_>, root: RootId, now: Timespec) -> Result<()> {
    let inode = InodeNo::SUBVOLUME_ROOT.object_id();
    let item = directory_inode(now);
    handle.insert(root, Key::new(inode, KeyType::INODE_ITEM, 0), item.as_bytes())?;
    add_parent_ref(handle, root, inode)
}

/// The directory in the root tree whose entry `default` names the default subvolume.
fn add_root_directory(handle: &mut Handle<'_>, now: Timespec) -> Result<()> {
    let dir = ObjectId::ROOT_TREE_DIR;
    let root = RootId::ROOT_TREE;
    let item = directory_inode(now);
    handle.insert(root, Key::new(dir, KeyType::INODE_ITEM, 0), item.as_bytes())?;
    add_parent_ref(handle, root, dir)?;
    let name = b"default";
    let target = Key::new(RootId::FS_TREE.object_id(), KeyType::ROOT_ITEM, u64::MAX);
    let entry = DirItem {
        location: DiskKey::new(target),
        transid: 1.into(),
        data_len: 0.into(),
        name_len: 7.into(),
        ty: FileType::Directory.to_disk(),
    };
    let mut bytes = entry.as_bytes().to_vec();
    bytes.extend_from_slice(name);
    handle.insert(root, Key::new(dir, KeyType::DIR_ITEM, hash::name_hash(name)), &bytes)
}
