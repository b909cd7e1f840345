//! Files of tables: formats, reuse, and a swap while threads look up.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ::tollkeeper::base::clock::Time;
use ::tollkeeper::limit::request::Entry;
use ::tollkeeper::rules::compile::options::CompileOptions;
use ::tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use ::tollkeeper::rules::plan_table::live::PlanSource;
use ::tollkeeper::rules::rule::set::RuleSet;
use ::tollkeeper::rules::table_file::read_table;
use ::tollkeeper::rules::table_loader::{RuleFilePaths, TableLoader};
use ::tollkeeper::rules::yaml::DocumentSelection;

use super::{RULES, TABLE};

fn compiled(directory: &Path) -> CompiledRules {
    let name = directory.join("rules.yaml").to_str().unwrap().into();
    let text = RuleText { name, bytes: RULES.as_bytes().to_vec(), documents: DocumentSelection::All };
    compile_texts(&[text], &CompileOptions::default()).expect("the rules are right")
}

fn load(loader: &mut TableLoader, directory: &Path) -> RuleSet {
    let rules = compiled(directory);
    let prepared =
        loader.prepare_tables(&rules.domains, &RuleFilePaths::default(), Time::from_micros(1)).expect("good");
    let mut set = RuleSet::new(rules.domains);
    loader.attach_to_rules(prepared, &mut set);
    set
}

/// The plan of a tenant, and how it was found.
fn plan_of(rules: &RuleSet, tenant: &str) -> (String, PlanSource) {
    let domain = rules.domain("shop").expect("it is there");
    let entries = [Entry { key: b"tenant", value: tenant.as_bytes() }];
    let found = rules.find_rule(domain, &entries).expect("the rule matches");
    let chosen = found.rule.choose_plan(domain, &entries).expect("the rule has plans");
    (chosen.rule.rule.plan.as_ref().expect("a plan").name.to_string(), chosen.source)
}

fn replace(path: PathBuf, text: &str) {
    let new = path.with_extension("tmp");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

#[test]
fn swap_during_decisions_never_shows_a_missing_row() {
    const LOOK_UPS: usize = 100_000;
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("customers.csv");
    let table = |plan: &str| (0..2000).fold("value,plan\n".to_owned(), |text, row| text + &format!("t{row},{plan}\n"));
    replace(path.clone(), &table("gold"));
    let mut loader = TableLoader::default();
    let rules = load(&mut loader, files.path());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|start| {
                let rules = &rules;
                scope.spawn(move || {
                    let mut plans: HashMap<String, usize> = HashMap::new();
                    for number in 0..LOOK_UPS / 2 {
                        let (plan, source) = plan_of(rules, &format!("t{}", (number + start) % 2000));
                        assert_eq!(source, PlanSource::Row);
                        *plans.entry(plan).or_default() += 1;
                    }
                    plans
                })
            })
            .collect();
        let swaps = scope.spawn(|| {
            let mut swaps = 0;
            while !done.load(Ordering::Relaxed) {
                replace(path.clone(), &table(if swaps % 2 == 0 { "platinum" } else { "gold" }));
                swaps += loader.reload_changed_files(&rules, Time::from_micros(2)).expect("good").len();
            }
            swaps
        });
        let plans: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(swaps.join().unwrap() > 1);
        assert!(plans.iter().all(|plans| plans.keys().all(|plan| plan == "gold" || plan == "platinum")), "{plans:?}");
    });
}

#[test]
fn unchanged_table_is_not_read_again() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("customers.csv");
    replace(path.clone(), TABLE);
    let mut loader = TableLoader::default();
    load(&mut loader, files.path());
    // Unreadable contents of the same stamp cannot be made; a second load at a later time keeps the time of the first.
    let rules = load(&mut loader, files.path());
    assert_eq!(loader.table_reports()[0].loaded_at.as_deref(), Some("1970-01-01T00:00:00.000001Z"));
    assert!(loader.reload_changed_files(&rules, Time::from_micros(9)).expect("good").is_empty());
    assert_eq!(plan_of(&rules, "big, and quoted"), ("platinum".to_owned(), PlanSource::Row));
    replace(path, "value,plan\nacme,free\n");
    assert_eq!(loader.reload_changed_files(&rules, Time::from_micros(9)).expect("good").len(), 1);
    assert_eq!(plan_of(&rules, "acme"), ("free".to_owned(), PlanSource::Row));
    assert_eq!(plan_of(&rules, "own"), ("free".to_owned(), PlanSource::Default));
}

