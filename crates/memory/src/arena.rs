//! Buffers, and the slabs they come from.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Deref, DerefMut};

use ubtrfs_rt::{Arc, Mutex, lock_brief};

use crate::slab::{Backing, RunMemory, SLAB_BYTES, Slab};
use crate::units::{RANK_WHOLE, order_of};

/// Slabs that an arena has before it takes memory for more than is touched: who needs little shall have little.
const FRUGAL_SLABS: usize = 8;

/// What an [`Arena`] may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaOptions {
    /// Bytes of all slabs. Beyond them buffers come from the allocator of the program.
    pub slab_bytes_max: u64,
    /// Bytes of slabs that are kept for the next buffers when nobody has any of them.
    pub free_bytes_max: u64,
    /// Whether the system is asked to back slabs by huge pages, once there are more than a few; else it is asked for all their pages
    /// at once then.
    pub has_huge_pages: bool,
}

/// Where buffers come from. A clone is the same arena. It is there until the last buffer is dropped.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    options: ArenaOptions,
    slabs: Mutex<Slabs>,
}

#[derive(Default)]
struct Slabs {
    /// In their places, which buffers name.
    places: Vec<Option<Slab>>,
    vacant: Vec<usize>,
    /// Slabs that are being made.
    promised: usize,
    /// Places by [`Slab::rank()`]. What has nothing free is in none.
    ranked: [BTreeSet<usize>; RANK_WHOLE + 1],
}

/// Bytes in memory, which belong to who has this.
pub struct Buffer(Memory);

enum Memory {
    Cut(Cut),
    Own(Box<[u8]>),
}

/// Of a slab.
struct Cut {
    arena: Arc<Inner>,
    place: usize,
    /// Until it is put back.
    memory: Option<RunMemory>,
}

impl Arena {
    /// An arena with no memory yet.
    pub fn new(options: ArenaOptions) -> Self {
        Self { inner: Arc::new(Inner { options, slabs: Mutex::new(Slabs::default()) }) }
    }

    /// A buffer that may hold anything.
    pub fn buffer(&self, len_bytes: usize) -> Buffer {
        self.take(len_bytes).0
    }

    /// A buffer of zeros.
    pub fn zeroed(&self, len_bytes: usize) -> Buffer {
        let (mut buffer, is_zero) = self.take(len_bytes);
        if !is_zero {
            buffer.fill(0);
        }
        buffer
    }

