//! The bytes of a device, sparse, and shared between states that differ in a few blocks.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = 4096;
const GROUP_BLOCKS: u64 = 64;

type Block = [u8; BLOCK_BYTES];

/// Blocks side by side; those that were never written are zeros.
type Group = BTreeMap<u64, Arc<Block>>;

/// The bytes of a device. A clone shares all of them, and the first change of a block afterwards
/// copies it, its group and the list of groups: thousands of states cost little more than what
/// they differ in.
#[derive(Clone, Debug)]
pub struct Image {
    len_bytes: u64,
    groups: Arc<BTreeMap<u64, Arc<Group>>>,
}

impl Image {
    /// Zeros.
    pub fn new(len_bytes: u64) -> Self {
        Self { len_bytes, groups: Arc::default() }
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `buffer` from `at` on. The range must lie inside.
    pub fn read(&self, at: u64, buffer: &mut [u8]) {
        for_each_block(at, buffer.len(), |block, inside, range| {
            let bytes = &mut buffer[range];
            let group = self.groups.get(&(block / GROUP_BLOCKS));
            match group.and_then(|group| group.get(&block)) {
                Some(stored) => bytes.copy_from_slice(&stored[inside..inside + bytes.len()]),
                None => bytes.fill(0),
            }
        });
    }

    /// Writes `bytes` at `at`. The range must lie inside.
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        let groups = Arc::make_mut(&mut self.groups);
        for_each_block(at, bytes.len(), |block, inside, range| {
            let group = Arc::make_mut(groups.entry(block / GROUP_BLOCKS).or_default());
            let bytes = &bytes[range];
            if let Ok(whole) = <&Block>::try_from(bytes) {
                group.insert(block, Arc::new(*whole));
            } else {
                let stored = group.entry(block).or_insert_with(|| Arc::new([0; BLOCK_BYTES]));
                Arc::make_mut(stored)[inside..inside + bytes.len()].copy_from_slice(bytes);
            }
        });
    }

    /// The numbers of those blocks of 4 KiB in a range that were ever written.
    pub(super) fn stored_blocks(&self, range: Range<u64>) -> Vec<u64> {
        let groups =
            self.groups.range(range.start / GROUP_BLOCKS..range.end.div_ceil(GROUP_BLOCKS));
        let blocks = groups.flat_map(|(_, group)| group.keys().copied());
        blocks.filter(|block| range.contains(block)).collect()
    }

    /// Writes it out as a sparse image file, for judges that read files.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_to(&self, file: &Path) {
        let file = File::create(file).expect("the image can be created");
        file.set_len(self.len_bytes).expect("the image can be that long");
        for (block, bytes) in self.groups.values().flat_map(|group| group.iter()) {
            file.write_all_at(&bytes[..], block * BLOCK).expect("the image can be written");
        }
    }
}

/// Calls with each block that a range touches, the offset in the block, and the range in the buffer.
fn for_each_block(at: u64, len: usize, mut body: impl FnMut(u64, usize, Range<usize>)) {
    let mut done = 0;
    while done < len {
        let offset = at + u64::try_from(done).expect("a length fits");
        let inside = usize::try_from(offset % BLOCK).expect("less than a block");
        let count = (BLOCK_BYTES - inside).min(len - done);
        body(offset / BLOCK, inside, done..done + count);
        done += count;
    }
}
