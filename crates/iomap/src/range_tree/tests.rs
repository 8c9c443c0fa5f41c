use proptest::prelude::*;

use super::*;

impl<V: Copy + Eq + std::fmt::Debug> RangeTree<V> {
    /// All records, after a check of the invariants.
    pub(crate) fn checked_records(&self) -> Vec<Record<V>> {
        let mut leaves = Vec::new();
        if self.root != NONE {
            self.check_node(self.root, self.height, NONE, &mut leaves);
        }
        let mut records: Vec<Record<V>> = Vec::new();
        let mut prev = NONE;
        for (at, &leaf) in leaves.iter().enumerate() {
            let node = self.leaf(leaf);
            assert!(node.is_linked);
            assert_eq!(node.prev, prev);
            assert_eq!(node.next, leaves.get(at + 1).copied().unwrap_or(NONE));
            assert!(!node.records.is_empty() || self.record_count == 0);
            records.extend(&node.records);
            prev = leaf;
        }
        assert_eq!(records.len(), self.record_count);
        assert!(records.iter().all(|record| record.start < record.end));
        for pair in records.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{pair:?} overlap");
            assert!(
                pair[0].end < pair[1].start || pair[0].value != pair[1].value,
                "{pair:?} unmerged"
            );
        }
        let linked = self.leaves.iter().filter(|leaf| leaf.is_linked).count();
        assert_eq!(linked, leaves.len());
        records
    }

    fn check_node(&self, index: u32, height: u32, parent: u32, leaves: &mut Vec<u32>) -> u64 {
        assert_eq!(self.parent(index, height == 0), parent);
        if height == 0 {
            leaves.push(index);
            return self.leaf(index).records.first().map_or(0, |record| record.start);
        }
        let node = self.inner(index);
        assert_eq!(node.is_lowest, height == 1);
        assert!(parent != NONE || node.children.len() > 1);
        for child in &node.children {
            assert_eq!(self.check_node(child.index, height - 1, index, leaves), child.first);
        }
        node.children[0].first
    }

    fn place_count(&self) -> usize {
        self.leaves.len()
    }
}

const UNIVERSE: u64 = 300;

/// The same as an array.
fn records_of(model: &[Option<u8>]) -> Vec<Record<u8>> {
    let mut records: Vec<Record<u8>> = Vec::new();
    for (at, value) in (0..).zip(model) {
        let Some(value) = *value else { continue };
        match records.last_mut() {
            Some(last) if last.end == at && last.value == value => last.end += 1,
            _ => records.push(Record { start: at, end: at + 1, value }),
        }
    }
    records
}

fn check_searches(tree: &RangeTree<u8>, records: &[Record<u8>]) {
    let mut places: Vec<Place> = (0..UNIVERSE).filter_map(|at| tree.find(at)).step_by(7).collect();
    // Places that hold nothing, or something else by now.
    for leaf in 0..=tree.place_count() {
        places.push(Place::new(u32::try_from(leaf).unwrap(), 0));
        places.push(Place::new(u32::try_from(leaf).unwrap(), LEAF_SLOT_MAX));
    }
    for at in 0..=UNIVERSE {
        let expected = records.iter().find(|record| record.end > at).copied();
        assert_eq!(tree.find(at).map(|place| tree.record(place)), expected);
        for near in &places {
            let found = tree.find_near(at, Some(*near));
            assert_eq!(found.map(|place| tree.record(place)), expected, "at {at} near {near:?}");
        }
    }
}

const LEAF_SLOT_MAX: usize = 7;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// A tree and an array hold the same after the same updates; searches with any hint find what a
    /// search from the root does.
    #[test]
    fn update_random_ranges_same_as_array(
        updates in prop::collection::vec((0..UNIVERSE, 1..40_u64, prop::option::of(0..3_u8)), 1..120),
    ) {
        let mut tree = RangeTree::default();
        let mut model = vec![None; usize::try_from(UNIVERSE).unwrap()];
        for (start, len, value) in updates {
            let end = (start + len).min(UNIVERSE);
            tree.update(start, end, |_| value);
            model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(value);
            prop_assert_eq!(tree.checked_records(), records_of(&model));
        }
        check_searches(&tree, &records_of(&model));
    }

    /// The pieces that an update hands over cover the range, in order, each with its old value.
    #[test]
    fn update_visits_each_piece_once_in_order(
        before in prop::collection::vec((0..UNIVERSE, 1..20_u64, 0..3_u8), 0..60),
        start in 0..UNIVERSE, len in 0..UNIVERSE,
    ) {
        let mut tree = RangeTree::default();
        let mut model = vec![None; usize::try_from(UNIVERSE).unwrap()];
        for (start, len, value) in before {
            let end = (start + len).min(UNIVERSE);
            tree.update(start, end, |_| Some(value));
            model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(Some(value));
        }
        let end = (start + len).min(UNIVERSE);
        let mut at = start;
        tree.update(start, end, |piece| {
            assert_eq!(piece.start, at);
            assert!(piece.start < piece.end && piece.end <= end);
            for unit in piece.start..piece.end {
                assert_eq!(model[usize::try_from(unit).unwrap()], piece.value);
            }
            at = piece.end;
            piece.value.map(|value| value ^ 1)
        });
        prop_assert_eq!(at, end.max(start));
        tree.checked_records();
    }
}

#[test]
fn insert_in_order_leaves_full_leaves() {
    let mut tree = RangeTree::default();
    for at in 0..4096 {
        tree.update(at * 2, at * 2 + 1, |_| Some(0_u8));
    }
    assert_eq!(tree.checked_records().len(), 4096);
    assert_eq!(tree.leaves.len(), 4096 / 8);
}

#[test]
fn remove_all_in_any_order_frees_all_nodes() {
    for step in [1_u64, 3, 7, 1021] {
        let mut tree = RangeTree::default();
        for at in 0..1024 {
            tree.update(at * 2, at * 2 + 1, |_| Some(0_u8));
        }
        let mut at = 0;
        for left in (0..1024).rev() {
            tree.update(at * 2, at * 2 + 1, |_| None);
            at = (at + step) % 1024;
            assert_eq!(tree.checked_records().len(), left);
        }
        assert!(tree.leaves.is_empty() && tree.inners.is_empty());
    }
}

/// Most records go, a few far apart stay: memory follows what stays.
#[test]
fn remove_most_joins_nodes() {
    let mut tree = RangeTree::default();
    for at in 0..4096 {
        tree.update(at * 2, at * 2 + 1, |_| Some(0_u8));
    }
    for at in (0..4096).filter(|at| at % 64 != 0) {
        tree.update(at * 2, at * 2 + 1, |_| None);
    }
    assert_eq!(tree.checked_records().len(), 64);
    let linked = tree.leaves.iter().filter(|leaf| leaf.is_linked).count();
    assert!(linked <= 64 / 2, "{linked} leaves for 64 records");
}

#[test]
fn place_as_word_and_back_is_the_same() {
    let place = Place::new(0x1234_5678, 63);
    assert_eq!(Place::from_word(place.to_word()), place);
    assert_eq!(RangeTree::<u8>::default().find_near(3, Some(Place::from_word(u64::MAX))), None);
}
