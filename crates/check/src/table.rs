//! Lists and maps of small records in a [`Store`].

use std::hash::{BuildHasher, RandomState};

use ubtrfs_rt::{Arc, AtomicU64, Ordering};

use crate::hash;
use crate::store::Store;
use crate::view::number;

/// A list of records of `N` words.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    store: Arc<Store>,
    pages: Vec<usize>,
    /// The first word of each page.
    firsts: Vec<u64>,
    len: usize,
}

impl<const N: usize> Drop for Table<N> {
    fn drop(&mut self) {
        self.clear();
    }
}

fn load<const N: usize>(words: &[AtomicU64]) -> [u64; N] {
    std::array::from_fn(|index| words.get(index).map_or(0, |word| word.load(Ordering::Relaxed)))
}

fn save<const N: usize>(words: &[AtomicU64], record: &[u64; N]) {
    for (word, value) in words.iter().zip(record) {
        word.store(*value, Ordering::Relaxed);
    }
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(store: &Arc<Store>) -> Self {
        Self { store: store.clone(), pages: Vec::new(), firsts: Vec::new(), len: 0 }
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn clear(&mut self) {
        if !self.pages.is_empty() {
            self.store.release(&self.pages);
        }
        self.pages.clear();
        self.firsts.clear();
        self.len = 0;
    }

    fn per_page(&self) -> usize {
        self.store.page_words() / N
    }

    /// The page of a record and where it begins there.
    fn place(&self, index: usize) -> (usize, usize) {
        assert!(index < self.len, "a record that was never pushed");
        let per_page = self.per_page();
        (self.pages[index / per_page], index % per_page * N)
    }

    pub(crate) fn push(&mut self, record: [u64; N]) {
        if self.len == self.pages.len() * self.per_page() {
            self.pages.push(self.store.allocate());
            self.firsts.push(record[0]);
        }
        self.len += 1;
        let (page, at) = self.place(self.len - 1);
        self.store.change(page, |words| save(&words[at..], &record));
    }

    pub(crate) fn get(&self, index: usize) -> [u64; N] {
        let (page, at) = self.place(index);
        self.store.read(page, |words| load(&words[at..at + N]))
    }

    pub(crate) fn set(&mut self, index: usize, record: [u64; N]) {
        let (page, at) = self.place(index);
        if at == 0 {
            let number = index / self.per_page();
            self.firsts[number] = record[0];
        }
        self.store.change(page, |words| save(&words[at..], &record));
    }

    /// Adds to a word of a record other than its first, beside other threads.
    pub(crate) fn add(&self, index: usize, word: usize, value: u64) {
        debug_assert!((1..N).contains(&word));
        let (page, at) = self.place(index);
        self.store.change(page, |words| words[at + word].fetch_add(value, Ordering::Relaxed));
    }

    pub(crate) fn last(&self) -> Option<[u64; N]> {
        Some(self.get(self.len.checked_sub(1)?))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = [u64; N]> {
        self.iter_from(0)
    }

    pub(crate) fn iter_from(&self, start: usize) -> impl Iterator<Item = [u64; N]> {
        (start..self.len).map(|index| self.get(index))
    }

    /// How many records have a first word below `bound`, where they are in the order of that.
    pub(crate) fn count_below(&self, bound: u64) -> usize {
        // In the page before the first one that begins at or behind it.
        let Some(page) = self.firsts.partition_point(|first| *first < bound).checked_sub(1) else {
            return 0;
        };
        let before = page * self.per_page();
        let count = (self.len - before).min(self.per_page());
        self.store.read(self.pages[page], |words| {
            let (mut low, mut high) = (0, count);
            while low < high {
                let middle = low + (high - low) / 2;
                if words[middle * N].load(Ordering::Relaxed) < bound {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            before + low
        })
    }

    /// How many have one of at most `bound`.
    pub(crate) fn count_up_to(&self, bound: u64) -> usize {
        bound.checked_add(1).map_or(self.len, |bound| self.count_below(bound))
    }

    /// The first record with that first word, where they are in the order of that.
    pub(crate) fn find(&self, first: u64) -> Option<usize> {
        let index = self.count_below(first);
        (index < self.len && self.get(index)[0] == first).then_some(index)
    }

    pub(crate) fn is_sorted_by<K: Ord>(&self, key: impl Fn(&[u64; N]) -> K) -> bool {
        self.iter().is_sorted_by_key(|record| key(&record))
    }

    /// Sorts, unless it is in order; equal ones keep their order.
    pub(crate) fn sort_by<K: Ord>(&mut self, key: impl Fn(&[u64; N]) -> K) {
        if self.is_sorted_by(&key) {
            return;
        }
        let per_page = self.per_page();
        for start in (0..self.len).step_by(per_page) {
            let end = self.len.min(start + per_page);
            let mut records: Vec<[u64; N]> = (start..end).map(|index| self.get(index)).collect();
            records.sort_by_key(&key);
            for (index, record) in (start..).zip(records) {
                self.set(index, record);
            }
        }
        let mut width = per_page;
        while width < self.len {
            let mut merged = Self::new(&self.store);
            for start in (0..self.len).step_by(2 * width) {
                self.merge(start, width, &key, &mut merged);
            }
            *self = merged;
            width *= 2;
        }
    }

    /// Merges two neighbouring parts that are in order.
    fn merge<K: Ord>(
        &self,
        start: usize,
        width: usize,
        key: impl Fn(&[u64; N]) -> K,
        to: &mut Self,
    ) {
        let middle = self.len.min(start + width);
        let end = self.len.min(middle + width);
        let mut left = (start..middle).map(|index| self.get(index)).peekable();
        let mut right = (middle..end).map(|index| self.get(index)).peekable();
        loop {
            let next = match (left.peek(), right.peek()) {
                (Some(a), Some(b)) if key(b) < key(a) => right.next(),
                (Some(_), _) => left.next(),
                (None, _) => right.next(),
            };
            let Some(next) = next else { return };
            to.push(next);
        }
    }
}

/// Addresses lie in the page that all of a part of this length have.
const PART_BITS: u32 = 18;

/// A map from addresses, or anything else of 64 bits, to numbers.
#[derive(Debug)]
pub(crate) struct Index {
    /// Key, and number + 1; 0 where there is none.
    slots: Table<2>,
    len: usize,
    /// Where keys go whose page is full is not to be foretold by who makes an image.
    seed: u64,
}

enum Probed {
    Found(u64),
    Empty(usize),
    Full,
}

impl Index {
    pub(crate) fn new(store: &Arc<Store>) -> Self {
        Self { slots: Table::new(store), len: 0, seed: RandomState::new().hash_one(0_u64) }
    }

    pub(crate) fn get(&self, key: u64) -> Option<usize> {
        match self.probe(key) {
            Ok((_, value)) => usize::try_from(value).ok(),
            Err(_) => None,
        }
    }

    /// Adds a key that is not there yet.
    pub(crate) fn insert(&mut self, key: u64, value: usize) {
        if (self.len + 1) * 8 > self.slots.len() * 5 {
            self.grow();
        }
        if let Err(slot) = self.probe(key) {
            self.slots.set(slot, [key, number(value).saturating_add(1)]);
            self.len += 1;
        }
    }

    /// The slot of a key and its number, or the slot where it would come.
    fn probe(&self, key: u64) -> Result<(usize, u64), usize> {
        let (pages, per_page) = (self.slots.pages.len(), self.slots.per_page());
        if pages == 0 {
            return Err(0);
        }
        let index_of = |value: u64| usize::try_from(value & 0xFFFF_FFFF).unwrap_or(0);
        let home = index_of(hash::of_numbers([key >> PART_BITS])) % pages;
        let start = index_of(hash::of_numbers([key])) % per_page;
        // Of a part that fills its page the keys go to all pages: beside it they would pile up.
        let other = index_of(hash::of_numbers([key, self.seed])) % pages;
        for page in std::iter::once(home).chain((0..pages).map(|step| (other + step) % pages)) {
            let probed = self.slots.store.read(self.slots.pages[page], |words| {
                for slot in (start..per_page).chain(0..start) {
                    let [found, value] = load(&words[slot * 2..slot * 2 + 2]);
                    if value == 0 {
                        return Probed::Empty(slot);
                    }
                    if found == key {
                        return Probed::Found(value - 1);
                    }
                }
                Probed::Full
            });
            match probed {
                Probed::Found(value) => return Ok((page, value)),
                Probed::Empty(slot) => return Err(page * per_page + slot),
                Probed::Full => {}
            }
        }
        // Not reached: a part of the slots is always empty.
        Err(0)
    }

    fn grow(&mut self) {
        let count = (self.slots.len() * 2).max(self.slots.per_page());
        let mut slots = Table::new(&self.slots.store);
        for _ in 0..count {
            slots.push([0, 0]);
        }
        let before = std::mem::replace(self, Self { slots, len: 0, seed: self.seed });
        for [key, value] in before.slots.iter() {
            if let Some(value) = value.checked_sub(1)
                && let Err(slot) = self.probe(key)
            {
                self.slots.set(slot, [key, value + 1]);
                self.len += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests;
