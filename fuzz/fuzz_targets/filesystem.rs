//! A filesystem whose tree blocks were changed, their checksums made right again: everything in it
//! is read, then a file is made. Errors are right, panics and hangs are not.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use ubtrfs_engine::{
    Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation, Result,
    mkfs,
};
use ubtrfs_ondisk::block::Header;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{CsumType, FileOffset, PhysicalAddr};
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};
use zerocopy::IntoBytes;

const DEVICE_BYTES: u64 = 32 << 20;
const NODESIZE_BYTES: usize = 4096;
const PAGE_BYTES: usize = 64 << 10;
/// Most directories that a walk enters: damage can make circles.
const DIRECTORY_COUNT_MAX: usize = 200;
/// Most bytes that are read of one file, whose size may be damaged.
const READ_BYTES_MAX: usize = 1 << 20;
const NAME_COUNT_MAX: usize = 10_000;

/// A sound filesystem: its pages that are not zero, and where its current blocks lie.
struct Sound {
    pages: Vec<(u64, Vec<u8>)>,
    blocks: Vec<u64>,
}

fn sound() -> &'static Sound {
    static SOUND: OnceLock<Sound> = OnceLock::new();
    SOUND.get_or_init(|| make().expect("a sound filesystem can be made"))
}

fn runtime() -> Arc<Runtime> {
    Arc::new(Runtime::simulated(7))
}

fn open(device: Arc<MemDevice>) -> Result<Filesystem> {
    let options = VolumeOptions { read_only: false, degraded: false, super_copy: None };
    let volume = Volume::open(vec![device], &options)?;
    Filesystem::open(volume, OpenOptions { runtime: runtime(), ..OpenOptions::default() })
}

fn make() -> Result<Sound> {
    let device = Arc::new(MemDevice::new(DEVICE_BYTES));
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        metadata_profile: Some(BlockGroupFlags(0)),
        ..MkfsOptions::default()
    };
    drop(mkfs(vec![Arc::clone(&device) as Arc<dyn Device>], &options, &runtime())?);
    let fs = open(Arc::clone(&device))?;
    let top = fs.top_level();
    for number in 0..30 {
        add_file(&fs, top, format!("file {number}").as_bytes(), number * 700)?;
    }
    let new = NewInode::new(0o40755, runtime().clock.now());
    let mut handle = fs.begin(Reservation::create(2))?;
    let dir = handle.create(top, b"directory", &new)?;
    handle.symlink(dir, b"symlink", b"../file 1", &new)?;
    handle.set_xattr(dir, b"user.key", b"value")?;
    drop(handle);
    let mut handle = fs.begin(Reservation::create_subvolume())?;
    let subvolume = handle.create_subvolume(dir, b"subvolume", &new)?;
    drop(handle);
    add_file(&fs, subvolume, b"inside", 100_000)?;
    let mut handle = fs.begin(Reservation::create(0))?;
    let linked = fs.lookup(top, b"file 3")?;
    handle.link(dir, b"link", linked)?;
    drop(handle);
    fs.commit()?;
    drop(fs);
    Ok(cut(&device))
}

fn cut(device: &MemDevice) -> Sound {
    let mut bytes = vec![0; usize::try_from(DEVICE_BYTES).expect("32 MiB")];
    device.read_at(PhysicalAddr(0), &mut bytes).expect("the whole device");
    let start = usize::try_from(SUPERBLOCK_OFFSETS[0].0).expect("64 KiB");
    let superblock = Superblock::peek(&bytes[start..]).expect("long enough");
    let blocks = (0..bytes.len()).step_by(NODESIZE_BYTES).filter(|at| {
        let block = &bytes[*at..*at + NODESIZE_BYTES];
        let header = Header::peek(block).expect("long enough");
        header.fsid == superblock.fsid && *at != start
    });
    let blocks = blocks.map(|at| at as u64).collect();
    let pages = bytes.chunks(PAGE_BYTES).enumerate();
    let pages = pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0));
    let pages = pages.map(|(index, page)| ((index * PAGE_BYTES) as u64, page.to_vec())).collect();
    Sound { pages, blocks }
}

