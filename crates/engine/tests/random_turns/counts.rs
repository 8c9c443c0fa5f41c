//! What was tried and what was done.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;

use crate::operation::Operation;

/// With fewer rounds than that, more may fail.
const ROUNDS_FIRST: u64 = 5;
/// With so many rounds, each kind of operation has to have been done.
const ROUNDS_COUNTED_MIN: u64 = 80;

/// What a side tried and did, by kind.
#[derive(Default, Debug)]
pub struct Counts {
    tried: BTreeMap<&'static str, u64>,
    done: BTreeMap<&'static str, u64>,
    pub without_space: u64,
}

impl Counts {
    pub fn count<E>(&mut self, operation: &Operation, result: &Result<(), E>, is_for_space: bool) {
        *self.tried.entry(operation.kind()).or_default() += 1;
        *self.done.entry(operation.kind()).or_default() += u64::from(result.is_ok());
        self.without_space += u64::from(is_for_space);
    }

    /// How many of a kind were done.
    pub fn done(&self, kind: &str) -> u64 {
        self.done.get(kind).copied().unwrap_or(0)
    }

    pub fn totals(&self) -> (u64, u64) {
        (self.done.values().sum(), self.tried.values().sum())
    }

    pub fn print(&self, side: &str) {
        let (done, tried) = self.totals();
        println!("{side}: {done} done of {tried} tried, {} without space", self.without_space);
        for (kind, tried) in &self.tried {
            println!("  {kind}: {} of {tried}", self.done[kind]);
        }
    }

    /// Whether enough was done for the run to say anything.
    pub fn assert_enough(&self, side: &str, rounds: u64) {
        let (done, tried) = self.totals();
        // At first there is little to do anything to.
        let part = if rounds < ROUNDS_FIRST { 3 } else { 2 };
        assert!(done > tried / part, "{side} did {done} of {tried}");
        if rounds < ROUNDS_COUNTED_MIN {
            return;
        }
        for kind in Operation::KINDS {
            let of = |counts: &BTreeMap<_, u64>| counts.get(kind).copied().unwrap_or(0);
            let (done, tried) = (of(&self.done), of(&self.tried));
            assert!(done >= 5 && done >= tried / 8, "{side}: {kind}: {done} of {tried}");
        }
    }
}

/// What was done in the last turns, told if one fails.
#[derive(Default, Debug)]
pub struct Journal {
    turns: VecDeque<Vec<String>>,
}

impl Journal {
    /// How many are kept: what one turn did is found in the next.
    const TURNS_KEPT: usize = 3;

    pub fn begin(&mut self, turn: &str) {
        self.turns.push_back(vec![turn.to_owned()]);
        if self.turns.len() > Self::TURNS_KEPT {
            self.turns.pop_front();
        }
    }

    pub fn note(&mut self, operation: &Operation, result: &Result<(), impl Debug>) {
        let turn = self.turns.back_mut().expect("a turn has begun");
        turn.push(format!("{operation:?}: {result:?}"));
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.turns.iter().flatten().for_each(|line| println!("{line}"));
        }
    }
}
