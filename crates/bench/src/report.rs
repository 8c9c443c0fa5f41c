//! Figures as a table for people and as JSON for programs.

use std::fmt::{self, Write as _};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::chart::Chart;
use crate::machine::Machine;

/// What a cell holds.
#[derive(Clone, PartialEq, Debug)]
pub enum Cell {
    /// Words.
    Text(String),
    /// A time in seconds.
    Seconds(f64),
    /// A time in seconds, to the tenth of a millisecond.
    Precise(f64),
    /// A time in milliseconds.
    Millis(f64),
    /// A time in microseconds.
    Micros(f64),
    /// A time in nanoseconds.
    Nanos(f64),
    /// Bytes, shown in MiB.
    Bytes(u64),
    /// One number over another.
    Ratio(f64),
    /// A number of things.
    Count(u64),
    /// A figure, and those of all rounds that it is made of: these are in JSON only, under its name and `_rounds`.
    OfRounds(Box<Self>, Vec<f64>),
    /// What was not, or cannot be, measured.
    Missing,
}

impl Cell {
    /// Words.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// Its number, in the unit in which it is shown.
    pub(crate) fn number(&self) -> Option<f64> {
        match self {
            Self::Seconds(number)
            | Self::Precise(number)
            | Self::Millis(number)
            | Self::Micros(number)
            | Self::Nanos(number)
            | Self::Ratio(number) => Some(*number),
            Self::Bytes(bytes) => Some(*bytes as f64 / f64::from(1 << 20)),
            Self::Count(count) => Some(*count as f64),
            Self::OfRounds(cell, _) => cell.number(),
            Self::Text(_) | Self::Missing => None,
        }
    }

    fn is_number(&self) -> bool {
        !matches!(self, Self::Text(_))
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Text(text) => Value::from(text.as_str()),
            Self::Seconds(number)
            | Self::Precise(number)
            | Self::Millis(number)
            | Self::Micros(number)
            | Self::Nanos(number)
            | Self::Ratio(number) => Value::from(*number),
            Self::Bytes(number) | Self::Count(number) => Value::from(*number),
            Self::OfRounds(cell, _) => cell.to_json(),
            Self::Missing => Value::Null,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            _ if self.number().is_some_and(|number| !number.is_finite()) => f.write_str("–"),
            Self::Text(text) => f.write_str(text),
            Self::Seconds(seconds) => write!(f, "{seconds:.2}"),
            Self::Precise(seconds) => write!(f, "{seconds:.4}"),
            Self::Millis(millis) => write!(f, "{millis:.1}"),
            Self::Micros(micros) => write!(f, "{micros:.2}"),
            Self::Nanos(nanos) if *nanos < 100.0 => write!(f, "{nanos:.1}"),
            Self::Nanos(nanos) => write!(f, "{nanos:.0}"),
            Self::Bytes(bytes) => write!(f, "{}", (bytes + (1 << 19)) >> 20),
            Self::Ratio(ratio) => write!(f, "{ratio:.2}"),
            Self::Count(count) => write!(f, "{count}"),
            Self::OfRounds(cell, _) => cell.fmt(f),
            Self::Missing => f.write_str("–"),
        }
    }
}

/// A table: Markdown when printed.
#[derive(Clone, PartialEq, Debug)]
pub struct Table {
    /// Its name in JSON.
    pub name: &'static str,
    /// What is measured, in a sentence.
    pub title: String,
    /// Of each column, its name in JSON and its heading.
    pub columns: Vec<(&'static str, &'static str)>,
    /// As many cells as columns.
    pub rows: Vec<Vec<Cell>>,
    /// What a reader must know besides.
    pub notes: Vec<String>,
    /// Pictures for the page; where there are none, the page draws its own.
    pub charts: Vec<Chart>,
}

