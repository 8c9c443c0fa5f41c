use proptest::prelude::*;

use super::*;

const UNIVERSE: u64 = 200;
const BITS: [StateBits; 5] = [
    StateBits::DELALLOC,
    StateBits::ORDERED,
    StateBits::DEFRAG,
    StateBits::BOUNDARY,
    StateBits::DELALLOC_NEW,
];

fn range(start: u64, end: u64) -> FileRange {
    FileRange::new(FileOffset::new(start), FileOffset::new(end))
}

/// The states of each byte.
#[derive(Clone)]
struct Model(Vec<StateBits>);

impl Model {
    fn new() -> Self {
        Self(vec![StateBits::NONE; usize::try_from(UNIVERSE).unwrap()])
    }

    fn part(&self, range: FileRange) -> &[StateBits] {
        let (start, end) = (range.start.bytes(), range.end.bytes().min(UNIVERSE));
        &self.0[usize::try_from(start).unwrap()..usize::try_from(end.max(start)).unwrap()]
    }

    fn convert(&mut self, range: FileRange, conversion: Conversion) -> u64 {
        let mut changed = 0;
        for at in range.start.bytes()..range.end.bytes() {
            let bits = &mut self.0[usize::try_from(at).unwrap()];
            let new = bits.without(conversion.clear) | conversion.set;
            changed += u64::from(new != *bits);
            *bits = new;
        }
        changed
    }

    fn count(&self, query: CountQuery) -> Option<Counted> {
        let wanted: Vec<bool> =
            self.part(query.within).iter().map(|bits| query.want.is_met(*bits)).collect();
        let first = wanted.iter().position(|is_wanted| *is_wanted)?;
        let run = wanted[first..].iter();
        let len = match query.span {
            Span::Contiguous => run.take_while(|is_wanted| **is_wanted).count(),
            Span::All => run.filter(|is_wanted| **is_wanted).count(),
        };
        Some(Counted {
            start: query.within.start.saturating_add(u64::try_from(first).unwrap()),
            len_bytes: u64::try_from(len).unwrap().min(query.bytes_max),
        })
    }

    fn records(&self, within: FileRange) -> Vec<(FileRange, StateBits)> {
        let mut records: Vec<(FileRange, StateBits)> = Vec::new();
        for (at, bits) in (within.start.bytes()..).zip(self.part(within)) {
            let byte = range(at, at + 1);
            match records.last_mut() {
                Some((last, other)) if last.end == byte.start && other == bits => {
                    last.end = byte.end;
                }
                _ if *bits == StateBits::NONE => {}
                _ => records.push((byte, *bits)),
            }
        }
        records
    }
}

fn bits() -> impl Strategy<Value = StateBits> {
    (0..1_usize << BITS.len()).prop_map(|mask| {
        let chosen = BITS.iter().enumerate().filter(|(index, _)| mask >> index & 1 == 1);
        chosen.fold(StateBits::NONE, |sum, (_, bits)| sum | *bits)
    })
}

fn want() -> impl Strategy<Value = Want> {
    (bits(), any::<bool>())
        .prop_map(|(bits, is_all)| if is_all { Want::All(bits) } else { Want::Any(bits) })
}

fn part() -> impl Strategy<Value = FileRange> {
    (0..UNIVERSE, 0..50_u64).prop_map(|(start, len)| range(start, (start + len).min(UNIVERSE)))
}

#[derive(Clone, Debug)]
enum Step {
    Convert(FileRange, StateBits, StateBits),
    ConvertCounting(FileRange, StateBits, StateBits, StateBits),
    Count(FileRange, Want, bool, u64),
    Find(FileRange, Want),
    Test(FileRange, Want),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (part(), bits(), bits()).prop_map(|(r, set, clear)| Step::Convert(r, set, clear)),
        2 => (part(), bits(), bits(), bits())
            .prop_map(|(r, set, clear, counted)| Step::ConvertCounting(r, set, clear, counted)),
        4 => (part(), want(), any::<bool>(), prop_oneof![Just(u64::MAX), 1..60_u64])
            .prop_map(|(r, want, is_run, max)| Step::Count(r, want, is_run, max)),
        2 => (part(), want()).prop_map(|(r, want)| Step::Find(r, want)),
        1 => (part(), want()).prop_map(|(r, want)| Step::Test(r, want)),
    ]
}

