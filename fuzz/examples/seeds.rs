//! Cuts seeds for the targets out of a filesystem image: `seeds IMAGE CORPUS`.

use std::collections::HashMap;
use std::path::Path;

use ubtrfs_ondisk::block::{HEADER_BYTES, Header, ITEM_BYTES, Item};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use zerocopy::IntoBytes;

/// Items of one type, and blocks of one tree, that are enough.
const SEEDS_EACH: usize = 20;

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(image), Some(corpus)) = (args.next(), args.next()) else {
        return Err(std::io::Error::other("usage: seeds IMAGE CORPUS"));
    };
    let corpus = Path::new(&corpus);
    let bytes = std::fs::read(image)?;
    let start = usize::try_from(SUPERBLOCK_OFFSETS[0].0).expect("64 KiB");
    let copy = &bytes[start..start + SUPERBLOCK_BYTES];
    let superblock =
        Superblock::parse(copy, SUPERBLOCK_OFFSETS[0]).map_err(std::io::Error::other)?;
    save(corpus, "superblock", "primary", copy)?;
    for (index, chunk) in superblock.sys_chunks().map_err(std::io::Error::other)?.iter().enumerate()
    {
        save(corpus, "chunk", &format!("system-{index}"), &chunk.to_bytes())?;
    }
    let mut seen: HashMap<(&str, u64), usize> = HashMap::new();
    let nodesize = superblock.nodesize.get() as usize;
    for start in (0..bytes.len()).step_by(4096) {
        let Some(block) = bytes.get(start..start + nodesize) else { break };
        let header = Header::peek(block).map_err(std::io::Error::other)?;
        if header.fsid != superblock.header_fsid().0 || block == copy {
            continue;
        }
        let blocks = seen.entry(("block", header.owner.get())).or_default();
        *blocks += 1;
        if *blocks <= SEEDS_EACH && nodesize == 4096 {
            save(corpus, "block", &format!("{start}"), block)?;
        }
        if header.level != 0 {
            continue;
        }
        let data = &block[HEADER_BYTES..];
        for slot in 0..header.nritems.get() as usize {
            let Some(item) = data.get(slot * ITEM_BYTES..) else { break };
            let item = Item::peek(item).map_err(std::io::Error::other)?;
            let (from, len) = (item.offset.get() as usize, item.len.get() as usize);
            let Some(content) = data.get(from..from + len) else { break };
            let items = seen.entry(("item", item.key.ty.into())).or_default();
            *items += 1;
            if *items <= SEEDS_EACH {
                let mut seed = item.key.as_bytes().to_vec();
                seed.extend_from_slice(content);
                save(corpus, "item", &format!("{}-{items}", item.key.ty), &seed)?;
            }
        }
    }
    Ok(())
}

fn save(corpus: &Path, target: &str, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let folder = corpus.join(target);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(name), bytes)
}
