//! The states that a power cut may leave, one after the other.

use std::sync::Arc;

use super::image::Image;
use super::{SECTOR_BYTES, SimDevice, is_superblock};
use crate::Prng;

/// What a device was asked for that changes what it holds.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Write { at: u64, bytes: Arc<[u8]> },
    Flush,
}

impl Event {
    fn apply(&self, image: &mut Image) {
        if let Self::Write { at, bytes } = self {
            image.write(*at, bytes);
        }
    }

    fn is_flush(&self) -> bool {
        matches!(self, Self::Flush)
    }
}

/// Writes and flushes in their order, and what was there before them.
#[derive(Clone, Debug)]
pub struct Recording {
    base: Image,
    now: Image,
    log: Vec<Event>,
}

impl Recording {
    pub(super) fn new(base: Image) -> Self {
        Self { now: base.clone(), base, log: Vec::new() }
    }

    pub(super) fn now(&self) -> &Image {
        &self.now
    }

    pub(super) fn push(&mut self, event: Event) {
        event.apply(&mut self.now);
        self.log.push(event);
    }

    /// How many writes and flushes there were: a cut may come before the first, and after each.
    pub fn event_count(&self) -> usize {
        self.log.len()
    }

    /// How many flushes there were.
    pub fn flush_count(&self) -> usize {
        self.log.iter().filter(|event| event.is_flush()).count()
    }

    /// What was there before the first of them.
    pub fn base(&self) -> &Image {
        &self.base
    }

    /// The state when the first `events` arrived, and no more.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn cut_after(&self, events: usize) -> SimDevice {
        let mut image = self.base.clone();
        self.log[..events].iter().for_each(|event| event.apply(&mut image));
        SimDevice::of_image(image)
    }

    /// A state when the power went after `events`: what came before the last flush arrived, and of
    /// what came after it a part that chance chooses.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn torn_after(&self, events: usize, prng: &mut Prng) -> SimDevice {
        let before = &self.log[..events];
        let durable = before.iter().rposition(Event::is_flush).map_or(0, |at| at + 1);
        let mut image = self.base.clone();
        before[..durable].iter().for_each(|event| event.apply(&mut image));
        lose_some(&before[durable..], &mut image, prng);
        SimDevice::of_image(image)
    }

    /// The states that a cut may leave, as many as the plan says, in the order of their cuts.
    pub fn states(self, plan: CrashPlan, prng: Prng) -> CrashStates {
        let image = self.base.clone();
        CrashStates {
            durable: image.clone(),
            arrived: image,
            window: 0,
            next: 0,
            queue: Vec::new(),
            log: self.log,
            plan,
            prng,
        }
    }
}

/// Applies a part of what was not flushed: of each write everything, nothing or some sectors.
/// Some cuts lose almost nothing, some almost all.
fn lose_some(unflushed: &[Event], image: &mut Image, prng: &mut Prng) {
    let chance = prng.below(101);
    for event in unflushed {
        let Event::Write { at, bytes } = event else { continue };
        if is_superblock(*at, bytes.len()) || !prng.chance(1, 3) {
            if prng.chance(chance, 100) {
                image.write(*at, bytes);
            }
            continue;
        }
        let (mut offset, mut rest) = (*at, &bytes[..]);
        while !rest.is_empty() {
            let len = (SECTOR_BYTES - inside_sector(offset)).min(rest.len());
            let (sector, others) = rest.split_at(len);
            if prng.chance(chance, 100) {
                image.write(offset, sector);
            }
            offset += u64::try_from(len).expect("a length fits");
            rest = others;
        }
    }
}

fn inside_sector(offset: u64) -> usize {
    let sector = u64::try_from(SECTOR_BYTES).expect("a constant fits");
    usize::try_from(offset % sector).expect("less than a sector")
}

/// How many states are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashPlan {
    /// One in so many writes is followed by a cut at which all before it had arrived; 1 for all.
    pub prefix_one_in: u64,
    /// Cuts in each window between flushes at which a part of the window's writes was lost or torn.
    pub torn_per_window: usize,
}

/// In which way the power went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CrashKind {
    /// Everything up to a write had arrived, and no more.
    Prefix,
    /// Of what was not flushed, a part was lost or torn.
    Torn,
}

/// The device as the power comes back.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// What it holds.
    pub image: Image,
    /// How many writes and flushes came before the cut.
    pub cut_after: usize,
    /// Which of them arrived.
    pub kind: CrashKind,
}

/// States in the order of their cuts, see [`Recording::states`]. Each costs what it differs in from
/// the one before.
#[derive(Debug)]
pub struct CrashStates {
    log: Vec<Event>,
    /// What the flushes before `window` made durable.
    durable: Image,
    /// The same with everything before `next`.
    arrived: Image,
    window: usize,
    next: usize,
    queue: Vec<CrashState>,
    plan: CrashPlan,
    prng: Prng,
}

impl CrashStates {
    /// Takes the next event into account, and queues the states that a cut after it leaves.
    fn step(&mut self) -> bool {
        let Some(event) = self.log.get(self.next).cloned() else { return false };
        if self.next == self.window {
            self.queue_torn();
        }
        event.apply(&mut self.arrived);
        self.next += 1;
        if event.is_flush() {
            self.window = self.next;
            self.durable = self.arrived.clone();
            // A cut here leaves what a cut after the last write may.
            return true;
        }
        if self.prng.chance(1, self.plan.prefix_one_in) {
            let (image, cut_after) = (self.arrived.clone(), self.next);
            self.queue.push(CrashState { image, cut_after, kind: CrashKind::Prefix });
        }
        true
    }

    fn queue_torn(&mut self) {
        let rest = &self.log[self.window..];
        let len = rest.iter().position(Event::is_flush).unwrap_or(rest.len());
        if len == 0 {
            return;
        }
        for _ in 0..self.plan.torn_per_window {
            // Late cuts lose more.
            let cut = len - self.prng.index(len).min(self.prng.index(len));
            let mut image = self.durable.clone();
            lose_some(&rest[..cut], &mut image, &mut self.prng);
            let cut_after = self.window + cut;
            self.queue.push(CrashState { image, cut_after, kind: CrashKind::Torn });
        }
    }
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        while self.queue.is_empty() && self.step() {}
        self.queue.pop()
    }
}
