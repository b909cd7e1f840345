//! The sample of keys, and the form of values.

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use tempfile::tempdir;
use tollkeeper::decide::log::KeySample;
use tollkeeper::decide::log::value_form::ValueForm;
use tollkeeper::limit::counter_path;
use tollkeeper::limit::request::Entry;

use super::{decisions, logging_service};
use kit::fixtures::shop_request;

const RULES: &str = "descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: path, value: /api/*, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 1000000}}
";

fn contains(share: f64, domain: &str, entries: &[(Vec<u8>, Vec<u8>)]) -> bool {
    let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
    KeySample { share }.contains(&counter_path::CounterPath { domain, entries: &entries, shared: &[], candidate: None })
}

proptest! {
    #[test]
    fn larger_sample_contains_every_smaller_one(
        domain in ".{0,8}",
        entries in proptest::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..3),
        shares in (0.0..=1.0, 0.0..=1.0),
    ) {
        let (smaller, larger) = if shares.0 <= shares.1 { shares } else { (shares.1, shares.0) };
        prop_assert!(!contains(smaller, &domain, &entries) || contains(larger, &domain, &entries));
        prop_assert!(contains(1.0, &domain, &entries));
        prop_assert!(!contains(0.0, &domain, &entries));
    }
}

#[test]
fn sample_has_its_share_of_the_keys_and_is_the_same_in_every_version() {
    let key = |number: u32| vec![(b"user".to_vec(), number.to_string().into_bytes())];
    let sampled: Vec<u32> = (0..100_000).filter(|number| contains(0.01, "shop", &key(*number))).collect();
    assert!((900..1100).contains(&sampled.len()), "{}", sampled.len());
    // Replicas of different versions must agree: a change of the hash changes these numbers.
    assert_eq!(sampled[..5], [4, 142, 167, 236, 312]);
}

/// Decisions on `users` by a service that logs a share of the keys, as the number of the user and the hits counted.
fn sampled_log(file: &Path, users: &[u32]) -> Vec<(String, u64)> {
    let env = [("TOLLKEEPER_DECISION_LOG_WHEN", "all"), ("TOLLKEEPER_DECISION_LOG_SAMPLE", "0.2")];
    let service = logging_service(file, &env, RULES);
    for user in users {
        service.decide(&shop_request(&format!("user={user}"))).unwrap();
    }
    service.finish_log();
    let facts = |decision: tollkeeper::decide::log::record::DecisionRecord<'static>| {
        let descriptor = &decision.descriptors[0];
        assert!(descriptor.sampled);
        let user = descriptor.entries[0].value.as_deref().unwrap().to_owned();
        (user, descriptor.limits[0].result.unwrap().before)
    };
    decisions(file).into_iter().map(facts).collect()
}

#[test]
fn sampled_key_has_all_its_decisions_and_replicas_choose_the_same_keys() {
    let directory = tempdir().unwrap();
    let users: Vec<u32> = (0..400).map(|number| number % 100).collect();
    let logs = ["a", "b"].map(|name| sampled_log(&directory.path().join(name), &users));
    assert_eq!(logs[0], logs[1]);
    let keys: BTreeSet<_> = logs[0].iter().map(|(user, _)| user).collect();
    assert!((5..50).contains(&keys.len()), "{keys:?}");
    assert_eq!(logs[0].len(), 4 * keys.len());
    for key in keys {
        let sequence: Vec<_> = logs[0].iter().filter(|(user, _)| user == key).map(|(_, before)| *before).collect();
        assert_eq!(sequence, [0, 1, 2, 3]);
    }
}

#[test]
fn values_that_share_a_counter_are_sampled_together() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    for share in ["0.001", "0.3", "0.6", "0.999"] {
        let env = [("TOLLKEEPER_DECISION_LOG_WHEN", "all"), ("TOLLKEEPER_DECISION_LOG_SAMPLE", share)];
        let service = logging_service(&file, &env, RULES);
        (0..50).for_each(|number| drop(service.decide(&shop_request(&format!("path=/api/{number}")))));
        service.finish_log();
        let count = decisions(&file).len();
        assert!(count == 0 || count == 50, "{count}");
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn decision_with_a_sampled_descriptor_tells_which_descriptors_are_sampled() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let env = [("TOLLKEEPER_DECISION_LOG_WHEN", "all"), ("TOLLKEEPER_DECISION_LOG_SAMPLE", "0.5")];
    let service = logging_service(&file, &env, RULES);
    (0..50).for_each(|number| drop(service.decide(&shop_request(&format!("user={number}; user=other{number}")))));
    service.finish_log();
    let flags: BTreeSet<_> = decisions(&file)
        .iter()
        .map(|decision| decision.descriptors.iter().map(|descriptor| descriptor.sampled).collect::<Vec<_>>())
        .collect();
    assert_eq!(flags, BTreeSet::from([vec![false, true], vec![true, false], vec![true, true]]));
}

proptest! {
    #[test]
    fn hashes_are_equal_for_equal_keys_and_values_only(
        key in any::<Vec<u8>>(),
        value in any::<Vec<u8>>(),
        other in any::<Vec<u8>>(),
    ) {
        let (one, two) = (ValueForm::hashed_with("a key of sixteen"), ValueForm::hashed_with("another secret key"));
        let entry = Entry { key: &key, value: &value };
        let hash = |form: &ValueForm, entry: &Entry<'_>| form.build_entry_record(entry).value_hash.unwrap().to_string();
        let again = ValueForm::hashed_with("a key of sixteen");
        prop_assert_eq!(hash(&one, &entry), hash(&again, &entry));
        prop_assert_ne!(hash(&one, &entry), hash(&two, &entry));
        prop_assert_eq!(hash(&one, &entry) == hash(&one, &Entry { key: &key, value: &other }), value == other);
        prop_assert_eq!(hash(&one, &entry) == hash(&one, &Entry { key: &other, value: &value }), key == other);
        let record = one.build_entry_record(&entry);
        prop_assert!(record.value.is_none() && record.value_base64.is_none());
        let omitted = ValueForm::Omitted.build_entry_record(&entry);
        prop_assert!(omitted.value_bytes().is_none() && omitted.value_hash.is_none());
    }
}

#[test]
fn values_are_hashed_or_left_out_in_the_whole_file() {
    let directory = tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "a key of sixteen\n").unwrap();
    let text = |env: &[(&str, &str)]| {
        let file = directory.path().join("log");
        let all = [("TOLLKEEPER_DECISION_LOG_WHEN", "all")];
        let service = logging_service(&file, &[&all[..], env].concat(), RULES);
        service.decide(&shop_request("user=alice")).unwrap();
        service.finish_log();
        let decisions = decisions(&file);
        let entry = decisions[0].descriptors[0].entries[0].clone();
        let text = kit::read(&file);
        std::fs::remove_file(&file).unwrap();
        (text.contains("alice"), entry.value_hash.map(|hash| hash.to_string()))
    };
    let hashed = ("TOLLKEEPER_DECISION_LOG_VALUES", "hashed");
    let by_text = text(&[hashed, ("TOLLKEEPER_DECISION_LOG_HASH_KEY", "a key of sixteen")]);
    let by_file = text(&[hashed, ("TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE", secret.to_str().unwrap())]);
    assert!(!by_text.0 && by_text.1.is_some());
    assert_eq!(by_text, by_file);
    assert_eq!(text(&[("TOLLKEEPER_DECISION_LOG_VALUES", "none")]), (false, None));
    assert_eq!(text(&[]), (true, None));
}
