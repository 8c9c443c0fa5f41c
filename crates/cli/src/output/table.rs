//! Columns that line up.

/// Which way a column leans.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells, one or two spaces between them.
pub struct Table {
    columns: Vec<Align>,
    gap: &'static str,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table of these columns with `gap` between two.
    pub fn new(columns: &[Align], gap: &'static str) -> Self {
        Self { columns: columns.to_vec(), gap, rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The lines, without spaces at their ends.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let width = |row: &Vec<String>| row.get(column).map_or(0, |c| c.chars().count());
                self.rows.iter().map(width).max().unwrap_or(0)
            })
            .collect();
        self.rows.iter().map(move |row| {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                if column > 0 {
                    line.push_str(self.gap);
                }
                let width = widths.get(column).copied().unwrap_or(0);
                match self.columns.get(column) {
                    Some(Align::Right) => line.push_str(&format!("{cell:>width$}")),
                    _ => line.push_str(&format!("{cell:<width$}")),
                }
            }
            line.truncate(line.trim_end().len());
            line
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_align_and_trim() {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Left], "  ");
        table.row(["a", "1", "x"]);
        table.row(["bbb", "22", ""]);
        assert_eq!(table.lines().collect::<Vec<_>>(), ["a     1  x", "bbb  22"]);
    }
}
