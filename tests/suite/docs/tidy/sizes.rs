//! Files are short, and no room is larger than its budget.

use std::collections::BTreeMap;

use super::sources::module_path;
use super::{Text, assert_none, texts};
use kit::{read, repository};

/// Lines of a file in `src`, its tests included.
const MAX_FILE_LINES: usize = 700;

#[test]
fn files_are_short() {
    let too_long = |lines: usize| lines > MAX_FILE_LINES;
    let counted = texts("src", ".rs").into_iter().map(|text| (text.content.lines().count(), text.name));
    let found: Vec<_> =
        counted.filter(|(lines, _)| too_long(*lines)).map(|(lines, name)| format!("{name}: {lines}")).collect();
    assert_none("files that are too long", &found);
}

/// Number of lines that are neither blank nor a comment; inline tests count.
fn count_code_lines(text: &Text) -> usize {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    text.content.lines().filter(is_code).count()
}

/// File with the lines of code that each room may have, in reading order; it stands beside this one.
fn budget_file() -> String {
    file!().replace("sizes.rs", "budget.txt")
}

/// Rows `ROOM LINES` of the budget, without its comments.
fn read_budget() -> Vec<(String, usize)> {
    let budget = read(&repository(&budget_file()));
    let rows = budget.lines().filter(|line| !line.starts_with('#'));
    let parse = |row: &str| {
        let (room, lines) = row.split_once(' ').unwrap_or_else(|| panic!("{row:?} is not ROOM LINES"));
        (room.to_owned(), lines.parse().unwrap_or_else(|_| panic!("{lines:?} is no number of lines")))
    };
    rows.map(parse).collect()
}

#[test]
fn rooms_keep_their_budget_of_lines() {
    let budget = read_budget();
    let rooms: Vec<_> = budget.iter().map(|(room, _)| room.clone()).collect();
    assert_eq!(rooms, super::rooms(), "rooms in {}, and in {:?}", budget_file(), super::CRATE_ROOTS);
    let mut used = BTreeMap::<String, usize>::new();
    for text in texts("src", ".rs") {
        if let Some(room) = module_path(&text.name).into_iter().next() {
            *used.entry(room).or_default() += count_code_lines(&text);
        }
    }
    let mut found = Vec::new();
    for (room, allowed) in &budget {
        let lines = used[room];
        println!("{room:9} {lines:6} lines of code, {allowed:6} allowed");
        if lines > *allowed {
            found.push(format!("{room}: {lines} lines of code, {allowed} allowed"));
        }
    }
    let what = format!(
        "rooms over their budget in {} (who needs more says in the commit what went for it; lower the figure when code \
         goes)",
        budget_file()
    );
    assert_none(&what, &found);
}
