use super::*;

use proptest::prelude::*;
use ubtrfs_ondisk::Uuid;
use ubtrfs_ondisk::chunk::ChunkStripe;

const PROFILES: [BlockGroupFlags; 7] = [
    BlockGroupFlags(0),
    BlockGroupFlags::DUP,
    BlockGroupFlags::RAID0,
    BlockGroupFlags::RAID1,
    BlockGroupFlags::RAID10,
    BlockGroupFlags::RAID1C3,
    BlockGroupFlags::RAID1C4,
];

const START: u64 = 1 << 20;

/// A chunk of a profile with stripes on devices 1, 2, …, each at its own offset.
fn chunk(profile: BlockGroupFlags, stripe_count: usize, rows: u64) -> Chunk {
    let columns = match profile {
        BlockGroupFlags::RAID0 => stripe_count as u64,
        BlockGroupFlags::RAID10 => stripe_count as u64 / 2,
        _ => 1,
    };
    Chunk {
        start: LogicalAddr(START),
        len_bytes: rows * columns * STRIPE_LEN_BYTES,
        stripe_len_bytes: STRIPE_LEN_BYTES,
        flags: BlockGroupFlags::DATA | profile,
        io_align: 65536,
        io_width: 65536,
        sector_size: 4096,
        sub_stripes: if profile == BlockGroupFlags::RAID10 { 2 } else { 1 },
        stripes: (0..stripe_count as u64)
            .map(|index| ChunkStripe {
                device: DeviceId(index + 1),
                offset: PhysicalAddr((index + 1) << 30),
                device_uuid: Uuid([1; 16]),
            })
            .collect(),
    }
}

fn any_chunk() -> impl Strategy<Value = Chunk> {
    (0..PROFILES.len(), 1_usize..4, 1_u64..5).prop_map(|(profile, width, rows)| {
        let profile = PROFILES[profile];
        let count = match profile {
            BlockGroupFlags(0) => 1,
            BlockGroupFlags::DUP | BlockGroupFlags::RAID1 => 2,
            BlockGroupFlags::RAID1C3 => 3,
            BlockGroupFlags::RAID1C4 => 4,
            BlockGroupFlags::RAID0 => width,
            _ => width * 2,
        };
        chunk(profile, count, rows)
    })
}

/// The plain model: deals the chunk's elements out to the columns as cards, and looks up one byte.
fn model(chunk: &Chunk, offset: u64) -> Vec<Place> {
    let copies = match chunk.flags.profile() {
        BlockGroupFlags::RAID1 | BlockGroupFlags::DUP | BlockGroupFlags::RAID10 => 2,
        BlockGroupFlags::RAID1C3 => 3,
        BlockGroupFlags::RAID1C4 => 4,
        _ => 1,
    };
    let columns: Vec<&[ChunkStripe]> = chunk.stripes.chunks(copies).collect();
    let mut filled = vec![0; columns.len()];
    let mut turn = 0;
    let mut dealt = 0;
    loop {
        if offset < dealt + STRIPE_LEN_BYTES {
            let within = filled[turn] + offset - dealt;
            return columns[turn]
                .iter()
                .map(|stripe| Place {
                    devid: stripe.device,
                    at: PhysicalAddr(stripe.offset.0 + within),
                })
                .collect();
        }
        filled[turn] += STRIPE_LEN_BYTES;
        dealt += STRIPE_LEN_BYTES;
        turn = (turn + 1) % columns.len();
    }
}

proptest! {
    #[test]
    fn runs_of_any_range_are_where_the_model_puts_each_byte(
        chunk in any_chunk(), from in 0_u64..1 << 22, len in 0_u64..1 << 20,
    ) {
        let from = from % chunk.len_bytes;
        let len = len.min(chunk.len_bytes - from);
        let mut map = ChunkMap::new();
        map.add(chunk.clone()).unwrap();
        let runs = map.runs(LogicalAddr(START + from), len).unwrap();
        let mut seen = 0;
        for run in &runs {
            let mut on_device = 0;
            for piece in run.pieces() {
                // Both ends and a byte between: within an element all go the same way.
                for byte in [piece.start, (piece.start + piece.end) / 2, piece.end - 1] {
                    let expect = model(&chunk, from + byte);
                    let have: Vec<Place> = run.copies.iter().map(|copy| Place {
                        at: PhysicalAddr(copy.at.0 + on_device + byte - piece.start), ..*copy
                    }).collect();
                    prop_assert_eq!(have, expect, "byte {} of {}+{}", byte, from, len);
                }
                on_device += piece.end - piece.start;
                seen += piece.end - piece.start;
            }
            prop_assert_eq!(on_device, run.len_bytes);
        }
        prop_assert_eq!(seen, len);
        let mut pieces: Vec<Range<u64>> = runs.iter().flat_map(Run::pieces).collect();
        pieces.sort_by_key(|piece| piece.start);
        let contiguous = pieces.windows(2).all(|pair| pair[0].end == pair[1].start);
        prop_assert!(contiguous, "{:?}", pieces);
    }

    #[test]
    fn add_of_any_chunk_never_panics(
        start in any::<u64>(), len_bytes in any::<u64>(), flags in any::<u64>(),
        stripe_len_shift in 15_u32..18, sub_stripes in 0_u16..4,
        offsets in proptest::collection::vec((0_u64..4, any::<u64>()), 0..6),
        at in any::<u64>(), len in any::<u64>(),
    ) {
        let mut map = ChunkMap::new();
        for flags in [flags, flags & 0x7ff, 1 | 1 << (flags % 11)] {
            let _ = map.add(Chunk {
                start: LogicalAddr(start), len_bytes, stripe_len_bytes: 1 << stripe_len_shift,
                flags: BlockGroupFlags(flags), io_align: 0, io_width: 0, sector_size: 0,
                sub_stripes,
                stripes: offsets.iter().map(|(devid, offset)| ChunkStripe {
                    device: DeviceId(*devid), offset: PhysicalAddr(*offset),
                    device_uuid: Uuid::NIL,
                }).collect(),
            });
        }
        let _ = map.runs(LogicalAddr(at), len);
        let _ = map.superblock_ranges(LogicalAddr(start));
    }
}

