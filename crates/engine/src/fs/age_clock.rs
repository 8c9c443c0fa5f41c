//! By which clock data grows old in memory.

use ubtrfs_rt::{Mutex, Time};

/// The time of day, but for what it is set back by: that would keep what is dirty from becoming old. In milliseconds.
#[derive(Debug, Default)]
pub(super) struct AgeClock {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The time of day when it was asked last.
    then_ms: u64,
    age_ms: u64,
}

impl AgeClock {
    /// What it shows at a time of day; never less than before.
    pub(super) fn at(&self, now: Time) -> u64 {
        let seconds_ms = u64::try_from(now.sec).unwrap_or(0).saturating_mul(1000);
        let now_ms = seconds_ms.saturating_add(u64::from(now.nsec / 1_000_000));
        let mut state = self.state.lock();
        let gone_ms = now_ms.saturating_sub(state.then_ms);
        *state = State { then_ms: now_ms, age_ms: state.age_ms.saturating_add(gone_ms) };
        state.age_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_goes_on_after_the_time_of_day_was_set_back() {
        let clock = AgeClock::default();
        let at = |sec: i64| clock.at(Time { sec, nsec: 5_000_000 });
        let began = at(10_000);
        assert_eq!(at(10_002), began + 2000);
        // An hour earlier, as a user has said.
        assert_eq!(at(6400), began + 2000);
        assert_eq!(at(6430), began + 32_000);
    }
}
