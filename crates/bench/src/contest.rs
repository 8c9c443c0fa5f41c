//! Contestants that take turns at one job.

use std::time::Duration;

use crate::child::Usage;
use crate::error::Result;

/// One way of doing the job.
pub(crate) struct Contestant<'a, T = Usage> {
    pub(crate) name: String,
    pub(crate) run: Box<dyn FnMut() -> Result<T> + 'a>,
}

impl<'a, T> Contestant<'a, T> {
    pub(crate) fn new(name: impl Into<String>, run: impl FnMut() -> Result<T> + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// What came of a contestant, round by round.
#[derive(Clone, Debug)]
pub(crate) struct Series<T = Usage> {
    pub(crate) name: String,
    pub(crate) rounds: Vec<T>,
}

impl<T> Series<T> {
    /// The median of what `value` says of each round.
    pub(crate) fn median(&self, value: impl Fn(&T) -> f64) -> f64 {
        median(self.values(value))
    }

    /// What `value` says of each round.
    pub(crate) fn values(&self, value: impl Fn(&T) -> f64) -> Vec<f64> {
        self.rounds.iter().map(value).collect()
    }
}

impl Series {
    pub(crate) fn wall_s(&self) -> f64 {
        self.median(|usage| usage.wall.as_secs_f64())
    }

    pub(crate) fn cpu_s(&self) -> f64 {
        self.median(|usage| usage.cpu.as_secs_f64())
    }

    /// The most of all rounds.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.rounds.iter().map(|usage| usage.peak_bytes).max().unwrap_or(0)
    }

    /// Shortest and longest round.
    pub(crate) fn wall_range(&self) -> (Duration, Duration) {
        let walls = || self.rounds.iter().map(|usage| usage.wall);
        (walls().min().unwrap_or_default(), walls().max().unwrap_or_default())
    }
}

/// The smallest value; as [`largest_value`].
pub(crate) fn smallest_value(values: impl IntoIterator<Item = f64>) -> f64 {
    -largest_value(values.into_iter().map(|value| -value))
}

/// The largest value; NaN if one is, or there is none: what is missing must not pass for small.
pub(crate) fn largest_value(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
    values.into_iter().reduce(larger).unwrap_or(f64::NAN)
}

/// The middle value; of an even number, the mean of the middle two. NaN if one is, or there is none: what a round lacks is not known.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    if values.iter().any(|value| value.is_nan()) {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len().is_multiple_of(2)) {
        (Some(upper), true) => f64::midpoint(values[middle - 1], *upper),
        (Some(middle), false) => *middle,
        (None, _) => f64::NAN,
    }
}

/// Lets each contestant do the job once a round. Every second round goes backwards, and after two rounds another one begins, so that
/// none always runs on what the same other left behind.
///
/// # Errors
/// The first that fails.
pub(crate) fn alternate<T>(
    mut contestants: Vec<Contestant<'_, T>>,
    round_count: usize,
) -> Result<Vec<Series<T>>> {
    let mut series: Vec<Series<T>> = contestants
        .iter()
        .map(|contestant| Series { name: contestant.name.clone(), rounds: Vec::new() })
        .collect();
    for round in 0..round_count {
        for index in order(round, contestants.len()) {
            series[index].rounds.push((contestants[index].run)()?);
        }
    }
    Ok(series)
}

/// In which order so many contestants do the job in a round.
fn order(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).map(|turn| (round / 2 + turn) % count).collect();
    if !round.is_multiple_of(2) {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn median_of_an_odd_number_is_the_middle_one() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![3.0]), 3.0);
    }

    /// It was the lower one: of two rounds, the better.
    #[test]
    fn median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(vec![2.0, 1.0]), 1.5);
        assert_eq!(median(vec![40.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn values_of_which_one_is_missing_have_no_median_and_no_largest() {
        // Divisions give NaN of either sign, which sorts before or behind all else.
        for nan in [f64::NAN, -f64::NAN] {
            assert!(median(vec![1.0, nan, 2.0]).is_nan());
            for values in [[nan, 1.0, 2.0], [1.0, nan, 2.0], [1.0, 2.0, nan]] {
                assert!(largest_value(values).is_nan(), "{values:?}");
            }
        }
        assert!(median(Vec::new()).is_nan() && largest_value([]).is_nan());
        assert!(smallest_value([1.0, f64::NAN]).is_nan());
        assert_eq!(largest_value([1.0, 3.0, 2.0]), 3.0);
        assert_eq!(smallest_value([2.0, 1.0, 3.0]), 1.0);
    }

    #[test]
    fn contestants_take_turns_at_beginning() {
        let order = RefCell::new(String::new());
        let contestant = |name: &'static str| {
            let order = &order;
            Contestant::new(name, move || {
                order.borrow_mut().push_str(name);
                Ok(Usage::default())
            })
        };
        let series = alternate(vec![contestant("a"), contestant("b")], 3).unwrap();
        assert_eq!(*order.borrow(), "abbaba");
        assert_eq!(series[1].rounds.len(), 3);
    }

    /// Where only the beginning changed, b ran right behind a in all rounds but those that it began.
    #[test]
    fn contestants_run_behind_each_other_as_often() {
        const COUNT: usize = 3;
        let mut behind = [[0; COUNT]; COUNT];
        let mut first = [0; COUNT];
        for order in (0..2 * COUNT).map(|round| order(round, COUNT)) {
            first[order[0]] += 1;
            for pair in order.windows(2) {
                behind[pair[0]][pair[1]] += 1;
            }
        }
        assert_eq!(first, [2; COUNT]);
        assert_eq!(behind, [[0, 2, 2], [2, 0, 2], [2, 2, 0]]);
        assert!(order(3, 0).is_empty());
    }
}