#[test]
fn add_the_same_chunk_twice_is_one_chunk() {
    let mut map = ChunkMap::new();
    let chunk = chunk(BlockGroupFlags::RAID1, 2, 4);
    map.add(chunk.clone()).unwrap();
    map.add(chunk.clone()).unwrap();
    assert_eq!(map.chunks().count(), 1);
    assert!(map.remove(chunk.start).is_some());
    assert!(map.chunk_at(chunk.start).is_none());
    map.add(chunk).unwrap();
}

#[test]
fn add_overlap_in_logical_space_or_on_a_device_is_corrupt() {
    let mut map = ChunkMap::new();
    let first = chunk(BlockGroupFlags(0), 1, 4);
    map.add(first.clone()).unwrap();
    let overlap = |result: Result<()>| match result {
        Err(Error::Corrupt(corruption)) => assert_eq!(corruption.reason, Reason::Overlap),
        other => panic!("{other:?}"),
    };
    let mut logical = first.clone();
    logical.start = LogicalAddr(START + STRIPE_LEN_BYTES);
    logical.stripes[0].offset = PhysicalAddr(0);
    overlap(map.add(logical));
    let mut physical = first.clone();
    physical.start = LogicalAddr(START * 8);
    physical.stripes[0].offset.0 += STRIPE_LEN_BYTES;
    overlap(map.add(physical));
    let mut itself = chunk(BlockGroupFlags::DUP, 2, 4);
    itself.start = LogicalAddr(START * 8);
    itself.stripes[0] = itself.stripes[1];
    overlap(map.add(itself));
}

#[test]
fn add_raid5_is_refused_by_name() {
    for (flags, name) in [(BlockGroupFlags::RAID5, "RAID5"), (BlockGroupFlags::RAID6, "RAID6")] {
        let error = ChunkMap::new().add(chunk(flags, 3, 1)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn runs_past_the_end_of_the_chunk_is_no_chunk() {
    let mut map = ChunkMap::new();
    let chunk = chunk(BlockGroupFlags(0), 1, 4);
    let end = chunk.end();
    map.add(chunk).unwrap();
    assert!(matches!(map.runs(LogicalAddr(end.0 - 1), 2), Err(Error::NoChunk { .. })));
    assert!(matches!(map.runs(end, 1), Err(Error::NoChunk { .. })));
    assert!(matches!(map.runs(LogicalAddr(START), u64::MAX), Err(Error::NoChunk { .. })));
    assert!(matches!(map.runs(LogicalAddr(START - 1), 1), Err(Error::NoChunk { .. })));
}

#[test]
fn superblock_ranges_cover_the_elements_that_hold_one() {
    let mut map = ChunkMap::new();
    // Device offset 0: the primary lies in the second element, the copy at 64 MiB in another.
    let mut single = chunk(BlockGroupFlags(0), 1, 2048);
    single.stripes[0].offset = PhysicalAddr(0);
    map.add(single).unwrap();
    let at = |element: u64| {
        let start = START + element * STRIPE_LEN_BYTES;
        LogicalAddr(start)..LogicalAddr(start + STRIPE_LEN_BYTES)
    };
    assert_eq!(map.superblock_ranges(LogicalAddr(START)).unwrap(), [at(1), at(1024)]);

    let mut map = ChunkMap::new();
    // Two columns: row 1023 of the second one is element 2047 of the chunk.
    let mut striped = chunk(BlockGroupFlags::RAID0, 2, 2048);
    striped.stripes[1].offset = PhysicalAddr(STRIPE_LEN_BYTES);
    map.add(striped).unwrap();
    assert_eq!(map.superblock_ranges(LogicalAddr(START)).unwrap(), [at(1), at(2047)]);
}