fn add_file(fs: &Filesystem, dir: InodeId, name: &[u8], len_bytes: usize) -> Result<InodeId> {
    let mut handle = fs.begin(Reservation::create(0))?;
    let new = NewInode::new(0o100_644, runtime().clock.now());
    let id = handle.create(dir, name, &new)?;
    drop(handle);
    let mut appender = fs.appender(id, len_bytes as u64)?;
    let data = PreparedData::new(vec![b'x'; len_bytes], &fs.write_options(None));
    appender.push(FileOffset(0), data)?;
    appender.finish()?;
    Ok(id)
}

fuzz_target!(|data: &[u8]| {
    let sound = sound();
    let device = Arc::new(MemDevice::new(DEVICE_BYTES));
    for (at, page) in &sound.pages {
        device.write_at(PhysicalAddr(*at), page).expect("within the device");
    }
    // Five bytes a change: block, offset, value.
    for change in data.chunks_exact(5) {
        let block = usize::from(u16::from_le_bytes([change[0], change[1]]));
        let offset = usize::from(u16::from_le_bytes([change[2], change[3]])) % NODESIZE_BYTES;
        damage(&device, sound, block, offset, change[4]);
    }
    let opened = open(device);
    assert!(opened.is_ok() || data.len() >= 5, "a sound filesystem opens");
    let Ok(fs) = opened else { return };
    read_everything(&fs);
    let _ = add_file(&fs, fs.top_level(), b"new", 5000);
    let _ = fs.commit();
});

fn damage(device: &MemDevice, sound: &Sound, block: usize, offset: usize, value: u8) {
    let mut bytes = vec![0; NODESIZE_BYTES];
    let index = block % (sound.blocks.len() + 1);
    let Some(at) = sound.blocks.get(index) else {
        let at = SUPERBLOCK_OFFSETS[0];
        device.read_at(at, &mut bytes[..SUPERBLOCK_BYTES]).expect("within the device");
        bytes[offset] = value;
        let superblock = Superblock::peek_mut(&mut bytes).expect("long enough");
        if superblock.seal(at).is_ok() {
            device.write_at(at, superblock.as_bytes()).expect("within the device");
        }
        return;
    };
    device.read_at(PhysicalAddr(*at), &mut bytes).expect("within the device");
    bytes[offset] = value;
    let csum = CsumType::Crc32c.compute(&bytes[32..]);
    bytes[..32].copy_from_slice(&csum);
    device.write_at(PhysicalAddr(*at), &bytes).expect("within the device");
}

fn read_everything(fs: &Filesystem) {
    let _ = fs.usage();
    let _ = fs.subvolumes();
    let _ = fs.default_subvolume();
    let mut directories = vec![fs.top_level()];
    let mut entered = 0;
    while let Some(dir) = directories.pop() {
        entered += 1;
        if entered > DIRECTORY_COUNT_MAX {
            return;
        }
        let Ok(entries) = fs.read_dir(dir, 0) else { continue };
        for entry in entries.take(NAME_COUNT_MAX) {
            let Ok(entry) = entry else { break };
            let _ = fs.lookup(dir, &entry.name);
            read_inode(fs, entry.target);
            if fs.inode(entry.target).is_ok_and(|inode| inode.is_dir()) {
                directories.push(entry.target);
            }
        }
    }
}

fn read_inode(fs: &Filesystem, id: InodeId) {
    let _ = fs.inode(id);
    let _ = fs.links(id);
    let _ = fs.xattrs(id);
    let _ = fs.read_link(id);
    let _ = fs.path_of(id);
    if let Ok(extents) = fs.file_extents(id, FileOffset(0)) {
        let _ = extents.take(NAME_COUNT_MAX).take_while(|extent| extent.is_ok()).count();
    }
    let mut buf = vec![0; 64 << 10];
    let mut offset = 0;
    while let Ok(len) = fs.read(id, FileOffset(offset), &mut buf) {
        offset += len as u64;
        if len == 0 || offset > READ_BYTES_MAX as u64 {
            break;
        }
    }
}
