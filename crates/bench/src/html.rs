//! A run as one page that needs nothing else: tables, and pictures of their figures.

use std::fmt::Write as _;

use crate::chart::{Bar, Chart, Shape, escape};
use crate::report::{Cell, Report, Table};

const STYLE: &str = "
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin: 3rem 0 .8rem; border-top: 1px solid #ccc; padding-top: 1.2rem; }
p.machine, p.note { color: #444; }
nav { margin: 1rem 0; } nav a { margin-right: 1rem; color: #2563a8; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid #888; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.ours td { background: #eef4fb; }
svg { width: 100%; height: auto; margin: .8rem 0 1.6rem; }
svg text { font: 13px system-ui, sans-serif; fill: #1c1c1c; }
svg text.title { font-size: 15px; font-weight: 600; } svg text.heading { font-weight: 600; }
svg text.tick, svg text.unit { fill: #555; font-size: 12px; }
svg line.grid { stroke: #ddd; } svg line.goal { stroke: #a83232; stroke-dasharray: 5 4; stroke-width: 1.5; }
svg text.goal { fill: #a83232; font-size: 12px; }
";

/// Figures that are drawn where a table says nothing itself: the first of these columns that it has.
const DRAWN: [(&str, &str); 8] = [
    ("wall_s", "s"),
    ("total_s", "s"),
    ("us_per_file", "µs a file"),
    ("ns_each", "ns each"),
    ("wall_ns", "ns each"),
    ("median_ms", "ms"),
    ("mean_ns", "ns"),
    ("peak_bytes", "MiB"),
];

impl Report {
    /// As one HTML page.
    pub fn to_html(&self) -> String {
        let mut page = String::from(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>ubtrfs benchmarks</title>\n",
        );
        let _ = writeln!(page, "<style>{STYLE}</style>");
        let _ = writeln!(page, "<h1>ubtrfs benchmarks</h1>");
        let _ = writeln!(page, "<p class=\"machine\">{}.</p>", escape(&self.to_string()));
        page.push_str(
            "<p class=\"note\">Contestants take turns in one run; medians of the rounds. The ratio counts: the time \
             itself depends on the machine and on who else uses it. Shorter bars are better unless the unit is a rate.</p>\n<nav>",
        );
        for table in &self.tables {
            let _ = write!(page, "<a href=\"#{0}\">{0}</a>", escape(table.name));
        }
        page.push_str("</nav>\n");
        for table in &self.tables {
            push_table(&mut page, table);
        }
        page.push_str("</html>\n");
        page
    }
}

fn push_table(page: &mut String, table: &Table) {
    let _ = writeln!(page, "<h2 id=\"{}\">{}</h2>", escape(table.name), escape(&table.title));
    let drawn = if table.charts.is_empty() {
        drawn(table).into_iter().collect()
    } else {
        table.charts.clone()
    };
    for chart in &drawn {
        page.push_str(&chart.to_svg());
    }
    let is_number: Vec<bool> = (0..table.columns.len())
        .map(|column| {
            let mut cells = table.rows.iter().map(|row| &row[column]);
            !table.rows.is_empty() && cells.all(|cell| !matches!(cell, Cell::Text(_)))
        })
        .collect();
    let class = |column: usize| if is_number[column] { " class=\"number\"" } else { "" };
    page.push_str("<div class=\"wide\"><table>\n<tr>");
    for (column, (_, heading)) in table.columns.iter().enumerate() {
        let _ = write!(page, "<th{}>{}</th>", class(column), escape(heading));
    }
    page.push_str("</tr>\n");
    for row in &table.rows {
        let is_ours = row.iter().any(|cell| matches!(cell, Cell::Text(text) if is_ours(text)));
        page.push_str(if is_ours { "<tr class=\"ours\">" } else { "<tr>" });
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(page, "<td{}>{}</td>", class(column), escape(&cell.to_string()));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
    for note in &table.notes {
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escape(note));
    }
}

fn is_ours(who: &str) -> bool {
    who.starts_with("ubtrfs")
}

/// Bars of the first column that says how long things took; the words of a row are its label.
fn drawn(table: &Table) -> Option<Chart> {
    let column_of = |name: &str| table.columns.iter().position(|(key, _)| *key == name);
    let (column, unit) = DRAWN.iter().find_map(|(name, unit)| Some((column_of(name)?, *unit)))?;
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    let who = column_of("who");
    for row in &table.rows {
        let Some(value) = row[column].number() else { continue };
        let mut words = Vec::new();
        for (at, cell) in row.iter().enumerate() {
            if let Cell::Text(text) = cell
                && Some(at) != who
            {
                words.push(text.as_str());
            }
        }
        let words = words.join(", ");
        let (heading, label) = match who.map(|who| row[who].to_string()) {
            Some(who) => (words, who),
            None => (String::new(), words),
        };
        let bar = Bar { label, value };
        match groups.last_mut() {
            Some((last, bars)) if *last == heading => bars.push(bar),
            _ => groups.push((heading, vec![bar])),
        }
    }
    let unit = unit.to_owned();
    let title = table.columns[column].1.to_owned();
    (!groups.is_empty()).then_some(Chart { title, unit, shape: Shape::Bars(groups), goal: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    #[test]
    fn page_has_all_tables_and_asks_for_nothing_from_elsewhere() {
        let mut table = Table::new("t", "Things & more", &[("who", "who"), ("wall_s", "wall s")]);
        table.push(vec![Cell::text("ubtrfs"), Cell::Seconds(1.5)]);
        table.push(vec![Cell::text("kernel <1>"), Cell::Seconds(3.0)]);
        table.note("a note");
        let machine = Machine::look();
        let report = Report {
            date: "today".to_owned(),
            arguments: "some --rounds 7".to_owned(),
            commit: "abcdef".to_owned(),
            machine,
            tables: vec![table],
            ended_by: None,
        };
        let page = report.to_html();
        for part in [
            "Things &amp; more",
            "kernel &lt;1&gt;",
            "<svg",
            "a note",
            "today",
            "some --rounds 7",
            "abcdef",
            "tr class=\"ours\"",
        ] {
            assert!(page.contains(part), "{part}");
        }
        for asks in ["http:", "https:", "<script", "src=", "@import", "url("] {
            assert!(!page.contains(asks), "{asks}");
        }
    }
}
