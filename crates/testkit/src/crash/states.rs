//! The states that a power cut may leave, one after the other.

use std::collections::VecDeque;
use std::sync::Arc;

use super::image::Image;
use super::{SECTOR_BYTES, SimArray, SimDevice, is_superblock};
use crate::Prng;

/// What a device was asked for that changes what it holds, or what of it is durable.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Write { at: u64, bytes: Arc<[u8]> },
    Resize { len_bytes: u64 },
    Flush,
}

impl Event {
    fn apply(&self, image: &mut Image) {
        match self {
            // A resize that was lost leaves no room for what was written behind it.
            Self::Write { at, bytes } => {
                let room = image.len_bytes().saturating_sub(*at);
                let fits = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
                image.write(*at, &bytes[..fits]);
            }
            Self::Resize { len_bytes } => image.resize(*len_bytes),
            Self::Flush => {}
        }
    }

    fn is_flush(&self) -> bool {
        matches!(self, Self::Flush)
    }

    /// How many sectors it can be cut into.
    fn sector_count(&self) -> usize {
        match self {
            Self::Write { at, bytes } if !is_superblock(*at, bytes.len()) => {
                (inside_sector(*at) + bytes.len()).div_ceil(SECTOR_BYTES)
            }
            _ => 1,
        }
    }

    /// Applies those of its sectors that `wanted` says, by number.
    fn apply_sectors(&self, image: &mut Image, mut wanted: impl FnMut(usize) -> bool) {
        let Self::Write { at, bytes } = self else { return };
        let (mut offset, mut rest) = (*at, &bytes[..]);
        for number in 0..self.sector_count() {
            let len = (SECTOR_BYTES - inside_sector(offset)).min(rest.len());
            let (sector, others) = rest.split_at(len);
            if wanted(number) {
                Self::Write { at: offset, bytes: Arc::from(sector) }.apply(image);
            }
            offset += u64::try_from(len).expect("a length fits");
            rest = others;
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Write { at, bytes }, Self::Write { at: other_at, bytes: others }) => {
                let end =
                    |at: u64, bytes: &[u8]| at + u64::try_from(bytes.len()).expect("a length fits");
                *at < end(*other_at, others) && *other_at < end(*at, bytes)
            }
            _ => true,
        }
    }
}

fn inside_sector(offset: u64) -> usize {
    let sector = u64::try_from(SECTOR_BYTES).expect("a constant fits");
    usize::try_from(offset % sector).expect("less than a sector")
}

/// An event, and the device that it came to.
#[derive(Clone, Debug)]
struct Entry {
    device: usize,
    event: Event,
}

/// Writes and flushes of an array in their order, and what was there before them.
#[derive(Clone, Debug)]
pub struct Recording {
    base: Vec<Image>,
    now: Vec<Image>,
    log: Vec<Entry>,
    /// Of each device.
    since_flush: Vec<SinceFlush>,
}

/// What came to a device since it was flushed last.
#[derive(Clone, Default, Debug)]
struct SinceFlush {
    /// Their places in the log.
    changes: Vec<usize>,
    /// Whether it was written what it holds, which is left out.
    was_idle: bool,
}

impl Recording {
    pub(super) fn new(base: Vec<Image>) -> Self {
        let since_flush = vec![SinceFlush::default(); base.len()];
        Self { now: base.clone(), base, log: Vec::new(), since_flush }
    }

    pub(super) fn now(&self) -> &[Image] {
        &self.now
    }

    /// What a device holds durably and is written once more is left out, with the flush that follows: it is the same before and after, wherever a
    /// cut comes.
    pub(super) fn push(&mut self, device: usize, event: Event) {
        let since_flush = &mut self.since_flush[device];
        let is_idle = match &event {
            Event::Write { at, bytes } => {
                let mut held = vec![0; bytes.len()];
                self.now[device].read(*at, &mut held);
                let is_durable = || {
                    !since_flush.changes.iter().any(|place| self.log[*place].event.overlaps(&event))
                };
                held[..] == bytes[..] && is_durable()
            }
            Event::Flush => since_flush.was_idle && since_flush.changes.is_empty(),
            Event::Resize { .. } => false,
        };
        match event {
            Event::Flush => *since_flush = SinceFlush::default(),
            _ if is_idle => since_flush.was_idle = true,
            _ => since_flush.changes.push(self.log.len()),
        }
        if is_idle {
            return;
        }
        event.apply(&mut self.now[device]);
        self.log.push(Entry { device, event });
    }

    /// How many writes and flushes there were: a cut may come before the first, and after each.
    pub fn event_count(&self) -> usize {
        self.log.len()
    }

    /// How many writes there were.
    pub(super) fn write_count(&self) -> usize {
        self.event_count() - self.flush_count()
    }

    /// How many flushes there were.
    pub fn flush_count(&self) -> usize {
        self.log.iter().filter(|entry| entry.event.is_flush()).count()
    }

    /// How many writes, and how many flushes there were.
    pub fn request_counts(&self) -> (usize, usize) {
        (self.write_count(), self.flush_count())
    }

