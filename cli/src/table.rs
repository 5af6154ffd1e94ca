//! Tables of text.

/// Formats rows under headings. Columns are separated by two spaces.
pub(crate) fn table<const N: usize>(headings: [&str; N], rows: Vec<[String; N]>) -> Vec<String> {
    let rows: Vec<_> = std::iter::once(headings.map(Into::into)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}
