//! Buffers, and the slabs they come from.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Deref, DerefMut};

use ubtrfs_rt::{Arc, Mutex, lock_brief};

use crate::slab::{Backing, RunMemory, SLAB_BYTES, Slab, Taken};
use crate::units::{RANK_WHOLE, Run, UNIT_BYTES, WORD_UNITS, order_of};

/// Slabs that an arena has before it takes memory for more than is touched: who needs little shall have little.
const FRUGAL_SLABS: usize = 8;

/// What an [`Arena`] may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaOptions {
    /// Address space of all slabs, in bytes. Beyond it buffers come from the allocator of the program.
    pub slab_bytes_max: u64,
    /// Bytes of slabs that are kept for the next buffers when nobody has any of them.
    pub free_bytes_max: u64,
    /// Bytes of memory that no buffer has, in slabs that are kept and in what is free of others. What is dropped beyond goes back to the
    /// system at once.
    pub idle_bytes_max: u64,
    /// Whether the system is asked to back slabs by huge pages, once there are more than a few; else it is asked for the pages of 256 KiB
    /// at a time then.
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
    /// The sum of [`Slab::idle()`].
    idle: usize,
    /// What it may grow by when the system was asked for what it is being asked for.
    pledged: usize,
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
    /// Until it is put back.
    memory: Option<RunMemory>,
}

impl Arena {
    /// An arena with no memory yet.
    pub fn new(mut options: ArenaOptions) -> Self {
        // The system gives and takes back whole pages, of which more than one buffer could have some.
        if !is_cut_by_pages_of(rustix::param::page_size()) {
            options.slab_bytes_max = 0;
        }
        Self { inner: Arc::new(Inner { options, slabs: Mutex::new(Slabs::default()) }) }
    }

    /// A buffer that may hold anything.
    pub fn buffer(&self, len_bytes: usize) -> Buffer {
        self.zeroed_or_not(len_bytes).0
    }

    /// A buffer of zeros.
    pub fn zeroed(&self, len_bytes: usize) -> Buffer {
        let (mut buffer, is_zero) = self.zeroed_or_not(len_bytes);
        if !is_zero {
            buffer.fill(0);
        }
        buffer
    }

    /// A buffer that holds these bytes.
    pub fn copy_of(&self, bytes: &[u8]) -> Buffer {
        match self.cut(bytes.len()) {
            Some((mut buffer, _)) => {
                ubtrfs_cpu::copy(&mut buffer, bytes);
                buffer
            }
            None => Buffer(Memory::Own(bytes.into())),
        }
    }

    /// Address space of all slabs, in bytes. What comes from the allocator is not in it.
    pub fn slab_bytes(&self) -> u64 {
        bytes_of(lock_brief(&self.inner.slabs).count())
    }

    /// Bytes of memory that no buffer has.
    pub fn idle_bytes(&self) -> u64 {
        lock_brief(&self.inner.slabs).idle_bytes()
    }

    /// Also whether the buffer is zeros.
    fn zeroed_or_not(&self, len_bytes: usize) -> (Buffer, bool) {
        let own = || (Buffer(Memory::Own(vec![0; len_bytes].into_boxed_slice())), true);
        self.cut(len_bytes).unwrap_or_else(own)
    }

