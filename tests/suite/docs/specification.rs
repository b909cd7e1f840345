//! `docs/specification.md`: the tests that it names exist, and pages say no other numbers about its promises.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

use kit::{read, repository};

const PAGE: &str = "docs/specification.md";
/// Most words of the page.
const MAX_WORDS: usize = 700;

/// Rows of the table: their number, their text, and the tests of the last column.
fn promises() -> BTreeMap<String, (String, Vec<String>)> {
    let page = read(&repository(PAGE));
    let row = Regex::new(r"(?m)^\| (\d+) \| (.*) \| ([^|]*) \|$").unwrap();
    let test = Regex::new("`([a-z_:]+)`").unwrap();
    let rows = row.captures_iter(&page).map(|row| {
        let tests = test.captures_iter(&row[3]).map(|test| test[1].to_owned()).collect();
        (row[1].to_owned(), (row[2].to_owned(), tests))
    });
    rows.collect()
}

/// Texts of all files of Rust in a directory.
fn sources(directory: &Path) -> Vec<String> {
    let entries: Vec<PathBuf> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    let of_entry = |path: &PathBuf| match path.is_dir() {
        true => sources(path),
        false if path.extension().is_some_and(|extension| extension == "rs") => vec![read(path)],
        false => Vec::new(),
    };
    entries.iter().flat_map(of_entry).collect()
}

/// True if a test or a module of tests has this path, as `cargo test` names it.
fn has_test(path: &str) -> bool {
    let is_function = |directory: &Path, name: &str| {
        let test = Regex::new(&format!(r"#\[test\]\s+fn {name}\(")).unwrap();
        sources(directory).iter().any(|source| test.is_match(source))
    };
    let suite = repository("tests/suite");
    match path.split_once("::").unwrap() {
        ("world", name) => is_function(&repository("tests/world"), name),
        _ => suite.join(path.replace("::", "/")).with_extension("rs").exists(),
    }
}

#[test]
fn each_promise_has_tests_that_exist() {
    let promises = promises();
    assert!(promises.len() >= 10, "{promises:?}");
    for (number, (_, tests)) in &promises {
        assert!(!tests.is_empty(), "promise {number} names no test");
        for test in tests {
            assert!(has_test(test), "promise {number}: there is no test {test}");
        }
    }
}

#[test]
fn specification_is_short() {
    let words = read(&repository(PAGE)).split_whitespace().count();
    assert!(words <= MAX_WORDS, "{PAGE} has {words} words of {MAX_WORDS}");
}

#[test]
fn pages_say_no_other_numbers_about_promises() {
    let promises = promises();
    let link = Regex::new(r"\[(\d+)\]\((?:\.\./)?specification\.md\)").unwrap();
    let number = Regex::new(r"\b\d+(?:\.\d+)?\b").unwrap();
    let in_parentheses = Regex::new(r"\]\([^)]*\)").unwrap();
    let mut linked = BTreeSet::new();
    let directories = ["docs", "docs/reference"].map(|path| fs::read_dir(repository(path)).unwrap());
    for path in directories.into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.extension().is_none_or(|extension| extension != "md") || path.ends_with("specification.md") {
            continue;
        }
        let (page, name) = (read(&path), path.file_name().unwrap().to_string_lossy().into_owned());
        for section in
            page.split("\n## ").filter(|section| section.starts_with("Promise") || section.starts_with("Guarantee"))
        {
            assert!(link.is_match(section), "{name}: a section about promises names none of {PAGE}");
        }
        // A paragraph, an item of a list or a row of a table.
        let blocks = page.replace("\n- ", "\n\n- ").replace("\n|", "\n\n|");
        for block in blocks.split("\n\n").filter(|block| link.is_match(block)) {
            let numbers: Vec<&str> = link.captures_iter(block).map(|link| link.get(1).unwrap().as_str()).collect();
            linked.extend(numbers.iter().map(|number| (*number).to_owned()));
            let text = in_parentheses.replace_all(&link.replace_all(block, ""), "]").into_owned();
            let said = numbers.iter().map(|number| {
                let (text, _) = promises.get(*number).unwrap_or_else(|| panic!("{name}: there is no promise {number}"));
                text.as_str()
            });
            let said: String = said.collect();
            for found in number.find_iter(&text) {
                let is_said = number.find_iter(&said).any(|other| other.as_str() == found.as_str());
                assert!(is_said, "{name} says {} of promise {numbers:?}, {PAGE} does not: {block}", found.as_str());
            }
        }
    }
    assert!(linked.len() >= 6, "few pages name their promises: {linked:?}");
}
