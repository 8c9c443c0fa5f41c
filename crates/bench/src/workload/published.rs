//! Before and after, as the changes that the experiments are of were published: those figures, of Linux on other machines, and what the mechanism
//! makes here, off and on. So what is to be compared is how many times one is the other.

use crate::report::{Cell, Table};

/// A figure without a mechanism, and with it.
#[derive(Debug)]
pub(super) struct Pair {
    pub what: String,
    pub before: f64,
    pub after: f64,
}

impl Pair {
    pub fn new(what: impl Into<String>, before: f64, after: f64) -> Self {
        Self { what: what.into(), before, after }
    }
}

/// `published` stands in front of `ours`; `cell` tells how precise they are.
pub(super) fn table(
    name: &'static str,
    title: &str,
    published: impl IntoIterator<Item = Pair>,
    ours: impl IntoIterator<Item = Pair>,
    cell: fn(f64) -> Cell,
) -> Table {
    let columns = [
        ("who", "who"),
        ("what", "what"),
        ("before", "before"),
        ("after", "after"),
        ("times", "before / after"),
    ];
    let mut table = Table::new(name, title, &columns);
    let published = published.into_iter().map(|pair| ("published", pair));
    let ours = ours.into_iter().map(|pair| ("ubtrfs", pair));
    for (who, Pair { what, before, after }) in published.chain(ours) {
        let times = Cell::Ratio(before / after);
        table.push(vec![Cell::text(who), Cell::text(what), cell(before), cell(after), times]);
    }
    table
}