impl Table {
    /// A table without rows.
    pub fn new(
        name: &'static str,
        title: impl Into<String>,
        columns: &[(&'static str, &'static str)],
    ) -> Self {
        Self {
            name,
            title: title.into(),
            columns: columns.to_vec(),
            rows: Vec::new(),
            notes: Vec::new(),
            charts: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Vec<Cell>) {
        assert_eq!(row.len(), self.columns.len(), "a row has a cell a column");
        self.rows.push(row);
    }

    /// Adds a note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// As JSON: an object a row.
    pub fn to_json(&self) -> Value {
        let row = |cells: &Vec<Cell>| {
            let mut object = Map::new();
            for ((key, _), cell) in self.columns.iter().zip(cells) {
                object.insert((*key).to_owned(), cell.to_json());
                if let Cell::OfRounds(_, rounds) = cell {
                    object.insert(format!("{key}_rounds"), Value::from(rounds.clone()));
                }
            }
            Value::Object(object)
        };
        serde_json::json!({
            "name": self.name,
            "title": self.title,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "**{}**\n", self.title)?;
        let texts: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(Cell::to_string).collect()).collect();
        let width = |column: usize| {
            let heading = self.columns[column].1.chars().count();
            texts.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(heading)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let is_number: Vec<bool> = (0..self.columns.len())
            .map(|column| {
                let mut cells = self.rows.iter().map(|row| &row[column]);
                !self.rows.is_empty() && cells.all(Cell::is_number)
            })
            .collect();
        let line = |cells: Vec<&str>| {
            let mut text = String::from("|");
            for ((cell, width), right) in cells.iter().zip(&widths).zip(&is_number) {
                let _ = match right {
                    true => write!(text, " {cell:>width$} |"),
                    false => write!(text, " {cell:<width$} |"),
                };
            }
            text
        };
        writeln!(f, "{}", line(self.columns.iter().map(|(_, heading)| *heading).collect()))?;
        let mut rule = String::from("|");
        for (width, right) in widths.iter().zip(&is_number) {
            let _ = match right {
                true => write!(rule, "{:->1$}", ":|", width + 3),
                false => write!(rule, "{:->1$}", "|", width + 3),
            };
        }
        writeln!(f, "{rule}")?;
        for row in &texts {
            writeln!(f, "{}", line(row.iter().map(String::as_str).collect()))?;
        }
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        Ok(())
    }
}

/// A whole run.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// When it began, UTC.
    pub date: String,
    /// What was asked for: the arguments of `ubtrfs-bench`.
    pub arguments: String,
    /// The state of the source, as `git describe` names it where the command was started; empty where that is no checkout.
    pub commit: String,
    /// Where.
    pub machine: Machine,
    /// In the order they were made.
    pub tables: Vec<Table>,
    /// What ended the run before it was done; `None` if nothing did.
    pub ended_by: Option<String>,
}

impl Report {
    /// As JSON.
    pub fn to_json(&self) -> Value {
        #[derive(Serialize)]
        struct Json<'a> {
            date: &'a str,
            arguments: &'a str,
            commit: &'a str,
            machine: &'a Machine,
            tables: Vec<Value>,
            ended_by: Option<&'a str>,
        }
        let tables = self.tables.iter().map(Table::to_json).collect();
        serde_json::to_value(Json {
            date: &self.date,
            arguments: &self.arguments,
            commit: &self.commit,
            machine: &self.machine,
            tables,
            ended_by: self.ended_by.as_deref(),
        })
        .expect("numbers and strings are JSON")
    }
}

impl fmt::Display for Report {
    /// What was run and where; the tables are printed as they are made.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        write!(
            f,
            "ubtrfs-bench {}; at {}; {}; {} cores ({}), {} GiB; Linux {}; btrfs-progs {}; load {:.1} at the start, {:.1} at the \
             end; a bare system call {:.0} ns; a page of fresh memory touched {:.0} ns at the start, {:.0} ns at the end",
            self.arguments,
            if self.commit.is_empty() { "an unknown commit" } else { &self.commit },
            self.date,
            machine.core_count,
            machine.processor,
            machine.memory_bytes >> 30,
            machine.kernel,
            machine.btrfs_progs.as_deref().unwrap_or("missing"),
            machine.load_at_start,
            machine.load_at_end,
            machine.syscall_ns,
            machine.fresh_page_ns_at_start,
            machine.fresh_page_ns_at_end,
        )?;
        match &self.ended_by {
            Some(why) => write!(f, "; NOT done, ended by {why}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new("t", "Things", &[("who", "who"), ("wall_s", "wall s")]);
        table.push(vec![Cell::text("ours"), Cell::Seconds(1.234)]);
        table.push(vec![Cell::text("kernel"), Cell::Missing]);
        table
    }

    #[test]
    fn table_prints_as_markdown_with_numbers_to_the_right() {
        let text = "**Things**\n\n| who    | wall s |\n|--------|-------:|\n\
                    | ours   |   1.23 |\n| kernel |      – |\n";
        assert_eq!(table().to_string(), text);
    }

    #[test]
    fn rounds_of_a_figure_are_in_json_only() {
        let mut table = table();
        let rounds = vec![1.0, 1.5, 9.0];
        table.push(vec![
            Cell::text("other"),
            Cell::OfRounds(Box::new(Cell::Seconds(1.5)), rounds.clone()),
        ]);
        assert!(table.to_string().contains("| other  |   1.50 |"));
        let json = &table.to_json()["rows"][2];
        assert_eq!((&json["wall_s"], &json["wall_s_rounds"]), (&1.5.into(), &rounds.into()));
    }

    #[test]
    fn figure_that_is_missing_is_not_shown_as_a_number() {
        for cell in [Cell::Seconds(f64::NAN), Cell::Ratio(f64::INFINITY), Cell::Missing] {
            assert_eq!(cell.to_string(), "–");
            assert!(cell.to_json().is_null());
        }
    }

    #[test]
    fn table_as_json_names_each_cell() {
        let json = table().to_json();
        assert_eq!(json["rows"][0]["wall_s"], 1.234);
        assert!(json["rows"][1]["wall_s"].is_null());
    }
}
