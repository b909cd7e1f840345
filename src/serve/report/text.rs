//! Text form of reports: aligned columns.

/// Formats a table with headings. Columns are as wide as their widest cell, numbers are aligned right, and the last
/// column is not padded.
pub(crate) fn columns<const N: usize>(headings: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(headings.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut page = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let is_number = cell.bytes().next().is_some_and(|byte| byte.is_ascii_digit() || byte == b'-');
            line += &match column + 1 == N {
                true => cell.clone(),
                false if is_number => format!("{cell:>width$}  "),
                false => format!("{cell:<width$}  "),
            };
        }
        page += line.trim_end();
        page.push('\n');
    }
    page
}
