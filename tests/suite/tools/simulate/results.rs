//! Figures: what is counted, compared, estimated and warned of.

use serde_json::json;

use super::{Files, Log, NEW_RULES, OLD_RULES, limit};

#[test]
fn new_rules_are_compared_with_the_recorded_ones() {
    let files = Files::new().with("log.jsonl", Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text());
    let results = files.simulate("--rules new.yaml --traffic log.jsonl --json").json();
    assert_eq!(results["traffic"]["requests"], 12);
    assert_eq!((&results["new"]["rejected"], &results["old"]["rejected"]), (&json!(7), &json!(5)));
    assert_eq!(results["changes"]["newly_rejected"], 2);
    assert_eq!(results["changes"]["newly_admitted"], 0);
    let keys = &results["changes"]["newly_rejected_keys"];
    assert_eq!(*keys, json!([{"limit": "shop.login", "key": "login=ann", "requests": 2, "error": 0}]));
    let new = &limit(&results, "shop.login")["new"];
    assert_eq!(new["limit"], "3 per minute by sliding_window_log");
    assert_eq!((&new["requests"], &new["rejected"]), (&json!(12), &json!(7)));
    assert_eq!((&new["keys"], &new["rejected_keys"]), (&json!(2), &json!(1)));
    assert_eq!(new["longest_run"], json!({"requests": 7, "seconds": 0.6, "key": "login=ann"}));
    assert_eq!(limit(&results, "shop.login")["old"]["rejected"], 5);
    assert_eq!(results["timeline"]["requests"], json!([10, 2]));
    assert_eq!(results["timeline"]["rejected"], json!([7, 0]));
    assert_eq!(results["timeline"]["rejected_before"], json!([5, 0]));
    assert_eq!(results["warnings"], json!([]));
}

#[test]
fn old_rules_of_files_take_the_place_of_recorded_ones() {
    let files = Files::new().with("log.jsonl", Log::without_header("p").ten_of_ann_and_two_of_bob().text());
    let results = files.simulate("--rules old.yaml --against new.yaml --traffic log.jsonl --json").json();
    assert_eq!((&results["changes"]["newly_rejected"], &results["changes"]["newly_admitted"]), (&json!(0), &json!(2)));
    assert_eq!(results["changes"]["newly_admitted_keys"][0]["key"], "login=ann");
    // Without either, nothing is compared, and the list has all rejected keys.
    let run = files.simulate("--rules new.yaml --traffic log.jsonl --json");
    run.fails_with(2);
    let results: serde_json::Value = serde_json::from_str(&run.stdout()).unwrap();
    assert!(results.get("old").is_none() && results.get("changes").is_none(), "{results}");
    assert_eq!(results["rejected_keys"][0]["requests"], 7);
}

#[test]
fn text_shows_the_same_figures() {
    let files = Files::new().with("log.jsonl", Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text());
    let page = files.simulate("--rules new.yaml --traffic log.jsonl").stdout();
    for expected in [
        "traffic   12 requests, 2023-11-14T22:13:20Z to 2023-11-14T22:13:21.2Z",
        "new       7 (58.33 %) rejected",
        "old       5 (41.67 %) rejected",
        "changes   2 newly rejected, 0 newly admitted",
        "shop.login (changed)  12        7 (58.33 %)  5 (41.67 %)  2               2     1 (50.00 %)    7 in 600.0 ms",
        "2               shop.login  login=ann",
    ] {
        assert!(page.contains(expected), "{expected} is missing:\n{page}");
    }
}

#[test]
fn limits_in_shadow_mode_count_what_they_would_reject() {
    let rules = NEW_RULES.replace("algorithm", "name: x, algorithm").replace("}}\n", "}, shadow_mode: true}\n");
    let files = Files::new().with("shadow.yaml", rules);
    let files = files.with("log.jsonl", Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text());
    let results = files.simulate("--rules shadow.yaml --traffic log.jsonl --json").json();
    assert_eq!(results["new"]["rejected"], 0);
    let of_limit = limit(&results, "shop.login");
    assert_eq!((&of_limit["shadow_mode"], &of_limit["new"]["rejected"]), (&json!(true), &json!(7)));
    assert_eq!(results["changes"]["newly_admitted"], 5);
}

