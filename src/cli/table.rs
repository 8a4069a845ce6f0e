//! Tables for people.

use comfy_table::{ContentArrangement, Table, presets::NOTHING};

/// A table without lines, as `kubectl get` prints them; `empty` is said where there is no row.
pub fn render(header: &[&str], rows: Vec<Vec<String>>, empty: &str) -> String {
    if rows.is_empty() {
        return format!("{empty}\n");
    }
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|title| title.to_uppercase()));
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text: String = table.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    if text.is_empty() {
        text.push('\n');
    }
    text
}

/// What stands in a cell for nothing.
pub fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
