//! Decides a request by rules of every kind, with counters in memory, as the service does.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::{RateLimitRequest, RateLimitResponse};
use tollkeeper::decide::decider::Decider;
use tollkeeper::decide::decision::{DecideError, DecisionContext};
use tollkeeper::limit::slot::SlotCaller;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::value_set_files::{SetFileText, SetFiles};
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::table_loader::{RuleFilePaths, TableLoader};
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::grpc::{decode, encode};
use tollkeeper::settings::Settings;
use tollkeeper::store::StoreContext;
use tollkeeper::store::memory::MemoryStore;

/// 2026-01-01.
const NOW: Time = Time::from_secs(1_767_225_600);

/// Rules with every algorithm, wildcards, `match`, entries in any order, backtracking, shared counters, lists, quotas,
/// shadow mode, replacement, metadata, names by value, windows, bans, active times, sets from files, plans, a
/// table, concurrent limits and reservations.
const RULES: &str = include_str!("decider.yaml");

/// Files with sets that the rules name.
const SETS: [(&str, &str); 2] = [("values.txt", "x\nyy\n10.1.2.3\n"), ("networks.txt", "10.0.0.0/8\n2001:db8::/32\n")];

static SET: LazyLock<RuleSet> = LazyLock::new(|| {
    let source =
        RuleText { name: Arc::from("decider"), bytes: RULES.as_bytes().to_vec(), documents: DocumentSelection::All };
    let set = |(name, text): (&str, &str)| SetFileText {
        rule_file: Arc::from("decider"),
        name: Arc::from(name),
        path: Arc::from(name),
        contents: Ok(text.as_bytes().to_vec().into()),
    };
    let set_files = Arc::new(SetFiles::from(Vec::from(SETS.map(set))));
    let options = CompileOptions { set_files, ..CompileOptions::default() };
    let compiled = compile_texts(&[source], &options).unwrap_or_else(|problems| panic!("{problems}"));
    let mut loader = TableLoader::with_replacement_files(HashMap::from([("customers".to_owned(), table_path())]));
    let tables = loader.prepare_tables(&compiled.domains, &RuleFilePaths::default(), NOW);
    let tables = tables.unwrap_or_else(|problems| panic!("{problems}"));
    let mut rules = RuleSet::new(compiled.domains);
    loader.attach_to_rules(tables, &mut rules);
    rules
});

/// Path of the table, from the directory of this repository or from that of the fuzzers.
fn table_path() -> PathBuf {
    let mut directories = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let path = directories.find_map(|path| Some(path.join("fuzz/checks/decider.csv")).filter(|path| path.exists()));
    path.expect("the table stands beside the checks")
}

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let on = ["LIMIT_RESPONSE_HEADERS_ENABLED", "RESPONSE_DYNAMIC_METADATA", "TOLLKEEPER_METADATA_VERDICTS"];
    let variables = on.into_iter().map(|name| (OsString::from(name), OsString::from("true")));
    Settings::from_env(variables).expect("valid settings").0
});

/// Times of equal requests: at once, after a minute, and in the next window of each calendar, after all bans.
const LATER_US: [u64; 4] = [0, 1, 90_000_000, 40 * 86_400_000_000];

/// Responses to equal requests at four times; none if the request is an error.
pub(crate) fn decide(message: &RateLimitRequest) -> Vec<RateLimitResponse> {
    let decider = Decider::new(MemoryStore::new(1 << 20).into(), SETTINGS.decisions.clone(), Arc::default());
    let request = decode::convert_request(message);
    let mut responses = Vec::new();
    for later_us in LATER_US {
        let now = NOW.plus_us(later_us);
        let context = DecisionContext {
            rules: Some(&SET),
            max_delay_us: 1_000_000,
            store: StoreContext { now, deadline: None, span_ref: None, charge_times: &[] },
            slots: SlotCaller::default(),
        };
        let decided = decider.decide_synchronously(context, &request);
        let is_invalid = message.domain.is_empty() || message.descriptors.is_empty();
        match &decided {
            Err(DecideError::LiteralFormatter) => assert!(!is_invalid && has_formatter(message), "{message:?}"),
            _ => assert_eq!(decided.is_err(), is_invalid, "{message:?}"),
        }
        responses.extend(decided.ok().map(|decision| encode::encode_response(&decision)));
    }
    responses
}

/// True if a value begins as a formatter that Envoy sent as text.
fn has_formatter(message: &RateLimitRequest) -> bool {
    message.descriptors.iter().flat_map(|descriptor| &descriptor.entries).any(|entry| entry.value.starts_with(b"%"))
}