#[test]
fn leaky_bucket_shows_delays() {
    let rules = "domain: shop\ndescriptors:\n- {key: login, rate_limit: {unit: second, requests_per_unit: 100, algorithm: leaky_bucket, queue_size: 3}}\n";
    let mut log = Log::new("p", OLD_RULES);
    for _ in 0..5 {
        log = log.request(0, &["login=ann"]);
    }
    let files = Files::new().with("leaky.yaml", rules).with("log.jsonl", log.text());
    let results = files.simulate("--rules leaky.yaml --traffic log.jsonl --json").json();
    let new = &limit(&results, "shop.login")["new"];
    // The third would leave after 20 ms, more than the 18 ms that its caller waits.
    assert_eq!(new["rejected"], 3);
    assert_eq!((&new["delays"]["requests"], &new["delays"]["max_us"]), (&json!(1), &json!(10_047)));
}

#[test]
fn processes_with_counters_of_their_own_do_not_share_them() {
    let log = |process, store: &str| {
        let log = Log::new(process, OLD_RULES).request(0, &["login=ann"]).request(2, &["login=ann"]);
        log.text().replace("\"store\":\"redis\"", &format!("\"store\":\"{store}\""))
    };
    for (store, rejected) in [("memory", 0), ("redis", 1)] {
        let files = Files::new().with("p.jsonl", log("p", store)).with("q.jsonl", log("q", store));
        let results = files.simulate("--rules new.yaml --traffic p.jsonl q.jsonl --json").json();
        assert_eq!(results["new"]["rejected"], rejected, "{store}");
    }
}

#[test]
fn keys_outside_the_sample_are_not_counted() {
    let mut log = Log::with_settings("p", OLD_RULES, &json!({"sample": 0.5}));
    let descriptor = |value: &str, sampled: bool| json!({"entries": [{"key": "login", "value": value}], "hits": 1, "sampled": sampled, "verdict": "ok"});
    for at_ms in 0..4 {
        log.push(at_ms, &[descriptor("ann", true), descriptor("bob", false)]);
    }
    let files = Files::new().with("log.jsonl", log.text());
    let results = files.simulate("--rules new.yaml --traffic log.jsonl --json").json();
    let new = &limit(&results, "shop.login")["new"];
    assert_eq!((&new["requests"], &new["keys"]), (&json!(4), &json!(1)));
    assert_eq!(
        results["warnings"][0],
        "the log has 50 % of the keys: numbers are of these, other keys are not counted"
    );
}

#[test]
fn global_limit_counts_the_requests_of_all_regions_once() {
    let limit_text = "{unit: minute, requests_per_unit: 6000, scope: global}";
    let rules = format!("domain: shop\ndescriptors:\n  - {{key: login, rate_limit: {limit_text}}}\n");
    let log = Log::with_settings("p", &rules, &json!({"regions": 2})).ten_of_ann_and_two_of_bob();
    let files = Files::new().with("log.jsonl", log.text()).with("global.yaml", &rules);
    let regions = [
        ("BACKEND_TYPE", "redis"),
        ("REDIS_URL", "127.0.0.1:1"),
        ("TOLLKEEPER_REGION", "eu"),
        ("TOLLKEEPER_REGIONS", "eu,us"),
        ("TOLLKEEPER_GLOBAL_REDIS_URL", "127.0.0.1:2"),
    ];
    let arguments = ["--rules", "global.yaml", "--traffic", "log.jsonl", "--json"];
    let results = files.run_with(&arguments, &regions).json();
    assert_eq!(
        limit(&results, "shop.login")["old"]["limit"],
        "6000 per minute by fixed_window, scope global, reserve 10%, max_overshoot 5%, on_region_loss share"
    );
    let new = &limit(&results, "shop.login")["new"];
    assert_eq!(
        new["limit"],
        "6000 per minute by fixed_window, scope global, reserve 10%, max_overshoot 5%, on_region_loss share"
    );
    assert_eq!(new["rejected"], 0);
    let told = "1 limits with `scope: global` are replayed as one limit without regions (give the logs of all regions)";
    let warnings = results["warnings"].as_array().unwrap();
    assert!(warnings.iter().any(|warning| warning == told), "{warnings:?}");
}

