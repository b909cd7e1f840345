//! The scripts of fixed_window with all parts in place: `expanded/` shows them to readers, as Redis gets them.

use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::store::redis::script::script_for_countings;

/// The lines of code, without indentation.
fn code(text: &str) -> Vec<&str> {
    let lines = text.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("--")).collect()
}

#[test]
fn scripts_of_fixed_window_are_as_shown() {
    let script = script_for_countings([Algorithm::FixedWindow].into_iter());
    let merged = script.merged.as_ref().expect("calls on one counter can be merged");
    assert_eq!(code(&script.text), code(include_str!("expanded/fixed_window_one_call.lua")));
    assert_eq!(code(&merged.text), code(include_str!("expanded/fixed_window_merged.lua")));
}
