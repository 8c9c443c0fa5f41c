//! The last mapping that an open file was told, for threads that share it, without a lock: a seek may take no longer than a few
//! tens of nanoseconds.
//!
//! A version is odd while somebody stores. Who loads takes the words between two looks at it; if both are the same and even, the
//! words are of one store. Words are stored with release and loaded with acquire, so that who sees a word of a store sees its odd
//! version, too.

use ubtrfs_rt::{AtomicU64, Ordering};

use crate::mapping::{Cookie, Mapping, MappingFlags, MappingKind};
use crate::offset::{FileOffset, FileRange};

const WORDS: usize = 6;

/// Kinds, by what stands for them; 0 is no mapping.
const KINDS: [MappingKind; 5] = [
    MappingKind::Hole,
    MappingKind::Delalloc,
    MappingKind::Mapped,
    MappingKind::Unwritten,
    MappingKind::Inline,
];
const KIND_MASK: u64 = 0xff;
const SHARED: u64 = 1 << 8;
const ENCODED: u64 = 1 << 9;
const NEW: u64 = 1 << 10;
const ADDRESS: u64 = 1 << 11;

/// A mapping, or none.
#[derive(Debug, Default)]
pub(crate) struct MappingCache {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl MappingCache {
    /// The mapping stored last; `None` if there is none, or one is being stored.
    pub(crate) fn load(&self) -> Option<Mapping> {
        let version = self.version.load(Ordering::Acquire);
        let words = self.words.each_ref().map(|word| word.load(Ordering::Acquire));
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        if is_whole { from_words(&words) } else { None }
    }

    /// Stores a mapping, unless somebody else is at it.
    pub(crate) fn store(&self, mapping: &Mapping) {
        let version = self.version.load(Ordering::Relaxed);
        let begins = version.is_multiple_of(2)
            && self
                .version
                .compare_exchange(version, version + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !begins {
            return;
        }
        for (word, value) in self.words.iter().zip(to_words(mapping)) {
            word.store(value, Ordering::Release);
        }
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

fn to_words(mapping: &Mapping) -> [u64; WORDS] {
    let kind = (1..).zip(KINDS).find(|(_, kind)| *kind == mapping.kind).map_or(0, |(at, _)| at);
    let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    let kind_and_flags = kind
        | flag(mapping.flags.is_shared, SHARED)
        | flag(mapping.flags.is_encoded, ENCODED)
        | flag(mapping.flags.is_new, NEW)
        | flag(mapping.address.is_some(), ADDRESS);
    [
        kind_and_flags,
        mapping.range.start.bytes(),
        mapping.range.end.bytes(),
        mapping.cookie.to_word(),
        mapping.address.unwrap_or(0),
        mapping.token,
    ]
}

fn from_words(words: &[u64; WORDS]) -> Option<Mapping> {
    let [kind_and_flags, start, end, cookie, address, token] = *words;
    let kind = usize::try_from(kind_and_flags & KIND_MASK).ok()?.checked_sub(1)?;
    Some(Mapping {
        range: FileRange::new(FileOffset::new(start), FileOffset::new(end)),
        kind: *KINDS.get(kind)?,
        flags: MappingFlags {
            is_shared: kind_and_flags & SHARED != 0,
            is_encoded: kind_and_flags & ENCODED != 0,
            is_new: kind_and_flags & NEW != 0,
        },
        cookie: Cookie::from_word(cookie),
        address: (kind_and_flags & ADDRESS != 0).then_some(address),
        token,
    })
}

#[cfg(test)]
mod tests {
    use ubtrfs_rt::AtomicBool;

    use super::*;

    fn mapping(number: u64) -> Mapping {
        let flags = MappingFlags {
            is_shared: number & 1 != 0,
            is_encoded: number & 2 != 0,
            is_new: number & 4 != 0,
        };
        Mapping {
            range: FileRange::with_len(FileOffset::new(number * 10), number + 1),
            kind: KINDS[usize::try_from(number % 5).unwrap()],
            flags,
            cookie: Cookie::from_word(number),
            address: (!number.is_multiple_of(3)).then_some(number),
            token: number,
        }
    }

    #[test]
    fn mapping_stored_and_loaded_is_the_same() {
        let cache = MappingCache::default();
        assert_eq!(cache.load(), None);
        for number in 0..200 {
            cache.store(&mapping(number));
            assert_eq!(cache.load(), Some(mapping(number)));
        }
    }

    /// Somebody stops in the middle of a store: nobody sees the words so far, and nobody else stores.
    #[test]
    fn mapping_half_stored_is_none() {
        let cache = MappingCache::default();
        cache.store(&mapping(1));
        cache.version.fetch_add(1, Ordering::Relaxed);
        cache.words[1].store(0, Ordering::Relaxed);
        assert_eq!(cache.load(), None);
        cache.store(&mapping(2));
        assert_eq!(cache.load(), None);
        cache.words[1].store(10, Ordering::Relaxed);
        cache.version.fetch_add(1, Ordering::Relaxed);
        assert_eq!(cache.load(), Some(mapping(1)));
    }

    /// Words of two stores never come as one mapping.
    #[test]
    fn mapping_loaded_while_threads_store_is_one_that_was_stored() {
        let cache = MappingCache::default();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (cache, is_done) = (&cache, &is_done);
                scope.spawn(move || {
                    let mut number = thread;
                    while !is_done.load(Ordering::Relaxed) {
                        cache.store(&mapping(number));
                        number = (number + 2) % 1_000_000;
                    }
                });
            }
            let torn = (0..300_000).filter_map(|_| cache.load()).find(|loaded| {
                let stored = mapping(loaded.token);
                *loaded != stored
            });
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(torn, None);
        });
    }
}
