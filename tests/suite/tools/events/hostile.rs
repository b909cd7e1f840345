//! Entries that other programs wrote to the stream.

use super::{STREAM, append, numbers, record, run, text};
use kit::redis::{Server, options};

fn append_text(server: &Server, record: &str) {
    server.query::<String>(&["XADD", STREAM, "*", "record", record]);
}

#[test]
fn entries_without_a_usable_record_are_skipped_and_told() {
    let server = options().start();
    append(&server, [1]);
    for number in 0..40 {
        let bad = ["no JSON \u{1b}[2J", "{}\n{\"seq\":9}", "[1]", ""][number % 4];
        append_text(&server, bad);
        server.query::<String>(&["XADD", STREAM, "*", "other", "\u{1b}[2J"]);
    }
    append(&server, [2]);
    let output = run(&server, "");
    let told = text(&output.stderr);
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(0), vec![1, 2]), "{output:?}");
    assert_eq!(told.matches("is skipped").count(), 80, "{told}");
    assert!(!told.contains('\u{1b}'), "{told:?}");
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let server = options().start();
    let value = "\u{7f}\u{9b}31m\u{85}\u{1b}]0;\u{7}";
    // The log escapes characters below U+0020 only.
    let record = serde_json::json!({"seq": 1, "value": value}).to_string();
    assert!(record.contains('\u{9b}'));
    append_text(&server, &record);
    let printed = text(&run(&server, "").stdout);
    assert!(!printed.trim_end().contains(char::is_control), "{printed:?}");
    let parsed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(parsed["value"], value);
}

#[test]
fn entry_larger_than_a_reply_ends_it_after_those_before() {
    let server = options().start();
    append(&server, 1..=3);
    append_text(&server, &"x".repeat(40 << 20));
    append(&server, [4]);
    let output = run(&server, "");
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(1), vec![1, 2, 3]), "{output:?}");
    assert!(text(&output.stderr).contains("is larger than a reply may be (give --after a later id)"), "{output:?}");
}

#[test]
fn entries_larger_than_a_reply_together_are_printed() {
    let server = options().start();
    let padding = " ".repeat(3 << 20);
    (1..=12).for_each(|number| append_text(&server, &(record(number) + &padding)));
    let output = run(&server, "");
    assert_eq!((output.status.code(), numbers(&text(&output.stdout))), (Some(0), (1..=12).collect()));
}