    /// `None` where no slab has it; else also whether it is zeros.
    fn cut(&self, len_bytes: usize) -> Option<(Buffer, bool)> {
        let order = order_of(len_bytes)?;
        let inner = &self.inner;
        let mut slabs = lock_brief(&inner.slabs);
        if slabs.best(order).is_none() {
            let backing = slabs.promise(&inner.options)?;
            drop(slabs);
            // The system may have others to serve first, for whom nobody shall wait who finds what he needs.
            let slab = Slab::new(backing);
            slabs = lock_brief(&inner.slabs);
            slabs.add(slab);
        }
        // Which need not be the new one: others may have made some, too, or put something back.
        let Taken { memory, is_zero, bare } = slabs.take(order, &inner.options)?;
        drop(slabs);
        let cut = Cut { arena: Arc::clone(inner), memory: Some(memory) };
        if let (Some(bare), Some(memory)) = (bare, &cut.memory) {
            memory.populate(bare);
            if bare.is_word() {
                lock_brief(&inner.slabs).note_backed(memory.place(), bare);
            }
        }
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
            _ => Backing::ByRuns,
        };
        self.promised += 1;
        Some(backing)
    }

    /// Takes in a slab that was promised, if it could be made.
    fn add(&mut self, slab: Option<Slab>) {
        self.promised -= 1;
        let Some(slab) = slab else { return };
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.idle += slab.idle();
        self.places[place] = Some(slab);
        self.ranked[RANK_WHOLE].insert(place);
    }

    /// A run of the order, if a slab has one.
    fn take(&mut self, order: usize, options: &ArenaOptions) -> Option<Taken> {
        let place = self.best(order)?;
        let name = u32::try_from(place).ok()?;
        let may_idle = self.idle_bytes() + bytes_of_units(WORD_UNITS) <= options.idle_bytes_max;
        let taken = self.with(place, |slab| slab.take(order, name, may_idle))??;
        if taken.bare.is_some_and(Run::is_word) {
            self.pledged += WORD_UNITS;
        }
        Some(taken)
    }

    /// The system was asked for a word of units, of which a run is taken.
    fn note_backed(&mut self, place: u32, word: Run) {
        self.pledged -= WORD_UNITS;
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        self.with(place, |slab| slab.note_backed(word));
    }

    /// Changes what is free of a slab.
    fn with<T>(&mut self, place: usize, change: impl FnOnce(&mut Slab) -> T) -> Option<T> {
        let slab = self.places.get_mut(place)?.as_mut()?;
        let (rank_before, idle_before) = (slab.rank(), slab.idle());
        let result = change(slab);
        let rank = slab.rank();
        self.idle = self.idle - idle_before + slab.idle();
        if rank_before != rank {
            if let Some(rank) = rank_before {
                self.ranked[rank].remove(&place);
            }
            if let Some(rank) = rank {
                self.ranked[rank].insert(place);
            }
        }
        Some(result)
    }

    /// Also what is about to come.
    fn idle_bytes(&self) -> u64 {
        bytes_of_units(self.idle + self.pledged)
    }

    /// Takes out a slab that nobody has any of, where more of them are free than may be.
    fn surplus(&mut self, options: &ArenaOptions) -> Option<Slab> {
        let whole = &mut self.ranked[RANK_WHOLE];
        if bytes_of(whole.len()) <= options.free_bytes_max {
            return None;
        }
        let place = whole.pop_last()?;
        self.vacant.push(place);
        let slab = self.places[place].take()?;
        self.idle -= slab.idle();
        Some(slab)
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let Some(mut memory) = self.memory.take() else { return };
        let options = &self.arena.options;
        let place = usize::try_from(memory.place()).unwrap_or(usize::MAX);
        let len_bytes = u64::try_from(memory.len_bytes()).unwrap_or(u64::MAX);
        let mut slabs = lock_brief(&self.arena.slabs);
        let mut is_given_back = false;
        if slabs.idle_bytes() + len_bytes > options.idle_bytes_max {
            drop(slabs);
            is_given_back = memory.give_back();
            slabs = lock_brief(&self.arena.slabs);
        }
        slabs.with(place, |slab| slab.put_back(memory, is_given_back));
        let surplus = slabs.surplus(options);
        // To be unmapped with nobody waiting.
        drop(slabs);
        drop(surplus);
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

/// Whether units are whole pages.
fn is_cut_by_pages_of(page_bytes: usize) -> bool {
    page_bytes > 0 && UNIT_BYTES.is_multiple_of(page_bytes)
}

fn bytes_of_units(units: usize) -> u64 {
    u64::try_from(units * UNIT_BYTES).unwrap_or(u64::MAX)
}

fn bytes_of(slabs: usize) -> u64 {
    u64::try_from(slabs * SLAB_BYTES).unwrap_or(u64::MAX)
}

#[cfg(all(test, ubtrfs_explore))]
mod explore;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;
    use crate::units::RUN_BYTES_MAX;

    const MIB: u64 = 1 << 20;

    fn arena(slab_bytes_max: u64, free_bytes_max: u64) -> Arena {
        Arena::new(options(slab_bytes_max, free_bytes_max, 64 * MIB))
    }

    pub(super) fn options(
        slab_bytes_max: u64,
        free_bytes_max: u64,
        idle_bytes_max: u64,
    ) -> ArenaOptions {
        ArenaOptions { slab_bytes_max, free_bytes_max, idle_bytes_max, has_huge_pages: false }
    }

    /// An arena past the slabs whose pages come as they are touched, and what has those.
    pub(super) fn grown(options: ArenaOptions) -> (Arena, Vec<Buffer>) {
        let arena = Arena::new(options);
        let frugal = FRUGAL_SLABS * SLAB_BYTES / RUN_BYTES_MAX;
        let all = (0..frugal).map(|_| arena.buffer(RUN_BYTES_MAX)).collect();
        assert_eq!(arena.slab_bytes(), bytes_of(FRUGAL_SLABS));
        (arena, all)
    }

    /// Pages that the system has given memory for, of `len_bytes` at an address.
    fn resident_pages(address: usize, len_bytes: usize) -> usize {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; len_bytes / UNIT_BYTES * 8];
        pagemap.read_exact_at(&mut entries, (address / UNIT_BYTES * 8) as u64).unwrap();
        let is_there = |entry: &&[u8]| entry[7] & 0xc0 != 0;
        entries.chunks_exact(8).filter(is_there).count()
    }

    fn resident_pages_of<'a>(buffers: impl IntoIterator<Item = &'a Buffer>) -> usize {
        let slabs: BTreeSet<usize> =
            buffers.into_iter().map(|buffer| buffer.as_ptr().addr() / SLAB_BYTES).collect();
        slabs.iter().map(|slab| resident_pages(slab * SLAB_BYTES, SLAB_BYTES)).sum()
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
        fn each_buffer_has_memory_of_its_own(
            steps in steps(), slabs_max in 0_u64..12, idle_max in 0_u64..1 << 20, is_grown in any::<bool>(),
        ) {
            let frugal = if is_grown { FRUGAL_SLABS as u64 } else { 0 };
            let options = options((frugal + slabs_max) * 2 * MIB, 2 * MIB, idle_max);
            let (arena, first) = if is_grown { grown(options) } else { (Arena::new(options), Vec::new()) };
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
                prop_assert!(arena.slab_bytes() <= options.slab_bytes_max);
                prop_assert!(arena.idle_bytes() <= idle_max, "{} bytes idle", arena.idle_bytes());
                let slabs = lock_brief(&arena.inner.slabs);
                let sum: usize = slabs.places.iter().flatten().map(Slab::count_idle).sum();
                prop_assert_eq!((slabs.idle, slabs.pledged), (sum, 0));
            }
            for (mark, buffer) in buffers {
                prop_assert!(buffer.iter().all(|byte| *byte == mark));
            }
            drop(first);
            prop_assert!(arena.slab_bytes() <= 2 * MIB, "what is free is given back");
            prop_assert!(arena.idle_bytes() <= idle_max);
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
            let arena =
                Arena::new(ArenaOptions { has_huge_pages, ..options(32 * MIB, 0, 4 * MIB) });
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
    fn pages_come_by_words_beyond_the_first_slabs() {
        let few = arena(64 * MIB, 0);
        let untouched = few.buffer(4096);
        assert_eq!(resident_pages_of([&untouched]), 0, "who needs little has little");
        let (arena, first) = grown(options(64 * MIB, 0, MIB));
        assert_eq!(resident_pages_of(&first), 0);
        let one = arena.buffer(4096);
        assert_eq!((resident_pages_of([&one]), arena.idle_bytes()), (64, 63 * 4096));
        // What is there already is taken first.
        let more: Vec<Buffer> = (0..63).map(|_| arena.buffer(4096)).collect();
        assert_eq!((resident_pages_of([&one]), arena.idle_bytes()), (64, 0));
        drop(more);
        // Where no more may idle, no more comes than is asked for.
        let (frugal, first) = grown(options(64 * MIB, 0, MIB / 8));
        let two = [frugal.buffer(4096), frugal.buffer(16 << 10)];
        assert_eq!((resident_pages_of(&two), frugal.idle_bytes()), (5, 0));
        drop(first);
    }

    #[test]
    fn what_is_dropped_beyond_what_may_idle_goes_back_to_the_system() {
        let arena = Arena::new(options(64 * MIB, 64 * MIB, MIB));
        let mut all: Vec<Buffer> = (0..2048).map(|_| arena.copy_of(&[7; 4096])).collect();
        assert_eq!(resident_pages_of(&all), 2048);
        // A cache that keeps each 16th page, and takes longer ones, for which there is no room between those.
        let mut number = 0;
        all.retain(|_| {
            number += 1;
            number % 16 == 0
        });
        assert_eq!((all.len(), arena.idle_bytes()), (128, MIB));
        assert_eq!(resident_pages_of(&all), 128 + 256, "and the process has no more than that");
        all.extend((0..64).map(|_| arena.copy_of(&[8; 64 << 10])));
        assert!(all.iter().all(|buffer| matches!(buffer.0, Memory::Cut(_))));
        assert_eq!(resident_pages_of(&all), 128 + 256 + 1024);
        // What went back to the system is zeros, what idled is not.
        let again: Vec<Buffer> = (0..1920).map(|_| arena.buffer(4096)).collect();
        let is = |byte: u8| again.iter().filter(|buffer| ***buffer == [byte; 4096]).count();
        assert_eq!((is(7), is(0)), (256, 1664));
        drop((again, all));
        assert!(arena.idle_bytes() <= MIB);
    }

    #[test]
    fn slabs_are_few_mappings() {
        let arena = arena(1024 * MIB, 0);
        let all: Vec<Buffer> = (0..2048).map(|_| arena.buffer(RUN_BYTES_MAX)).collect();
        assert_eq!((all.len(), arena.slab_bytes()), (2048, 512 * MIB));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mappings = maps.lines().map(|line| {
            let (start, rest) = line.split_once('-').unwrap();
            let end = rest.split_once(' ').unwrap().0;
            let address = |hex| usize::from_str_radix(hex, 16).unwrap();
            address(start)..address(end)
        });
        let is_ours = |mapping: &std::ops::Range<usize>| {
            all.iter().any(|buffer| mapping.contains(&buffer.as_ptr().addr()))
        };
        let count = mappings.filter(is_ours).count();
        assert!((1..64).contains(&count), "{count} mappings for 256 slabs");
    }

    /// While the system is asked for a word of units another takes some of it, and gives them back: nobody counted those then.
    #[test]
    fn what_comes_while_it_is_given_back_is_counted() {
        let (arena, first) = grown(options(64 * MIB, 64 * MIB, MIB / 4));
        let mut slabs = lock_brief(&arena.inner.slabs);
        let backing = slabs.promise(&arena.inner.options).unwrap();
        slabs.add(Slab::new(backing));
        let one = slabs.take(0, &arena.inner.options).unwrap();
        let bare = one.bare.unwrap();
        assert!(bare.is_word());
        assert_eq!((slabs.idle, slabs.idle_bytes()), (0, MIB / 4));
        let mut two = slabs.take(5, &arena.inner.options).unwrap();
        assert!(!two.bare.unwrap().is_word(), "no more may idle");
        assert!(two.memory.give_back());
        let place = usize::try_from(two.memory.place()).unwrap();
        slabs.with(place, |slab| slab.put_back(two.memory, true)).unwrap();
        let (start, name) = (one.memory.bytes().as_ptr().addr(), one.memory.place());
        one.memory.populate(bare);
        slabs.note_backed(name, bare);
        assert_eq!((slabs.idle, slabs.pledged, resident_pages(start, RUN_BYTES_MAX)), (63, 0, 64));
        slabs.with(place, |slab| slab.put_back(one.memory, false)).unwrap();
        drop(slabs);
        drop(first);
    }

    /// One that idles is taken before one that would have to come anew, wherever it lies.
    #[test]
    fn what_has_memory_is_taken_first() {
        let arena = Arena::new(options(64 * MIB, 64 * MIB, 4096));
        let mut all: Vec<Buffer> = (0..3).map(|_| arena.copy_of(&[7; 4096])).collect();
        let idle = all.remove(1).as_ptr();
        drop(all.remove(0));
        let next = arena.buffer(4096);
        assert_eq!((next.as_ptr(), arena.idle_bytes()), (idle, 0));
    }

    #[test]
    fn slabs_are_for_pages_that_are_no_longer_than_units() {
        assert!(is_cut_by_pages_of(4096));
        for page_bytes in [0, 16 << 10, 64 << 10] {
            assert!(!is_cut_by_pages_of(page_bytes));
        }
    }

    /// Past the first slabs, where pages come by words and go back: at the end the process has no more than is counted.
    #[test]
    fn threads_have_no_more_memory_than_is_counted() {
        let (arena, first) = grown(options(64 * MIB, 64 * MIB, MIB));
        let kept = Mutex::new(Vec::<(u8, Buffer)>::new());
        std::thread::scope(|scope| {
            for thread in 1..5_u8 {
                let (arena, kept) = (&arena, &kept);
                scope.spawn(move || {
                    for turn in 0..3000_usize {
                        let mut buffer = arena.zeroed(4096 << (turn * 5 % 7));
                        assert!(buffer.iter().all(|byte| *byte == 0));
                        buffer.fill(thread);
                        let mut kept = kept.lock();
                        kept.push((thread, buffer));
                        if kept.len() > 60 {
                            let at = turn * 7 % 60;
                            let (thread, gone) = kept.swap_remove(at);
                            drop(kept);
                            assert!(gone.iter().all(|byte| *byte == thread));
                        }
                    }
                });
            }
        });
        drop(kept);
        let slabs = lock_brief(&arena.inner.slabs);
        let frugal: BTreeSet<usize> =
            first.iter().map(|buffer| buffer.as_ptr().addr() / SLAB_BYTES).collect();
        let others = slabs.places.iter().flatten().map(Slab::start_address);
        let resident: usize = others
            .filter(|start| !frugal.contains(&(start / SLAB_BYTES)))
            .map(|start| resident_pages(start, SLAB_BYTES))
            .sum();
        assert!(slabs.places.len() > FRUGAL_SLABS);
        assert!(resident <= slabs.idle, "{resident} of {}", slabs.idle);
        assert_eq!(slabs.pledged, 0);
        // Who populates a word and who drops a run do not wait for each other: a word or a run a thread more.
        assert!(bytes_of_units(slabs.idle) <= MIB + 4 * 256 * 1024, "{}", slabs.idle);
        drop(slabs);
    }

    #[test]
    fn a_slab_that_cannot_be_made_is_not_counted() {
        let arena = arena(2 * MIB, 0);
        {
            let mut slabs = lock_brief(&arena.inner.slabs);
            assert_eq!(slabs.promise(&arena.inner.options), Some(Backing::AsTouched));
            assert_eq!(slabs.promise(&arena.inner.options), None, "one is promised");
            slabs.add(None);
            assert_eq!(slabs.count(), 0);
        }
        assert!(matches!(arena.buffer(4096).0, Memory::Cut(_)));
    }

    /// Who drops a buffer need not be who took it, nor need the arena be there.
    #[test]
    fn threads_drop_what_others_took() {
        let (to_other, from_other) = std::sync::mpsc::sync_channel::<(u8, Buffer)>(16);
        std::thread::scope(|scope| {
            for thread in 1..4_u8 {
                let to_other = to_other.clone();
                scope.spawn(move || {
                    let arena = Arena::new(options(8 * MIB, 2 * MIB, MIB / 4));
                    for turn in 0..1000_usize {
                        let mut buffer = arena.zeroed(4096 << (turn % 7));
                        assert!(buffer.iter().all(|byte| *byte == 0));
                        buffer.fill(thread);
                        to_other.send((thread, buffer)).unwrap();
                    }
                });
            }
            drop(to_other);
            let mut kept = Vec::new();
            for (turn, (thread, buffer)) in from_other.into_iter().enumerate() {
                kept.push((thread, buffer));
                if kept.len() > 30 {
                    let (thread, gone) = kept.swap_remove(turn * 7 % 30);
                    assert!(gone.iter().all(|byte| *byte == thread));
                }
            }
            assert_eq!(kept.len(), 30);
        });
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
