//! Comments, messages and documents are plain English: none of the phrases that readers stumbled over.

use regex::Regex;

use super::{Text, assert_none, texts};

/// Phrases that no text of the repository contains, as regular expressions, one per line.
const BANNED_PHRASES: &str = include_str!("banned_phrases.txt");

/// Folders and kinds of files that are read.
const READ: &[(&str, &str)] = &[
    ("src", ".rs"),
    ("src", ".lua"),
    ("tests", ".rs"),
    ("fuzz", ".rs"),
    ("docs", ".md"),
    ("docs", ".py"),
    ("deploy", ".md"),
    ("deploy", ".yaml"),
    ("deploy", ".sh"),
    ("deploy", ".txt"),
    ("config", ".yaml"),
    ("config", ".env"),
    ("envoy", ".yaml"),
    ("envoy", ".sh"),
    ("tests", ".md"),
    ("tests", ".sh"),
];

#[test]
fn no_text_contains_a_banned_phrase() {
    let banned =
        Regex::new(&format!(r"(?i)\b(?:{})(?:\b|$)", BANNED_PHRASES.lines().collect::<Vec<_>>().join("|"))).unwrap();
    let mut all: Vec<Text> = READ.iter().flat_map(|(directory, ending)| texts(directory, ending)).collect();
    for name in ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Cargo.toml"] {
        all.push(Text::of(name));
    }
    // This list itself has to name them.
    all.retain(|text| !text.name.starts_with("tests/suite/tidy/"));
    let mut found = Vec::new();
    for text in &all {
        for (number, line) in (1..).zip(text.content.lines()) {
            if let Some(phrase) = banned.find(line) {
                found.push(format!("{}:{number}: `{}` in: {}", text.name, phrase.as_str(), line.trim()));
            }
        }
    }
    assert_none("banned phrases", &found);
}