#[test]
fn losses_and_bounds_are_told() {
    let mut log = Log::new("p", OLD_RULES);
    let names: Vec<String> = (0..30_000).map(|number| format!("login=user{number}")).collect();
    for (at_ms, name) in (0..).zip(&names) {
        log = log.request(at_ms % 50_000, &[name]);
    }
    log.lines.push(
        json!({"v": 1, "type": "dropped", "process": "p", "time_us": 0, "count": 7, "reason": "queue_full"})
            .to_string(),
    );
    let files = Files::new().with("log.jsonl", log.text());
    let results = files.simulate("--rules new.yaml --traffic log.jsonl --memory 1MiB --max-keys 1000 --json").json();
    let warnings = results["warnings"].as_array().unwrap();
    let told = |start: &str, end: &str| {
        warnings.iter().any(|warning| {
            let warning = warning.as_str().unwrap();
            warning.starts_with(start) && warning.ends_with(end)
        })
    };
    assert!(told("the log lost 7 decisions", "too few requests"), "{warnings:?}");
    assert!(told("new: ", "counters were evicted, so too little is rejected (raise --memory)"), "{warnings:?}");
    assert!(told("old: 29000 requests of keys beyond --max-keys", "incomplete"), "{warnings:?}");
    let new = &limit(&results, "shop.login")["new"];
    assert_eq!(new["keys_are_estimates"], true);
    let keys = new["keys"].as_u64().unwrap();
    assert!((24_000..36_000).contains(&keys), "{keys}");
    let enough = files.simulate("--rules new.yaml --traffic log.jsonl --json").json();
    assert_eq!(limit(&enough, "shop.login")["new"]["keys"], 30_000);
    assert_eq!(enough["warnings"].as_array().unwrap().len(), 1, "{enough}");
}

#[test]
fn redis_times_of_charges_are_those_of_the_replay() {
    let mut log = Log::new("p", OLD_RULES);
    // Arrivals within one second, charges a minute apart.
    for (number, minutes) in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 2)] {
        log.push(
            number,
            &[json!({
                "entries": [{"key": "login", "value": "ann"}], "hits": 1, "sampled": true, "verdict": "ok",
                "now_us": super::START_US + number * 1000 + minutes * 60_000_000,
            })],
        );
    }
    let files = Files::new().with("log.jsonl", log.text());
    let results = files.simulate("--rules new.yaml --traffic log.jsonl --json").json();
    assert_eq!(results["new"]["rejected"], 1);
}

#[test]
fn candidates_are_counted_beside_the_limits_that_decide() {
    let rules = "\
domain: shop
descriptors:
- key: login
  rate_limit:
  - {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}
  - {unit: minute, requests_per_unit: 8, algorithm: sliding_window_log, name: looser, shadow_mode: true}
";
    let files = Files::new().with("candidate.yaml", rules);
    let files = files.with("log.jsonl", Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text());
    let results = files.simulate("--rules candidate.yaml --traffic log.jsonl --json").json();
    assert_eq!((&results["new"]["rejected"], &results["old"]["rejected"]), (&json!(5), &json!(5)));
    let candidate = limit(&results, "shop.login.looser");
    assert_eq!((&candidate["candidate"], &candidate["new"]["rejected"]), (&json!(true), &json!(2)));
    assert_eq!(limit(&results, "shop.login")["candidate"], false);
    assert_eq!(files.simulate("--rules new.yaml --traffic log.jsonl --fail-if rejected(*)>11").code(), 0);
}