    /// A buffer that holds these bytes.
    pub fn copy_of(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.buffer(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Bytes of all slabs, of whose memory buffers may have little. What comes from the allocator is not in it.
    pub fn slab_bytes(&self) -> u64 {
        let slabs = lock_brief(&self.inner.slabs);
        bytes_of(slabs.count())
    }

    /// Also whether the buffer is zeros.
    fn take(&self, len_bytes: usize) -> (Buffer, bool) {
        let cut = order_of(len_bytes).and_then(|order| self.cut(order));
        cut.unwrap_or_else(|| (Buffer(Memory::Own(vec![0; len_bytes].into_boxed_slice())), true))
    }

    fn cut(&self, order: usize) -> Option<(Buffer, bool)> {
        let inner = &self.inner;
        let mut slabs = lock_brief(&inner.slabs);
        let place = match slabs.best(order) {
            Some(place) => place,
            None => {
                let backing = slabs.promise(&inner.options)?;
                drop(slabs);
                // Takes as long as its pages, for which nobody shall wait who finds what he needs.
                let slab = Slab::new(backing);
                slabs = lock_brief(&inner.slabs);
                slabs.add(slab)?
            }
        };
        let (memory, is_zero) = slabs.with(place, |slab| slab.take(order))??;
        let cut = Cut { arena: Arc::clone(inner), place, memory: Some(memory) };
        Some((Buffer(Memory::Cut(cut)), is_zero))
    }
}

impl Slabs {
    /// Also those that are being made.
    fn count(&self) -> usize {
        self.places.len() - self.vacant.len() + self.promised
    }

    /// The place of a slab that has such a run: of the one whose longest is the shortest, so that long ones stay.
    fn best(&self, order: usize) -> Option<usize> {
        self.ranked[order..].iter().find_map(|places| places.first().copied())
    }

    /// How one more slab is to be made, if there may be one.
    fn promise(&mut self, options: &ArenaOptions) -> Option<Backing> {
        if bytes_of(self.count() + 1) > options.slab_bytes_max {
            return None;
        }
        let backing = match self.count() {
            ..FRUGAL_SLABS => Backing::AsTouched,
            _ if options.has_huge_pages => Backing::HugePage,
            _ => Backing::AtOnce,
        };
        self.promised += 1;
        Some(backing)
    }

    /// Takes in a slab that was promised, if it could be made.
    fn add(&mut self, slab: Option<Slab>) -> Option<usize> {
        self.promised -= 1;
        let slab = slab?;
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(slab);
        self.ranked[RANK_WHOLE].insert(place);
        Some(place)
    }

    /// Changes what is free of a slab.
    fn with<T>(&mut self, place: usize, change: impl FnOnce(&mut Slab) -> T) -> Option<T> {
        let slab = self.places[place].as_mut()?;
        let before = slab.rank();
        let result = change(slab);
        let after = slab.rank();
        if before != after {
            if let Some(rank) = before {
                self.ranked[rank].remove(&place);
            }
            if let Some(rank) = after {
                self.ranked[rank].insert(place);
            }
        }
        Some(result)
    }

    /// Takes out a slab that nobody has any of, where more of them are free than may be.
    fn surplus(&mut self, options: &ArenaOptions) -> Option<Slab> {
        let whole = &mut self.ranked[RANK_WHOLE];
        if bytes_of(whole.len()) <= options.free_bytes_max {
            return None;
        }
        let place = whole.pop_last()?;
        self.vacant.push(place);
        self.places[place].take()
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // To be unmapped with nobody waiting.
        let _surplus = {
            let mut slabs = lock_brief(&self.arena.slabs);
            slabs.with(self.place, |slab| slab.put_back(memory));
            slabs.surplus(&self.arena.options)
        };
    }
}

/// A copy, from the same arena.
impl Clone for Buffer {
    fn clone(&self) -> Self {
        match &self.0 {
            Memory::Cut(cut) => Arena { inner: Arc::clone(&cut.arena) }.copy_of(self),
            Memory::Own(bytes) => Self(Memory::Own(bytes.clone())),
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Cut(cut) => cut.memory.as_ref().map_or(&[], RunMemory::bytes),
            Memory::Own(bytes) => bytes,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Cut(cut) => cut.memory.as_mut().map_or(&mut [], RunMemory::bytes_mut),
            Memory::Own(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = if matches!(self.0, Memory::Cut(_)) { "slab" } else { "allocator" };
        write!(formatter, "Buffer({} bytes, {from})", self.len())
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Arena")
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

fn bytes_of(slabs: usize) -> u64 {
    u64::try_from(slabs * SLAB_BYTES).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn arena(slab_bytes_max: u64, free_bytes_max: u64) -> Arena {
        Arena::new(ArenaOptions { slab_bytes_max, free_bytes_max, has_huge_pages: false })
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take { len_bytes: usize, is_zeroed: bool },
        Drop { at: usize },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let lengths = prop_oneof![
            4 => (0_usize..7).prop_map(|order| 4096 << order),
            1 => 0_usize..600_000,
        ];
        prop::collection::vec(
            prop_oneof![
                3 => (lengths, any::<bool>()).prop_map(|(len_bytes, is_zeroed)| Step::Take { len_bytes, is_zeroed }),
                2 => any::<usize>().prop_map(|at| Step::Drop { at }),
            ],
            0..300,
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Nobody sees or changes the memory of another, zeros are zeros, and limits hold.
        #[test]
        fn each_buffer_has_memory_of_its_own(steps in steps(), slabs_max in 0_u64..12) {
            let arena = arena(slabs_max * 2 * MIB, 2 * MIB);
            let mut buffers: Vec<(u8, Buffer)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Take { len_bytes, is_zeroed } => {
                        let mut buffer = if is_zeroed { arena.zeroed(len_bytes) } else { arena.buffer(len_bytes) };
                        prop_assert_eq!(buffer.len(), len_bytes);
                        prop_assert!(!is_zeroed || buffer.iter().all(|byte| *byte == 0));
                        let mark = u8::try_from(number % 255).unwrap() + 1;
                        buffer.fill(mark);
                        buffers.push((mark, buffer));
                    }
                    Step::Drop { at } if !buffers.is_empty() => {
                        let (mark, buffer) = buffers.swap_remove(at % buffers.len());
                        prop_assert!(buffer.iter().all(|byte| *byte == mark));
                    }
                    Step::Drop { .. } => {}
                }
                prop_assert!(arena.slab_bytes() <= slabs_max * 2 * MIB);
            }
            for (mark, buffer) in buffers {
                prop_assert!(buffer.iter().all(|byte| *byte == mark));
            }
            prop_assert!(arena.slab_bytes() <= 2 * MIB, "what is free is given back");
        }
    }

    #[test]
    fn buffers_are_cut_from_as_few_slabs_as_hold_them() {
        let arena = arena(64 * MIB, 0);
        let mut small: Vec<Buffer> = (0..1024).map(|_| arena.buffer(4096)).collect();
        assert_eq!(arena.slab_bytes(), 4 * MIB);
        // What goes makes room for what is as long, wherever it lay.
        let gone: Vec<Buffer> = small.drain(256..512).collect();
        drop(gone);
        let large: Vec<Buffer> = (0..8).map(|_| arena.buffer(128 << 10)).collect();
        assert_eq!(arena.slab_bytes(), 4 * MIB);
        assert_eq!(large.len(), 8);
        drop((small, large));
        assert_eq!(arena.slab_bytes(), 0);
    }

    #[test]
    fn what_no_slab_has_comes_from_the_allocator() {
        let full = arena(2 * MIB, 0);
        let one: Vec<Buffer> = (0..8).map(|_| full.buffer(256 << 10)).collect();
        let more = full.copy_of(&[7; 4096]);
        assert_eq!((full.slab_bytes(), one.len()), (2 * MIB, 8));
        assert!(matches!(more.0, Memory::Own(_)) && more.iter().all(|byte| *byte == 7));
        let none = arena(0, 0);
        assert!(matches!(none.zeroed(4096).0, Memory::Own(_)));
        for odd in [0, 1, 5000, 12288, 1 << 20] {
            let buffer = full.copy_of(&vec![3; odd]);
            assert!(matches!(buffer.0, Memory::Own(_)) && *buffer == vec![3; odd]);
        }
    }

    /// However the system gives it, it is memory.
    #[test]
    fn memory_of_many_slabs_is_zeros_at_first() {
        for has_huge_pages in [false, true] {
            let arena = Arena::new(ArenaOptions {
                slab_bytes_max: 32 * MIB,
                free_bytes_max: 0,
                has_huge_pages,
            });
            let mut all: Vec<Buffer> = (0..128).map(|_| arena.buffer(256 << 10)).collect();
            assert_eq!(arena.slab_bytes(), 32 * MIB);
            assert!(all.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)));
            all.iter_mut().for_each(|buffer| buffer.fill(1));
            drop(all);
            assert_eq!(arena.slab_bytes(), 0);
        }
    }

    #[test]
    fn a_buffer_is_there_when_its_arena_is_gone() {
        let arena = arena(8 * MIB, 8 * MIB);
        let mut buffer = arena.copy_of(&[9; 8192]);
        drop(arena);
        buffer[4096] = 1;
        assert!(buffer[..4096] == [9; 4096] && buffer[4096] == 1);
    }

    #[test]
    fn threads_take_and_drop_beside_each_other() {
        let arena = arena(16 * MIB, 2 * MIB);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for turn in 0..2000_usize {
                        let mut buffer = arena.zeroed(4096 << (turn % 6));
                        assert!(buffer.iter().all(|byte| *byte == 0));
                        buffer.fill(thread + 1);
                        kept.push(buffer);
                        if turn % 3 == 2 {
                            let gone = kept.swap_remove(turn * 7 % kept.len());
                            assert!(gone.iter().all(|byte| *byte == thread + 1));
                        }
                        kept.truncate(40);
                    }
                    for buffer in kept {
                        assert!(buffer.iter().all(|byte| *byte == thread + 1));
                    }
                });
            }
        });
        assert!(arena.slab_bytes() <= 2 * MIB);
    }
}
