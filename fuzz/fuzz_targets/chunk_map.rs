//! Chunk items as a chunk tree may hold them, then look-ups.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_ondisk::LogicalAddr;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_volume::ChunkMap;

/// Chunk items with their keys' offsets, then ranges: start and length.
type Input = (Vec<(u64, Vec<u8>)>, Vec<(u64, u32)>);

fuzz_target!(|input: Input| {
    let (chunks, ranges) = input;
    let mut map = ChunkMap::new();
    for (start, item) in chunks {
        if let Ok(chunk) = Chunk::parse(LogicalAddr(start), &item) {
            let _ = map.add(chunk);
        }
    }
    let starts: Vec<LogicalAddr> = map.chunks().map(|chunk| chunk.start).collect();
    for start in &starts {
        map.superblock_ranges(*start).unwrap();
    }
    for (at, len) in ranges {
        let near = starts.get(at as usize % starts.len().max(1)).map_or(0, |start| start.0);
        for at in [at, near.wrapping_add(at % (1 << 30))] {
            let Ok(runs) = map.runs(LogicalAddr(at), u64::from(len)) else { continue };
            let total: u64 = runs.iter().map(|run| run.len_bytes).sum();
            assert_eq!(total, u64::from(len));
            for run in &runs {
                let pieces: u64 = run.pieces().map(|piece| piece.end - piece.start).sum();
                assert_eq!(pieces, run.len_bytes);
            }
        }
    }
});