    /// What was there before the first of them.
    pub fn base(&self) -> &[Image] {
        &self.base
    }

    /// The state of the only device when the first `events` arrived, and no more.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn cut_after(&self, events: usize) -> SimDevice {
        let mut images = self.base.clone();
        for Entry { device, event } in &self.log[..events] {
            event.apply(&mut images[*device]);
        }
        SimArray::of_images(images).device(0)
    }

    /// A state of the only device when the power went after `events`: what came before its last
    /// flush arrived, and of what came after it a part that chance chooses.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn torn_after(&self, events: usize, prng: &mut Prng) -> SimDevice {
        let mut window = Window::new(self.base.clone());
        for number in 0..events {
            window.take(&self.log, number);
        }
        SimArray::of_images(window.build(&self.log, Choice::Mixed, prng)).device(0)
    }

    /// The states that a cut may leave, as many as the plan says, in the order of their cuts.
    pub fn states(self, plan: CrashPlan, prng: Prng) -> CrashStates {
        CrashStates {
            window: Window::new(self.base),
            next: 0,
            is_fresh: false,
            queue: VecDeque::new(),
            log: self.log,
            plan,
            prng,
        }
    }
}

/// How many states are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashPlan {
    /// One in so many writes is followed by a cut at which all before it had arrived; 1 for all.
    pub prefix_one_in: u64,
    /// Cuts in each window between flushes at which a part of what was not flushed was lost or
    /// torn, about: of the systematic ones, which [`CrashKind`] names, chance chooses as many;
    /// `usize::MAX` for all of them.
    pub parts_per_window: usize,
    /// Cuts in each window at which chance says of each sector whether it arrived.
    pub mixed_per_window: usize,
}

impl CrashPlan {
    /// Every prefix, and every systematic part of each window, with so many mixed ones.
    pub fn all(mixed_per_window: usize) -> Self {
        Self { prefix_one_in: 1, parts_per_window: usize::MAX, mixed_per_window }
    }
}

/// In which way the power went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CrashKind {
    /// Everything up to a write had arrived, and no more.
    Prefix,
    /// Of a few writes that were not flushed, some had arrived: each set of them is one state.
    Subset,
    /// One write had not arrived, or all that was not flushed had not.
    Lost,
    /// One write had arrived, of those that were not flushed.
    Alone,
    /// One write had arrived up to a sector, or from one on; all others had, or none.
    Torn,
    /// Of each write, some or all or no sectors had arrived, as chance says.
    Mixed,
}

/// The devices as the power comes back.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// What they hold.
    pub images: Vec<Image>,
    /// How many writes and flushes came before the cut.
    pub cut_after: usize,
    /// Which of them arrived.
    pub kind: CrashKind,
}

/// What was written since the flushes.
#[derive(Debug)]
struct Window {
    /// What flushes made durable, of each device.
    durable: Vec<Image>,
    /// The same with everything since.
    arrived: Vec<Image>,
    /// What came since, by place in the log, in order.
    unflushed: Vec<usize>,
}

/// Which part of a window arrived. Numbers are places in its list of what was not flushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Choice {
    Prefix,
    /// A bit for each.
    Subset(u64),
    Nothing,
    Lost(usize),
    Alone(usize),
    Torn {
        number: usize,
        sector: usize,
        keeps_front: bool,
        keeps_others: bool,
    },
    Mixed,
}

/// Windows of so few writes are enumerated set by set.
const SUBSETS_MAX: usize = 5;

impl Window {
    fn new(base: Vec<Image>) -> Self {
        Self { durable: base.clone(), arrived: base, unflushed: Vec::new() }
    }

    fn take(&mut self, log: &[Entry], number: usize) {
        let Entry { device, event } = &log[number];
        if event.is_flush() {
            self.durable[*device] = self.arrived[*device].clone();
            self.unflushed.retain(|other| log[*other].device != *device);
        } else {
            event.apply(&mut self.arrived[*device]);
            self.unflushed.push(number);
        }
    }

    /// All choices but the mixed ones, and but that all arrived.
    fn choices(&self, log: &[Entry], prng: &mut Prng) -> Vec<Choice> {
        let count = self.unflushed.len();
        let mut choices = Vec::new();
        if count <= SUBSETS_MAX {
            choices.extend((0..(1 << count) - 1).map(Choice::Subset));
        } else {
            choices.push(Choice::Nothing);
            choices.extend((0..count).map(Choice::Lost));
            choices.extend((0..count).map(Choice::Alone));
        }
        for (number, place) in self.unflushed.iter().enumerate() {
            let sectors = log[*place].event.sector_count();
            if sectors < 2 {
                continue;
            }
            for keeps_front in [true, false] {
                let sector = 1 + prng.index(sectors - 1);
                let keeps_others = prng.chance(1, 2);
                choices.push(Choice::Torn { number, sector, keeps_front, keeps_others });
            }
        }
        choices
    }

