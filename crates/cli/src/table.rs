//! Text tables: aligned columns, grouped digits.

/// Formats rows of cells as columns, the first aligned left, the rest aligned right. Every row must have the same length.
pub fn columns(rows: &[Vec<String>]) -> String {
    aligned(rows, |at, cell, width| if at == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") })
}

/// Formats rows of cells as columns, all aligned left.
pub fn columns_left(rows: &[Vec<String>]) -> String {
    aligned(rows, |_, cell, width| format!("{cell:<width$}"))
}

fn aligned(rows: &[Vec<String>], cell: impl Fn(usize, &str, usize) -> String) -> String {
    let width = |at: usize| rows.iter().map(|row| row[at].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(at, text)| cell(at, text, widths[at]));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Formats `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(grouped(u64::MAX), "18,446,744,073,709,551,615");
    }
}
