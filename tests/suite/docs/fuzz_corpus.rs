//! Inputs found by the fuzzers: every file of `fuzz/corpus/` runs through its check. `fuzz/README.md` describes how to
//! find more.

#[path = "../../../fuzz/checks/decide.rs"]
mod decide;
#[path = "../../../fuzz/checks/decider.rs"]
mod decider;
#[path = "../../../fuzz/checks/charges.rs"]
mod charges;
#[path = "../../../fuzz/checks/json.rs"]
mod json;
#[path = "../../../fuzz/checks/mapper.rs"]
mod mapper;
#[path = "../../../fuzz/checks/redis.rs"]
mod redis;
#[path = "../../../fuzz/checks/resources.rs"]
mod resources;
#[path = "../../../fuzz/checks/rules.rs"]
mod rules;
#[path = "../../../fuzz/checks/settings.rs"]
mod settings;
#[path = "../../../fuzz/checks/wildcard.rs"]
mod wildcard;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kit::repository;

type Check = fn(&[u8]);

const CHECKS: [(&str, Check); 9] = [
    ("decide", decide::check),
    ("charges", charges::check),
    ("json", json::check),
    ("mapper", mapper::check),
    ("redis", redis::check),
    ("resources", resources::check),
    ("rules", rules::check),
    ("settings", settings::check),
    ("wildcard", wildcard::check),
];

/// File names in a directory of `fuzz/`, without `ending`.
fn names(directory: &str, ending: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(repository("fuzz").join(directory)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| name.strip_suffix(ending).unwrap_or_else(|| panic!("{directory}/{name}")).to_owned()).collect()
}

#[test]
fn every_corpus_input_passes_its_check() {
    for (target, check) in CHECKS {
        // For a change, one of three inputs, and all that were a failure: those have a name.
        let is_tried = |path: &Path, number: usize| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let has_name = !name.bytes().all(|byte| byte.is_ascii_hexdigit());
            has_name || number.is_multiple_of(3) || kit::is_nightly()
        };
        let mut paths: Vec<_> =
            fs::read_dir(repository("fuzz/corpus").join(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let mut inputs = 0;
        for (_, path) in (0..).zip(paths).filter(|(number, path)| is_tried(path, *number)) {
            let data = fs::read(&path).unwrap();
            // Names the input; the check itself only reports the failure.
            if std::panic::catch_unwind(|| check(&data)).is_err() {
                panic!("{} does not pass", path.display());
            }
            inputs += 1;
        }
        assert!(inputs > 5, "{target} has {inputs} inputs");
    }
}

#[test]
fn every_check_has_a_fuzz_target_and_corpus() {
    let checks: BTreeSet<_> = CHECKS.iter().map(|(target, _)| (*target).to_owned()).collect();
    assert_eq!(names("fuzz_targets", ".rs"), checks);
    assert_eq!(names("corpus", ""), checks);
    assert_eq!(names("dictionaries", ".dict"), checks);
}

#[test]
fn corpus_stays_small() {
    const MAX_BYTES: u64 = 1 << 20;
    let mut bytes = 0;
    for (target, _) in CHECKS {
        let entries = fs::read_dir(repository("fuzz/corpus").join(target)).unwrap();
        bytes += entries.map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
    }
    assert!(bytes <= MAX_BYTES, "{bytes} bytes");
}
