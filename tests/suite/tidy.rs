//! What the repository promises about itself and no compiler checks: the order of modules, who may know what, the size
//! and the opening of files, and that the examples in the documentation load.
//!
//! Everything here reads text, so it knows nothing of macros or renamed imports; it is meant for slips, not for malice.

#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/phrases.rs"]
mod phrases;
#[path = "tidy/sizes_and_docs.rs"]
mod sizes_and_docs;
#[path = "tidy/sources.rs"]
mod sources;

use std::fs;
use std::path::{Path, PathBuf};

use tollkeeper::config::compile::options::CompileOptions;
use tollkeeper::config::compile::{RuleText, compile};
use tollkeeper::config::yaml::Documents;

use crate::kit::{read, repository};

/// A file of the repository.
struct Text {
    /// Its path from the root of the repository.
    name: String,
    content: String,
}

/// All files below `directory` whose names end in `ending`, by name.
fn texts(directory: &str, ending: &str) -> Vec<Text> {
    let root = repository("");
    let mut found = Vec::new();
    let mut directories = vec![repository(directory)];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.to_str().unwrap().ends_with(ending) {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                found.push(Text { name, content: read(&path) });
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(!found.is_empty(), "no {ending} in {directory}");
    found
}

impl Text {
    /// A single file, by its path from the root of the repository.
    fn of(name: &str) -> Self {
        Self { name: name.to_owned(), content: read(&repository(name)) }
    }

    /// The module of `lib.rs` that a source file belongs to; `None` for the roots.
    fn module(&self) -> Option<&str> {
        let path = Path::new(self.name.strip_prefix("src/")?);
        let first = path.iter().next()?.to_str()?;
        let module = first.strip_suffix(".rs").unwrap_or(first);
        (!["lib", "main"].contains(&module)).then_some(module)
    }

    /// The lines that are code, with their numbers; without tests, which stand last in a file.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.content.lines().take_while(|line| line.trim() != "#[cfg(test)]");
        (1..).zip(lines).filter(|(_, line)| !line.trim_start().starts_with("//"))
    }
}

/// Fails with all that was found, a line each.
fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

