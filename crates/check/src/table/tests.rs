use std::collections::BTreeMap;

use ubtrfs_testkit::Prng;

use super::*;

/// Of eight frames of 512 bytes.
const TINY: u64 = 4096;

fn store() -> Arc<Store> {
    Arc::new(Store::new(TINY))
}

#[test]
fn table_far_beyond_the_limit_keeps_what_it_was_given() {
    let mut prng = Prng::of_test(21);
    let store = store();
    let mut table = Table::<3>::new(&store);
    let mut model: Vec<[u64; 3]> = Vec::new();
    for _ in 0..20_000 {
        if model.is_empty() || prng.chance(2, 3) {
            let record = [prng.below(1000), prng.next_u64(), prng.below(3)];
            table.push(record);
            model.push(record);
            continue;
        }
        let index = prng.index(model.len());
        if prng.chance(1, 2) {
            let value = prng.next_u64();
            table.add(index, 1, value);
            model[index][1] = model[index][1].wrapping_add(value);
        } else {
            let record = [prng.below(1000), prng.next_u64(), prng.below(3)];
            table.set(index, record);
            model[index] = record;
        }
    }
    assert!(table.iter().eq(model.iter().copied()));
    table.sort_by(|[first, ..]| *first);
    model.sort_by_key(|[first, ..]| *first);
    assert!(table.iter().eq(model.iter().copied()), "sorting keeps the order of equal ones");
    for bound in 0..1002 {
        let below = model.partition_point(|[first, ..]| *first < bound);
        assert_eq!(table.count_below(bound), below);
        let found = model.get(below).is_some_and(|[first, ..]| *first == bound);
        assert_eq!(table.find(bound), found.then_some(below));
    }
    assert_eq!(table.count_up_to(u64::MAX), model.len());
    let taken = store.taken();
    assert!(taken.spilled_bytes > 10 * TINY, "{taken:?}");
    assert!(!store.has_failed());
}

#[test]
fn index_far_beyond_the_limit_finds_what_was_inserted_and_nothing_else() {
    let mut prng = Prng::of_test(22);
    let store = store();
    let mut index = Index::new(&store);
    let mut model = BTreeMap::new();
    for number in 0..5000 {
        // Neighbours, strays, and the ends of all there is.
        let key = match prng.below(4) {
            0 => prng.next_u64(),
            1 => u64::MAX - prng.below(3),
            _ => prng.below(40) * (1 << 30) + prng.below(400) * 16_384,
        };
        assert_eq!(index.get(key), model.get(&key).copied());
        if index.get(key).is_none() {
            index.insert(key, number);
            model.insert(key, number);
        }
    }
    for (key, number) in &model {
        assert_eq!(index.get(*key), Some(*number));
    }
    assert!(store.taken().spilled_bytes > 10 * TINY);
}

/// What a table took is there for the next one.
#[test]
fn pages_of_a_dropped_table_are_used_again_as_zeroes() {
    let store = store();
    let mut peak = 0;
    for round in 0..20 {
        let mut table = Table::<2>::new(&store);
        for number in 0..1000 {
            table.push([number, round]);
        }
        let mut index = Index::new(&store);
        index.insert(round, 7);
        assert_eq!((index.get(round), index.get(round + 1)), (Some(7), None));
        peak = if round == 0 { store.taken().peak_bytes } else { peak };
        assert!(table.iter().eq((0..1000).map(|number| [number, round])));
    }
    assert_eq!(store.taken().peak_bytes, peak);
}

#[test]
fn limit_is_kept_by_many_tables_at_once() {
    for limit in [64 << 10, 100_000, 1 << 20] {
        let store = Arc::new(Store::new(limit));
        let mut tables: Vec<Table<3>> = (0..5).map(|_| Table::new(&store)).collect();
        for number in 0..40_000 {
            tables.iter_mut().for_each(|table| table.push([number, number, number]));
        }
        let taken = store.taken();
        assert!(taken.peak_bytes <= limit, "{taken:?} of {limit}");
        assert!(taken.spilled_bytes > limit, "{taken:?} of {limit}");
        for table in tables {
            assert!(table.iter().eq((0..40_000).map(|number| [number, number, number])));
        }
    }
}

/// Several threads read and add while pages come and go.
#[test]
fn threads_that_add_beside_each_other_lose_nothing() {
    let store = store();
    let mut table = Table::<2>::new(&store);
    for number in 0..2000 {
        table.push([number, 0]);
    }
    let work = |_: &mut [()]| -> Result<(), std::convert::Infallible> {
        for round in 0..5 {
            for index in 0..table.len() {
                table.add((index * 37 + round) % table.len(), 1, 1);
            }
        }
        Ok(())
    };
    let Ok(()) = ubtrfs_rt::Executor::Threads(4).for_each_part(&mut [(); 4], work);
    assert!(table.iter().eq((0..2000).map(|number| [number, 20])));
}