    fn build(&self, log: &[Entry], choice: Choice, prng: &mut Prng) -> Vec<Image> {
        let event = |number: usize| &log[self.unflushed[number]];
        let apply = |entry: &Entry, images: &mut [Image]| {
            entry.event.apply(&mut images[entry.device]);
        };
        let mut images = self.durable.clone();
        match choice {
            Choice::Prefix => return self.arrived.clone(),
            Choice::Nothing => {}
            Choice::Subset(bits) => {
                let chosen = (0..self.unflushed.len()).filter(|number| bits >> number & 1 != 0);
                chosen.for_each(|number| apply(event(number), &mut images));
            }
            Choice::Alone(number) => apply(event(number), &mut images),
            Choice::Lost(number) => return self.without(log, number),
            Choice::Torn { number, sector, keeps_front, keeps_others } => {
                if keeps_others {
                    images = self.without(log, number);
                }
                let Entry { device, event } = event(number);
                event.apply_sectors(&mut images[*device], |at| (at < sector) == keeps_front);
            }
            Choice::Mixed => self.lose_some(log, &mut images, prng),
        }
        images
    }

    /// All that arrived, but one.
    fn without(&self, log: &[Entry], number: usize) -> Vec<Image> {
        let place = self.unflushed[number];
        let Entry { device, event: lost } = &log[place];
        let mut images = self.arrived.clone();
        let others = self.unflushed.iter().map(|place| (*place, &log[*place]));
        let others = others.filter(|(other, entry)| *other != place && entry.device == *device);
        let Event::Write { at, bytes } = lost else {
            images[*device] = self.durable[*device].clone();
            others.for_each(|(_, entry)| entry.event.apply(&mut images[*device]));
            return images;
        };
        images[*device].copy_range(&self.durable[*device], *at, bytes.len());
        // What others wrote there is as they left it.
        for (_, entry) in others.filter(|(_, entry)| entry.event.overlaps(lost)) {
            entry.event.apply(&mut images[*device]);
        }
        images
    }

    /// Applies a part of what was not flushed: of each write everything, nothing or some sectors.
    /// Some cuts lose almost nothing, some almost all.
    fn lose_some(&self, log: &[Entry], images: &mut [Image], prng: &mut Prng) {
        let chance = prng.below(101);
        for place in &self.unflushed {
            let Entry { device, event } = &log[*place];
            if event.sector_count() < 2 || !prng.chance(1, 3) {
                if prng.chance(chance, 100) {
                    event.apply(&mut images[*device]);
                }
                continue;
            }
            event.apply_sectors(&mut images[*device], |_| prng.chance(chance, 100));
        }
    }
}

impl Choice {
    fn kind(self) -> CrashKind {
        match self {
            Self::Prefix => CrashKind::Prefix,
            Self::Subset(_) => CrashKind::Subset,
            Self::Nothing | Self::Lost(_) => CrashKind::Lost,
            Self::Alone(_) => CrashKind::Alone,
            Self::Torn { .. } => CrashKind::Torn,
            Self::Mixed => CrashKind::Mixed,
        }
    }
}

/// States in the order of their cuts, see [`Recording::states`]. Each costs what it differs in from
/// the one before.
#[derive(Debug)]
pub struct CrashStates {
    log: Vec<Entry>,
    window: Window,
    next: usize,
    /// Whether there were writes since the parts of a window were last told.
    is_fresh: bool,
    queue: VecDeque<Choice>,
    plan: CrashPlan,
    prng: Prng,
}

impl CrashStates {
    /// Takes the next event into account, and queues what a cut behind it may leave; before a
    /// flush, and at the end, the parts of all that was not flushed. Earlier cuts of the window
    /// leave nothing else: what came after them may be lost, too.
    fn step(&mut self) -> bool {
        let is_flush = self.log.get(self.next).map(|entry| entry.event.is_flush());
        if self.is_fresh && is_flush != Some(false) {
            self.is_fresh = false;
            self.queue_parts();
            return true;
        }
        let Some(is_flush) = is_flush else { return false };
        self.window.take(&self.log, self.next);
        self.next += 1;
        // A cut behind a flush leaves what a cut before it may.
        if !is_flush {
            self.is_fresh = true;
            if self.prng.chance(1, self.plan.prefix_one_in.max(1)) {
                self.queue.push_back(Choice::Prefix);
            }
        }
        true
    }

    fn queue_parts(&mut self) {
        let parts = self.window.choices(&self.log, &mut self.prng);
        let (wanted, count) = (self.plan.parts_per_window, parts.len());
        for part in parts {
            if wanted >= count || self.prng.index(count) < wanted {
                self.queue.push_back(part);
            }
        }
        self.queue.extend(std::iter::repeat_n(Choice::Mixed, self.plan.mixed_per_window));
    }
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        while self.queue.is_empty() && self.step() {}
        let choice = self.queue.pop_front()?;
        let images = self.window.build(&self.log, choice, &mut self.prng);
        Some(CrashState { images, cut_after: self.next, kind: choice.kind() })
    }
}
