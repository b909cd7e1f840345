//! Tables of text: alignment by the width on a terminal.

use tollkeeper::base::text_table::{NumberAlignment, format_table};

fn rows() -> [[String; 3]; 3] {
    [["1", "日本", "12"], ["-20", "e\u{301}a", ""], ["about 3", "plain", "-"]].map(|row| row.map(str::to_owned))
}

#[test]
fn columns_are_aligned_by_the_width_on_a_terminal() {
    let table = format_table(&["COUNT", "KEY", "LAST"], rows(), NumberAlignment::Left);
    let expected = "COUNT    KEY    LAST\n1        日本   12\n-20      e\u{301}a\nabout 3  plain  -\n";
    assert_eq!(table, expected);
}

#[test]
fn numbers_are_aligned_right_but_for_the_last_column() {
    let table = format_table(&["COUNT", "KEY", "LAST"], rows(), NumberAlignment::Right);
    let expected = "COUNT    KEY    LAST\n      1  日本   12\n    -20  e\u{301}a\nabout 3  plain  -\n";
    assert_eq!(table, expected);
}