proptest! {
    /// All that the states answer, with a hint from one call to the next and without, is what an array answers.
    #[test]
    fn states_random_steps_same_as_array(steps in prop::collection::vec(step(), 1..150)) {
        let states = ExtentStates::new();
        let ablated = ExtentStates::with_ablation(Ablation { without_hint: true, lock_in_tree: false });
        let hint = CachedState::new();
        let mut model = Model::new();
        for step in steps {
            match step {
                Step::Convert(range, set, clear) => {
                    let conversion = Conversion { set, clear };
                    let expected = model.convert(range, conversion);
                    prop_assert_eq!(states.convert(range, conversion), expected);
                    ablated.convert(range, conversion);
                }
                Step::ConvertCounting(range, set, clear, counted) => {
                    let conversion = Conversion { set, clear };
                    let before = model.part(range).to_vec();
                    model.convert(range, conversion);
                    let changed = |(old, new): &(StateBits, &StateBits)| {
                        (old.without(**new) | new.without(*old)).has_any(counted)
                    };
                    let expected = before.into_iter().zip(model.part(range)).filter(changed).count();
                    let count = states.convert_counting(range, conversion, counted);
                    prop_assert_eq!(count, u64::try_from(expected).unwrap());
                    ablated.convert(range, conversion);
                }
                Step::Count(within, want, is_run, bytes_max) => {
                    // A gap is nothing that could be counted.
                    if want.is_met(StateBits::NONE) {
                        continue;
                    }
                    let span = if is_run { Span::Contiguous } else { Span::All };
                    let query = CountQuery { within, want, span, bytes_max };
                    let expected = model.count(query);
                    prop_assert_eq!(states.count_range(query, Some(&hint)), expected);
                    prop_assert_eq!(states.count_range(query, None), expected);
                    prop_assert_eq!(ablated.count_range(query, Some(&hint)), expected);
                }
                Step::Find(within, want) => {
                    if want.is_met(StateBits::NONE) {
                        continue;
                    }
                    let expected =
                        model.records(within).into_iter().find(|(_, bits)| want.is_met(*bits));
                    prop_assert_eq!(states.find_first(within, want, Some(&hint)), expected);
                    prop_assert_eq!(states.find_first(within, want, None), expected);
                }
                Step::Test(range, want) => {
                    let expected = model.part(range).iter().all(|bits| want.is_met(*bits));
                    prop_assert_eq!(states.test(range, want), expected);
                }
            }
            let all = range(0, UNIVERSE);
            prop_assert_eq!(states.records(all), model.records(all));
            prop_assert_eq!(states.record_count(), model.records(all).len());
            let new = model.part(all).iter().filter(|bits| bits.has(StateBits::DELALLOC_NEW));
            prop_assert_eq!(states.delalloc_new_bytes(), u64::try_from(new.count()).unwrap());
            for at in (0..UNIVERSE).step_by(13) {
                prop_assert_eq!(states.at(FileOffset::new(at)), model.part(range(at, at + 1))[0]);
            }
        }
    }
}

/// The walk that a sparse copy makes: with the hint, the tree is searched once, in whatever order
/// ranges were added before.
#[test]
fn count_range_walk_with_hint_searches_once() {
    let states = ExtentStates::new();
    for at in 0..1000 {
        states.set(range(at * 8, at * 8 + 4), StateBits::DELALLOC);
    }
    let hint = CachedState::new();
    let mut at = FileOffset::ZERO;
    let mut runs = 0;
    let end = FileOffset::new(8000);
    let want = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
    while let Some(data) =
        states.count_range(CountQuery::first_run(FileRange::new(at, end), want), Some(&hint))
    {
        let hole = states
            .count_range(CountQuery::first_run(FileRange::new(data.start, end), want), Some(&hint))
            .unwrap();
        assert_eq!(hole.run(), data.run());
        at = data.run().end;
        runs += 1;
    }
    assert_eq!(runs, 1000);
    assert_eq!(hint.search_count(), 1);
}

