//! What the repository promises about itself and no compiler checks: the order of modules, who may know what, the size
//! of files and rooms, lock files, and that the examples in the documentation load.
//!
//! Everything here reads text, so it knows nothing of macros or renamed imports; it is meant for slips, not for malice.

#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/sizes.rs"]
mod sizes;
#[path = "tidy/sources.rs"]
mod sources;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::yaml::DocumentSelection;

use self::sources::module_path;
use kit::{read, repository};

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
                // Packages below `tests` build there.
                if !path.ends_with("target") {
                    directories.push(path);
                }
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
    /// True if the source file belongs to one of these modules (`limit`, `serve::grpc`), or is `main.rs` or the root of a crate.
    fn is_of(&self, modules: &[&str]) -> bool {
        let module = module_path(&self.name).join("::");
        let is_below = |ancestor: &str| {
            module.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        module.is_empty() || modules.iter().any(|ancestor| is_below(ancestor))
    }

    /// The lines that are code, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.content.lines()).filter(|(_, line)| !line.trim_start().starts_with("//"))
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

/// Modules that a file declares, in its order.
fn declared_modules(file: &str) -> Vec<String> {
    let declared = read(&repository(file));
    let declared = declared.lines().filter_map(|line| line.split_once("mod ")?.1.strip_suffix(';'));
    declared.map(str::to_owned).collect()
}

/// Roots of the crates, each above those that use it.
const CRATE_ROOTS: [&str; 5] =
    ["src/core.rs", "src/store_crate.rs", "src/rules_crate.rs", "src/service.rs", "src/lib.rs"];

/// The rooms in reading order, of all crates.
fn rooms() -> Vec<String> {
    CRATE_ROOTS.into_iter().flat_map(declared_modules).collect()
}

/// Place of the module `name` in `modules`.
fn place(modules: &[String], name: Option<&str>) -> Option<usize> {
    name.and_then(|name| modules.iter().position(|other| other == name))
}

/// The scripts run for hours, so a row whose text has changed would be found late.
#[test]
fn rows_of_mutations_fit_the_sources() {
    for script in ["quota.py", "streams.py"] {
        let script = repository("tests/mutations").join(script);
        let copy = std::env::temp_dir().join("copy");
        let listed = Command::new("python3").arg("-B").arg(script).arg("--list").arg(copy).output().unwrap();
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    }
}

#[test]
fn a_module_uses_only_modules_above_it() {
    let rooms = rooms();
    assert!((5..=10).contains(&rooms.len()), "{rooms:?}");
    let parts: Vec<_> = rooms.iter().map(|room| declared_modules(&format!("src/{room}.rs"))).collect();
    let mut found = Vec::new();
    for (user, imports) in imports::IMPORTS.iter() {
        let mut user_path = user.split("::");
        let Some(own_room) = place(&rooms, user_path.next()) else { continue };
        let own_part = place(&parts[own_room], user_path.next());
        for used in imports.keys() {
            let mut used_path = used.split("::");
            let Some(room) = place(&rooms, used_path.next()) else { panic!("{used} is in no room") };
            let is_below = if room == own_room {
                let part = place(&parts[room], used_path.next());
                // The file of a module uses its children, or they use it; the test of circles says which.
                own_part.zip(part).is_some_and(|(own, part)| part > own)
            } else {
                room > own_room
            };
            if is_below {
                found.push(format!("{user} uses {used}, which stands below it"));
            }
        }
    }
    assert_none("modules used against the order of the rooms and of their modules", &found);
}

#[test]
fn architecture_lists_the_rooms_in_reading_order() {
    let page = read(&repository("docs/architecture.md"));
    let rows = page.lines().skip_while(|line| *line != "## Rooms").skip(1);
    let rows = rows.take_while(|line| !line.starts_with("## ")).filter_map(|line| line.strip_prefix("| `"));
    let rooms: Vec<_> = rows.filter_map(|row| row.split('`').next()).collect();
    assert_eq!(rooms, self::rooms(), "rooms in docs/architecture.md, and in {CRATE_ROOTS:?}");
}

#[test]
fn files_that_documents_name_exist() {
    let mut documents = texts("docs", ".md");
    documents.extend(texts("tests", ".md"));
    documents.extend(texts("src", ".lua"));
    for name in ["README.md", "CONTRIBUTING.md"] {
        documents.push(Text { name: name.to_owned(), content: read(&repository(name)) });
    }
    let path = regex::Regex::new(r"\bsrc/[\w/]+(?:\.\w+)?").unwrap();
    let (mut found, mut checked) = (Vec::new(), 0);
    for document in documents.iter().filter(|document| !document.name.contains("/bench/")) {
        for named in path.find_iter(&document.content) {
            checked += 1;
            if !repository(named.as_str()).exists() {
                found.push(format!("{}: {}", document.name, named.as_str()));
            }
        }
    }
    assert_none("files that documents name and that are not there", &found);
    assert!(checked > 10, "only {checked} paths were found");
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
    let of = |modules: &'static [&'static str]| move |text: &Text| text.is_of(modules);
    let protobuf = of(&["base::pb", "serve::grpc", "serve::quota", "serve::http", "tools::cli"]);
    // The exporter of metrics encodes the messages of OpenTelemetry itself.
    let also = ["src/telemetry/otlp_metrics.rs"];
    let is_xds = |text: &Text| text.name.starts_with("src/rules/xds");
    let protobuf = |text: &Text| protobuf(text) || is_xds(text) || also.contains(&text.name.as_str());
    let protobuf = mentions(&sources, &["crate::base::pb", "prost"], protobuf);
    assert_none("protobuf", &protobuf);
    assert_none("printing", &mentions(&sources, &["println!", "eprintln!", "print!", "eprint!"], of(&["tools::cli"])));
    // Rules are read from events; mappings of metrics and of fields, by the typed layer.
    let mappings = ["src/telemetry/metrics/mapper.rs", "src/tools/replay/field_map.rs"];
    let yaml = |text: &Text| text.name.starts_with("src/rules/yaml") || mappings.contains(&text.name.as_str());
    assert_none("YAML", &mentions(&sources, &["granit_parser", "serde_saphyr"], yaml));
    assert_none("the command line", &mentions(&sources, &["clap"], of(&["tools::cli"])));
    let network = of(&["base::pb", "serve::grpc", "serve::quota", "serve::http", "serve::server", "tools::cli"]);
    // The exporters speak gRPC to the collector; refusals are read from the events of h2.
    let also = ["src/telemetry/otlp.rs", "src/telemetry/otlp_metrics.rs", "src/telemetry/http2_refusals.rs"];
    let network = |text: &Text| network(text) || is_xds(text) || also.contains(&text.name.as_str());
    assert_none("HTTP and gRPC", &mentions(&sources, &["tonic", "axum", "hyper::", "hyper_util", "h2::"], network));
    assert_none("file events", &mentions(&sources, &["notify::"], |text| text.name.starts_with("src/rules/files")));
    assert_none("OpenTelemetry", &mentions(&sources, &["opentelemetry"], of(&["telemetry"])));
    // The pure ones: time and input come to them as arguments.
    let pure = ["limit", "rules::rule", "decide::decision"];
    let words = ["SystemTime", "Instant::now", "std::fs", "std::env", "tokio", "tracing::"];
    let found = mentions(&sources, &words, |text| module_path(&text.name).is_empty() || !text.is_of(&pure));
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
    // Some rules of the cookbook name files of values; the module `cookbook` loads all of its rules, with their files.
    documents.retain(|document| document.name != "docs/cookbook.md");
    documents.push(Text { name: "README.md".to_owned(), content: read(&repository("README.md")) });
    let (mut found, mut checked) = (Vec::new(), 0);
    for document in &documents {
        for (line, block) in rule_blocks(document) {
            checked += 1;
            let name = format!("{} from line {line}", document.name).into();
            let source = RuleText { name, bytes: block.into_bytes(), documents: DocumentSelection::All };
            if let Err(problems) = compile_texts(&[source], &CompileOptions::default()) {
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
    for script in
        ["tests/run.sh", "envoy/demo.sh", "envoy/install.sh", "deploy/install-tools.sh", ".ci/run", ".ci/generate"]
    {
        let path: PathBuf = repository(script);
        assert!(read(&path).starts_with("#!/usr/bin/env bash\n"), "{script}");
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions());
        assert_ne!(mode & 0o111, 0, "{script} cannot be run");
    }
}

/// Names in `[dependencies]` of a crate's manifest.
fn dependencies_in_manifest(text: &str) -> Vec<&str> {
    let section = text.split("\n[").find_map(|section| section.strip_prefix("dependencies]\n")).unwrap();
    let lines = section.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split(['.', ' ', '=']).next().unwrap()).collect()
}

#[test]
fn packages_outside_the_workspace_lock_what_tollkeeper_depends_on() {
    let mut missing = Vec::new();
    for lock in ["fuzz/Cargo.lock", "tests/bench/Cargo.lock", "tests/bench/redis_clients/Cargo.lock"] {
        let text = read(&repository(lock));
        for (name, manifest) in [
            ("tollkeeper", "Cargo.toml"),
            ("tollkeeper-core", "core/Cargo.toml"),
            ("tollkeeper-rules", "rules/Cargo.toml"),
            ("tollkeeper-service", "service/Cargo.toml"),
            ("tollkeeper-store", "store/Cargo.toml"),
        ] {
            let manifest = read(&repository(manifest));
            let locked = text.split("[[package]]").find(|package| package.contains(&format!("name = \"{name}\"\n")));
            let locked = locked.unwrap_or_default();
            for dependency in dependencies_in_manifest(&manifest) {
                // A version is added where the lock has several.
                if !["\"", " "].iter().any(|end| locked.contains(&format!("\"{dependency}{end}"))) {
                    missing.push(format!("{lock}: {name} without {dependency}; run `cargo fetch` there"));
                }
            }
        }
    }
    assert_none("lock files that `--locked` refuses", &missing);
}