#[test]
fn decisions_are_replayed_in_the_order_and_at_the_times_of_redis() {
    let charge = |at_ms: u64, admitted: bool| {
        let result = json!({"admitted": admitted, "before": 0, "after": 0, "remaining": 0, "reset_us": 0});
        let limit =
            json!({"algorithm": "sliding_window_log", "requests_per_unit": 5, "unit": "minute", "result": result});
        json!({
            "entries": [{"key": "login", "value": "ann"}], "hits": 1, "sampled": true, "limits": [limit],
            "decided_by": "counter", "verdict": if admitted { "ok" } else { "over_limit" },
            "now_us": super::START_US + at_ms * 1000,
        })
    };
    let (mut right, mut fast) = (Log::new("p", OLD_RULES), Log::new("q", OLD_RULES));
    fast.push(700, &[charge(0, true)]);
    // Redis was not asked.
    let mut fast = fast.request(710, &["path=/x"]);
    (1..4).for_each(|number| fast.push(710 + number * 20, &[charge(10 + number * 20, true)]));
    // A rejection of the cache, before the minute ends by the clock of Redis.
    let mut cached = charge(0, false);
    cached["decided_by"] = json!("over_limit_cache");
    cached.as_object_mut().unwrap().remove("now_us");
    fast.push(60_500, &[cached]);
    right.push(300, &[charge(300, false)]);
    // Logged after a later charge.
    right.push(90, &[charge(95, true)]);
    (1..4).for_each(|number| right.push(300 + number * 20, &[charge(300 + number * 20, false)]));
    (0..5).for_each(|number| right.push(60_200 + number, &[charge(60_200 + number, true)]));
    let stream =
        [&right.lines[..1], &fast.lines[..6], &right.lines[1..6], &fast.lines[6..], &right.lines[6..]].concat();
    let files = Files::new().with("right.jsonl", right.text()).with("fast.jsonl", fast.text());
    let files = files.with("stream.jsonl", stream.join("\n") + "\n");
    for traffic in ["right.jsonl fast.jsonl", "stream.jsonl"] {
        let results = files.simulate(&format!("--rules new.yaml --traffic {traffic} --json")).json();
        assert_eq!(results["verification"], json!({"compared": 15, "agreed": 15}), "{traffic}");
    }
}

mod timeline {
    use tollkeeper::base::clock::Time;
    use tollkeeper::tools::simulate::tally::{SpanCounts, Timeline};

    const MAX_SPANS: usize = 120;

    #[test]
    fn spans_are_joined_and_no_request_is_lost() {
        let mut timeline = Timeline::new(Time::from_secs(1000));
        for second in 0..1000 {
            timeline.add_request(Time::from_secs(1000 + second), second % 4 == 0);
        }
        timeline.add_request(Time::from_secs(1), true);
        assert_eq!(timeline.span_length_us(), 16_000_000);
        assert_eq!(timeline.spans().len(), 63);
        assert_eq!(timeline.spans()[0], SpanCounts { requests: 17, rejected: 5 });
        assert_eq!(timeline.spans()[62], SpanCounts { requests: 8, rejected: 2 });
        assert_eq!(timeline.spans().iter().map(|span| span.requests).sum::<u64>(), 1001);
    }

    #[test]
    fn times_far_apart_stay_within_the_bound() {
        let mut timeline = Timeline::new(Time::from_secs(0));
        timeline.add_request(Time::from_secs(0), false);
        timeline.add_request(Time::from_micros(u64::MAX), true);
        assert!(timeline.spans().len() <= MAX_SPANS);
        assert_eq!(timeline.spans().iter().map(|span| span.requests).sum::<u64>(), 2);
    }
}