#[test]
fn lock_in_tree_marks_records_and_clears_them() {
    let states = ExtentStates::with_ablation(Ablation { without_hint: false, lock_in_tree: true });
    states.set(range(10, 20), StateBits::DELALLOC);
    let locked = states.lock(range(0, 15), LockMode::Shared);
    assert_eq!(states.record_count(), 3);
    assert_eq!(format!("{:?}", states.at(FileOffset::new(12))), "delalloc|locked");
    drop(locked);
    assert_eq!(states.records(range(0, 99)), vec![(range(10, 20), StateBits::DELALLOC)]);
    assert_eq!(ExtentStates::new().lock(range(0, 9), LockMode::Shared).range(), range(0, 9));
}

/// Two threads that share a handle, and so its hint, and one that changes the states.
#[derive(Clone)]
struct Seeker {
    queries: Vec<CountQuery>,
    done: usize,
    turn: u8,
    loaded: Option<Place>,
    found: Option<Place>,
}

/// Linux had a use-after-free here: two threads that shared an open file's private data also shared its cached extent
/// state, and one freed the record that the other was looking at. Here all orders of the steps of two
/// seekers and a writer are run. A step is what is atomic: loading the hint, counting under the tree's lock, storing
/// the hint. Each count must be what an array says at its moment.
#[test]
fn hint_shared_by_threads_every_interleaving_answers_like_an_array() {
    let want = Want::Any(StateBits::DELALLOC);
    let query = |start| CountQuery::first_run(range(start, 64), want);
    let seekers = [
        Seeker { queries: vec![query(0), query(6)], done: 0, turn: 0, loaded: None, found: None },
        Seeker { queries: vec![query(17), query(20)], done: 0, turn: 0, loaded: None, found: None },
    ];
    type Change = fn(&ExtentStates, &mut Model);
    let changes: [Change; 3] = [
        // The records that hints point to go, and their leaves with them.
        |states, model| change(states, model, range(0, 32), StateBits::NONE),
        // Others take their slots.
        |states, model| change(states, model, range(18, 19), StateBits::DELALLOC),
        |states, model| change(states, model, range(2, 7), StateBits::DELALLOC),
    ];
    let mut schedule = Vec::new();
    let mut runs = 0;
    orders(&mut schedule, [6, 6, changes.len()], &mut |order| {
        let states = ExtentStates::new();
        let mut model = Model::new();
        for at in 0..12 {
            change(&states, &mut model, range(at * 4, at * 4 + 2), StateBits::DELALLOC);
        }
        let hint = CachedState::new();
        let mut seekers = seekers.clone();
        let mut changed = 0;
        for &thread in order {
            if thread == 2 {
                changes[changed](&states, &mut model);
                changed += 1;
            } else {
                seekers[thread].step(&states, &hint, &model);
            }
        }
        runs += 1;
    });
    assert_eq!(runs, 420_420);
}

fn change(states: &ExtentStates, model: &mut Model, part: FileRange, set: StateBits) {
    let clear = StateBits::DELALLOC.without(set);
    let conversion = Conversion { set, clear };
    assert_eq!(states.convert(part, conversion), model.convert(part, conversion));
}

impl Seeker {
    fn step(&mut self, states: &ExtentStates, hint: &CachedState, model: &Model) {
        match self.turn {
            0 => self.loaded = hint.load(),
            1 => {
                let query = self.queries[self.done];
                let counted = states.count_from(query, self.loaded, Some(hint));
                assert_eq!(counted.map(|(counted, _)| counted), model.count(query));
                self.found = counted.map(|(_, place)| place);
            }
            _ => {
                if let Some(place) = self.found {
                    hint.store(place);
                }
                self.done += 1;
            }
        }
        self.turn = (self.turn + 1) % 3;
    }
}

/// Calls `run` with each order of so many steps of each thread.
fn orders(schedule: &mut Vec<usize>, left: [usize; 3], run: &mut impl FnMut(&[usize])) {
    if left == [0; 3] {
        run(schedule);
        return;
    }
    for thread in 0..3 {
        let mut left = left;
        let Some(less) = left[thread].checked_sub(1) else { continue };
        left[thread] = less;
        schedule.push(thread);
        orders(schedule, left, run);
        schedule.pop();
    }
}