/// `FILE:LINE: TEXT` of each line of code that holds one of `words`, in files that are not `allowed`.
fn mentions(texts: &[Text], words: &[&str], allowed: impl Fn(&Text) -> bool) -> Vec<String> {
    let strict = texts.iter().filter(|text| !allowed(text));
    let lines = strict.flat_map(|text| text.code().map(move |(number, line)| (text, number, line)));
    lines
        .filter(|(_, _, line)| words.iter().any(|word| line.contains(word)))
        .map(|(text, number, line)| format!("{}:{number}: {}", text.name, line.trim()))
        .collect()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The names that follow `crate::` in code, also those of `use crate::{a, b::c}`.
fn used_modules(text: &Text) -> Vec<(usize, String)> {
    let mut used = Vec::new();
    let code: Vec<_> = text.code().collect();
    for (place, (number, line)) in code.iter().enumerate() {
        for (at, _) in line.match_indices("crate::") {
            let before = line[..at].bytes().next_back();
            if before.is_some_and(is_word) {
                continue;
            }
            let rest = &line[at + "crate::".len()..];
            if !rest.starts_with('{') {
                used.push((*number, rest.bytes().take_while(|byte| is_word(*byte)).map(char::from).collect()));
                continue;
            }
            // A group, perhaps over several lines: what follows `{` and each `,` of the outermost level.
            let group: String = code[place..].iter().map(|(_, line)| *line).collect::<Vec<_>>().join(" ");
            let group = &group[group.find("crate::{").unwrap() + "crate::{".len()..];
            let mut depth = 0;
            let mut name = String::new();
            for character in group.chars() {
                match character {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => used.push((*number, std::mem::take(&mut name).trim().to_owned())),
                    _ if depth == 0 => name.push(character),
                    _ => {}
                }
            }
            used.push((*number, name.trim().to_owned()));
        }
    }
    let first = |name: String| name.split("::").next().unwrap_or_default().trim().to_owned();
    used.into_iter().map(|(number, name)| (number, first(name))).filter(|(_, name)| !name.is_empty()).collect()
}

#[test]
fn a_module_uses_only_modules_above_it() {
    let library = read(&repository("src/lib.rs"));
    let order: Vec<_> = library.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert!(order.len() > 10, "{order:?}");
    let place = |module: &str| order.iter().position(|other| *other == module);
    let mut found = Vec::new();
    for text in texts("src", ".rs") {
        let Some(module) = text.module() else { continue };
        let own = place(module).unwrap_or_else(|| panic!("{} is of no module of lib.rs", text.name));
        for (number, used) in used_modules(&text) {
            // What is no module is a macro or a name of this file.
            if place(&used).is_some_and(|used| used > own) {
                found.push(format!("{}:{number}: {module} uses {used}, which stands below it", text.name));
            }
        }
    }
    assert_none("modules used against the order of lib.rs", &found);
}

#[test]
fn every_file_says_what_it_is_for() {
    let directories = ["src", "tests", "benches"].into_iter().filter(|directory| repository(directory).exists());
    let all = directories.flat_map(|directory| texts(directory, ".rs"));
    let opens = |text: &Text| text.content.starts_with("//! ");
    let found: Vec<_> = all.filter(|text| !opens(text)).map(|text| text.name).collect();
    assert_none("files that do not open with `//! `", &found);
}

#[test]
fn files_are_short_and_lines_fit() {
    const MOST_LINES: usize = 500;
    const LONGEST_LINE: usize = 120;
    let sources = texts("src", ".rs");
    let long = sources.iter().filter(|text| text.content.lines().count() > MOST_LINES);
    let mut found: Vec<_> = long.map(|text| format!("{}: more than {MOST_LINES} lines", text.name)).collect();
    for text in sources.iter().chain(&texts("tests", ".rs")) {
        // Code is broken by rustfmt, but for strings and macros, which it leaves alone.
        let is_wide = |line: &str| line.trim_start().starts_with("//") && line.chars().count() > LONGEST_LINE;
        let wide = (1_usize..).zip(text.content.lines()).filter(|(_, line)| is_wide(line));
        found.extend(wide.map(|(number, _)| format!("{}:{number}: more than {LONGEST_LINE} characters", text.name)));
    }
    assert_none("too long", &found);
}

#[test]
fn nothing_is_left_to_do_or_to_chance() {
    let words = [".unwrap()", "todo!", "unimplemented!", "dbg!", "TODO", "FIXME", "XXX", "unsafe "];
    assert_none("not for the shipped code", &mentions(&texts("src", ".rs"), &words, |_| false));
    // In comments too.
    let notes = ["TODO", "FIXME", "XXX"];
    let lines = texts("src", ".rs").into_iter().flat_map(|text| {
        let marked = |line: &&str| notes.iter().any(|note| line.contains(note));
        text.content.lines().filter(marked).map(|line| format!("{}: {}", text.name, line.trim())).collect::<Vec<_>>()
    });
    assert_none("left to do", &lines.collect::<Vec<_>>());
}

#[test]
fn only_those_who_may_know_a_library_name_it() {
    let sources = texts("src", ".rs");
    let of = |modules: &'static [&'static str]| {
        move |text: &Text| text.module().is_none_or(|module| modules.contains(&module))
    };
    let protobuf = of(&["pb", "grpc", "http", "cli", "bench"]);
    let protobuf = |text: &Text| protobuf(text) || text.name.starts_with("src/config/xds");
    let protobuf = mentions(&sources, &["crate::pb", "prost"], protobuf);
    assert_none("protobuf", &protobuf);
    assert_none("printing", &mentions(&sources, &["println!", "eprintln!", "print!", "eprint!"], of(&["cli"])));
    // Rules are read from events; mappings of metrics and of fields, by the typed layer.
    let mappings = ["src/telemetry/metrics/mapper.rs", "src/replay/field_map.rs"];
    let yaml = |text: &Text| text.name.starts_with("src/config/yaml") || mappings.contains(&text.name.as_str());
    assert_none("YAML", &mentions(&sources, &["granit_parser", "serde_saphyr"], yaml));
    assert_none("the command line", &mentions(&sources, &["clap"], of(&["cli"])));
    let network = of(&["grpc", "http", "server", "cli", "pb", "bench"]);
    // The exporter speaks gRPC to the collector; refusals are read from the events of h2.
    let also = ["src/telemetry/otlp.rs", "src/telemetry/http2_refusals.rs"];
    let is_xds = |text: &Text| text.name.starts_with("src/config/xds");
    let network = |text: &Text| network(text) || is_xds(text) || also.contains(&text.name.as_str());
    assert_none("HTTP and gRPC", &mentions(&sources, &["tonic", "axum", "hyper::", "hyper_util", "h2::"], network));
    assert_none("file events", &mentions(&sources, &["notify::"], |text| text.name.starts_with("src/config/files")));
    assert_none("OpenTelemetry", &mentions(&sources, &["opentelemetry"], of(&["telemetry"])));
    // The pure ones: time and input come to them as arguments.
    let pure = ["algorithm", "rule", "limit", "request", "decision"];
    let words = ["SystemTime", "Instant::now", "std::fs", "std::env", "tokio", "tracing::"];
    let found = mentions(&sources, &words, |text| text.module().is_none_or(|module| !pure.contains(&module)));
    assert_none("what is pure has no clock, no files, no log", &found);
}

/// The fenced YAML blocks of a document that are rule files, with the lines on which they begin.
fn rule_blocks(document: &Text) -> Vec<(usize, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(document.content.lines()) {
        match &mut open {
            None if line.trim() == "```yaml" => open = Some((number + 1, String::new())),
            None => {}
            Some(_) if line.trim() == "```" => blocks.extend(open.take()),
            Some((_, block)) => *block += &format!("{line}\n"),
        }
    }
    blocks.retain(|(_, block)| {
        block.lines().find(|line| !line.starts_with('#')).is_some_and(|it| it.starts_with("domain:"))
    });
    blocks
}

#[test]
fn the_rules_in_the_documentation_load() {
    let mut documents = texts("docs", ".md");
    documents.push(Text { name: "README.md".to_owned(), content: read(&repository("README.md")) });
    let (mut found, mut checked) = (Vec::new(), 0);
    for document in &documents {
        for (line, block) in rule_blocks(document) {
            checked += 1;
            let name = format!("{} from line {line}", document.name).into();
            let source = RuleText { name, bytes: block.into_bytes(), documents: Documents::All };
            if let Err(problems) = compile(&[source], &CompileOptions::default()) {
                found.extend(problems.errors().iter().map(ToString::to_string));
            }
        }
    }
    assert_none("examples that do not load", &found);
    assert!(checked > 5, "only {checked} examples were found");
}

#[test]
fn what_users_read_first_is_there() {
    for (file, word) in [("README.md", "# "), ("CHANGELOG.md", "# "), ("LICENSE", "Apache License")] {
        assert!(read(&repository(file)).contains(word), "{file}");
    }
    for script in ["tests/run.sh", "envoy/demo.sh", "envoy/install.sh", "deploy/install-tools.sh", ".ci/run"] {
        let path: PathBuf = repository(script);
        assert!(read(&path).starts_with("#!/usr/bin/env bash\n"), "{script}");
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions());
        assert_ne!(mode & 0o111, 0, "{script} cannot be run");
    }
}
