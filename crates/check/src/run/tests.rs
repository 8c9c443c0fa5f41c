use ubtrfs_testkit::Prng;

use super::*;

const RULES: Rules = Rules { root: RootId::FS_TREE, no_holes: false };

/// What comes of a tree, whatever the order in which its parts were joined.
#[derive(PartialEq, Debug)]
struct Outcome {
    sums: Sums,
    findings: Vec<String>,
    has_gap: bool,
}

/// A leaf of some inodes, each with something about it; the first and the last may go on in the
/// neighbours.
fn leaf(prng: &mut Prng, number: &mut u64, block: u64, found: &mut Vec<Finding>) -> Summary {
    if prng.chance(1, 8) {
        *number += prng.below(2);
        return Summary::lost();
    }
    let mut summary = Summary::default();
    summary.sums.items = prng.next_u64();
    let count = prng.below(4);
    for index in 0..count {
        if index > 0 {
            *number += 1;
        }
        let mut run = Run::new(InodeNo(*number), LogicalAddr(block));
        // The item of an inode that goes on here was before.
        if index > 0 || prng.chance(1, 3) {
            run.inode = Some(Inode {
                mode: 0o100_644,
                nlink: u32::try_from(prng.below(3)).unwrap(),
                size: prng.below(40_000),
                nbytes: prng.below(4) * 4096,
                flags: prng.below(2),
            });
        }
        run.names = prng.below(2);
        run.bytes = prng.below(3) * 4096;
        if prng.chance(1, 2) {
            let start = prng.below(8) * 4096;
            let (end, block) = (start + prng.below(3) * 4096, LogicalAddr(block));
            run.span = Some(Span { start, end, block });
        }
        if prng.chance(1, 3) {
            let (block, offset, at) = (LogicalAddr(block), 0, LogicalAddr(block));
            run.csum_missing = Some(CsumMark { block, offset, at });
        }
        summary.push(run, &RULES, found);
    }
    *number += prng.below(2);
    summary
}

fn outcome(mut whole: Summary, mut found: Vec<Finding>) -> Outcome {
    whole.finish(&RULES, &mut found);
    let mut findings: Vec<String> = found.iter().map(|finding| format!("{finding:?}")).collect();
    findings.sort();
    let Summary { sums, has_gap, .. } = whole;
    Outcome { sums, findings, has_gap }
}

/// Joins neighbours in a random order.
fn join_somehow(prng: &mut Prng, leaves: &[Summary], found: &mut Vec<Finding>) -> Summary {
    match leaves {
        [] => Summary::default(),
        [leaf] => leaf.clone(),
        leaves => {
            let (left, right) = leaves.split_at(1 + prng.index(leaves.len() - 1));
            let mut left = join_somehow(prng, left, found);
            let right = join_somehow(prng, right, found);
            left.join(&right, &RULES, found);
            left
        }
    }
}

#[test]
fn summaries_joined_in_any_order_say_the_same() {
    let mut prng = Prng::of_test(11);
    for round in 0..3000 {
        let mut found = Vec::new();
        let mut number = 256;
        let count = prng.below(9);
        let leaves: Vec<Summary> = (0..count)
            .map(|block| leaf(&mut prng, &mut number, block * 4096, &mut found))
            .collect();
        let mut in_order = Summary::default();
        let mut found_in_order = found.clone();
        for leaf in &leaves {
            in_order.join(leaf, &RULES, &mut found_in_order);
        }
        let expect = outcome(in_order, found_in_order);
        for _ in 0..4 {
            let mut found = found.clone();
            let whole = join_somehow(&mut prng, &leaves, &mut found);
            assert_eq!(outcome(whole, found), expect, "round {round}: {leaves:#?}");
        }
    }
}

/// An inode over three leaves is judged once, as a whole.
#[test]
fn inode_over_three_leaves_is_judged_as_one() {
    let inode = Inode { mode: 0o100_644, nlink: 1, size: 12_288, nbytes: 12_288, flags: 0 };
    let part = |index: u64| {
        let mut run = Run::new(InodeNo(300), LogicalAddr(index * 4096));
        run.bytes = 4096;
        let (start, end) = (index * 4096, (index + 1) * 4096);
        run.span = Some(Span { start, end, block: run.block });
        run
    };
    let mut found = Vec::new();
    let mut whole = Summary::default();
    for index in 0..3 {
        let mut run = part(index);
        if index == 0 {
            (run.inode, run.names) = (Some(inode), 1);
        }
        let mut leaf = Summary::default();
        leaf.push(run, &RULES, &mut found);
        whole.join(&leaf, &RULES, &mut found);
    }
    whole.finish(&RULES, &mut found);
    assert_eq!(found, []);
}

/// Half of an inode is not judged when the other half was lost.
#[test]
fn inode_beside_a_lost_leaf_is_not_judged() {
    let mut found = Vec::new();
    let mut leaf = Summary::default();
    leaf.push(Run::new(InodeNo(300), LogicalAddr(4096)), &RULES, &mut found);
    for lost_first in [true, false] {
        let mut whole = if lost_first { Summary::lost() } else { leaf.clone() };
        let next = if lost_first { leaf.clone() } else { Summary::lost() };
        whole.join(&next, &RULES, &mut found);
        whole.finish(&RULES, &mut found);
        assert!(whole.has_gap);
    }
    assert_eq!(found, []);
}

/// A summary is kept as words; nothing of it is lost.
#[test]
fn summary_as_words_comes_back_as_it_was() {
    let mut prng = Prng::of_test(12);
    let mut kinds = [0; 4];
    for _ in 0..3000 {
        let mut number = 256 + prng.below(3);
        let mut summary = leaf(&mut prng, &mut number, 16_384, &mut Vec::new());
        let runs = match &mut summary.ends {
            Ends::Empty => [None, None],
            Ends::One(run) => [Some(run), None],
            Ends::Two(first, last) => [first.as_mut(), last.as_mut()],
        };
        for run in runs.into_iter().flatten() {
            let some = |prng: &mut Prng| prng.chance(1, 2).then(|| prng.below(3));
            let mark = CsumMark {
                block: LogicalAddr(prng.below(2)),
                offset: prng.next_u64(),
                at: LogicalAddr(prng.next_u64()),
            };
            let compression =
                [Compression::None, Compression::Lzo, Compression::Zstd][prng.index(3)];
            run.csum_present = prng.chance(1, 2).then_some(mark);
            run.compressed = prng.chance(1, 2).then_some((mark, compression));
            (run.gap, run.inline_bytes) = (some(&mut prng), some(&mut prng));
            (run.has_entries, run.is_partial) = (prng.chance(1, 2), prng.chance(1, 2));
            (run.entries, run.item_bytes, run.index_bytes) =
                (prng.below(2), prng.next_u64(), prng.below(2));
        }
        summary.sums.orphans = prng.below(2);
        kinds[match summary.ends {
            Ends::Empty => 0,
            Ends::One(_) => 1,
            Ends::Two(None, None) => 2,
            Ends::Two(..) => 3,
        }] += 1;
        let back = Summary::of_words(&summary.to_words());
        assert_eq!(format!("{back:?}"), format!("{summary:?}"));
    }
    assert!(kinds.iter().all(|count| *count > 100), "{kinds:?}");
}