#[test]
fn files_are_read_by_extension_and_every_problem_has_its_line() {
    let files = tempfile::tempdir().unwrap();
    let read = |name: &str, text: &[u8]| {
        let path = files.path().join(name);
        fs::write(&path, text).unwrap();
        match read_table(&path, None) {
            Ok(read) => Ok(read.table.row_count()),
            Err(found) => Err(found.to_string().replace(&format!("{}/", files.path().display()), "")),
        }
    };
    assert_eq!(read("a.csv", b"\xef\xbb\xbfvalue,plan\n\xff\xfe,gold\n"), Ok(1));
    assert_eq!(read("a.csv", b"id,plan,value\r\n1,gold,a\r\n2,5/minute,b\r\n"), Ok(2));
    assert_eq!(read("a.csv", b"value,plan,limit\na,gold,\nb,,5/minute\n"), Ok(2));
    assert_eq!(read("a.csv", b"value,plan\n"), Ok(0));
    // A heading or a row without an end takes no memory without a bound.
    for text in [
        [b"value,plan".as_slice(), &b",x".repeat(4 << 20)].concat(),
        [b"value,plan\n\"".as_slice(), &b"x".repeat(4 << 20)].concat(),
    ] {
        let found = read("a.csv", &text).unwrap_err();
        assert!(found.contains("a row is longer than 1048576 bytes"), "{found}");
    }
    let json = br#"{"value": "a", "plan": "gold", "since": 2020}

{"value": 17, "limit": "100/5 minutes"}
{"value": "b\n", "plan": "gold"}"#;
    assert_eq!(read("a.jsonl", json), Ok(3));
    let lines = |result: Result<usize, String>| {
        result
            .unwrap_err()
            .lines()
            .map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(": "))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        lines(read("a.csv", b"")),
        [
            "a.csv:1:1: the first line does not name the columns `value` and `plan`, or `limit`, begin the file with the line `value,plan`"
        ]
    );
    let found = lines(read("a.csv", b"value,plan,limit\na,gold,5/minute\n\nb,g ld,\nc,gold,\nc,gold,\n"));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("a.csv:2:1: a row with a plan and a limit"), "{found:?}");
    assert!(found[1].starts_with("a.csv:4:1: `g ld` is not the name of a plan"), "{found:?}");
    assert!(found[2].starts_with("a.csv:6:1: the value 'c'"), "{found:?}");
    let found = lines(read("a.jsonl", b"{\"value\": 1.5, \"plan\": \"gold\"}\n{\"plan\": \"gold\"}\nnonsense\n"));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[2].starts_with("a.jsonl:3:1: not a row"), "{found:?}");
}

#[test]
fn files_of_one_domain_define_each_name_once() {
    let text = |name: &str, text: &str| RuleText {
        name: name.into(),
        bytes: text.as_bytes().to_vec(),
        documents: DocumentSelection::All,
    };
    let plans = "domain: a\nplans: { free: { unit: day, requests_per_unit: 1 } }\ntables: { t: { file: t.csv } }\n";
    let rules = "domain: a\ndescriptors:\n- { key: tenant, plan: { from: t, default: free } }\n";
    let options = CompileOptions { merge_domains: true, ..CompileOptions::default() };
    // Plans of a later file apply to the rules of an earlier one.
    let compiled = compile_texts(&[text("a.yaml", rules), text("b.yaml", plans)], &options).expect("they are merged");
    assert_eq!(compiled.domains[0].tables.len(), 1);
    let twice = compile_texts(&[text("a.yaml", plans), text("b.yaml", plans)], &options).unwrap_err().to_string();
    for expected in
        ["b.yaml:2:10: the plan 'free' is defined twice, the first is at a.yaml:2:10", "the table 't' is defined twice"]
    {
        assert!(twice.contains(expected), "{twice}");
    }
}
