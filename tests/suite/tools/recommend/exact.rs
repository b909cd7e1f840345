//! Exactness: a server with a limit of the table rejects that share of keys, and with the next smaller one more.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use tollkeeper::base::clock::Time;

use super::{Files, limit_of};
use kit::fixtures::{decide, load_shop_rules, shop_request};
use kit::test_service::TestService;

const START: Time = Time::from_secs(1_783_512_000);
/// Longest delay that the callers wait for.
const MAX_DELAY: Duration = Duration::from_millis(300);

/// A request of the traffic.
struct Step {
    gap_us: u64,
    key: u32,
    /// Hits to charge; 0 peeks, less refunds.
    hits: i64,
}

/// Random traffic of about 160 s: some keys ask much more often than others, and in bursts.
fn traffic(seed: u64) -> Vec<Step> {
    let mut random = StdRng::seed_from_u64(seed);
    let step = |_| {
        let gap_us =
            if random.random_bool(0.6) { random.random_range(0..2000) } else { random.random_range(0..1_000_000) };
        let key = random.random_range(0..20_u32).min(random.random_range(0..20));
        let hits = match random.random_range(0..20) {
            0 => -random.random_range(1..3),
            1 => 0,
            2..5 => random.random_range(2..6),
            _ => 1,
        };
        Step { gap_us, key, hits }
    };
    (0..800).map(step).collect()
}

/// Serves the traffic under a limit; returns the rejected keys.
fn serve(traffic: &[Step], limit: &str, log: Option<&Path>) -> HashSet<u32> {
    let sink = log.map(|log| format!("file:{}", log.display()));
    let env =
        sink.iter().flat_map(|sink| [("TOLLKEEPER_DECISION_LOG", &**sink), ("TOLLKEEPER_DECISION_LOG_WHEN", "all")]);
    let service = TestService::new(env, START);
    load_shop_rules(&service, &format!("descriptors:\n- {{key: login, rate_limit: {{{limit}}}}}\n"));
    let mut rejected = HashSet::new();
    for Step { gap_us, key, hits } in traffic {
        service.advance_us(*gap_us);
        let request = shop_request(&format!("login=u{key}"));
        let request = match *hits {
            ..0 => request.refund(hits.unsigned_abs()),
            _ => request.hits(hits.unsigned_abs()),
        };
        let answer = service.decide_within(&request, MAX_DELAY).unwrap();
        if answer.over_limit() && *hits > 0 {
            rejected.insert(*key);
        }
    }
    if log.is_some() {
        service.finish_log();
    }
    rejected
}

/// The limit of a row as YAML, with this number in place of its own.
fn limit_text(row: &Value, requests_per_unit: u64) -> String {
    let text = |name: &str| row[name].as_str().unwrap().to_owned();
    let mut limit =
        format!("unit: {}, requests_per_unit: {requests_per_unit}, algorithm: {}", text("period"), text("algorithm"));
    for key in ["bucket_size", "queue_size"] {
        if row[key].is_u64() {
            limit += &format!(", {key}: {}", requests_per_unit.max(1));
        }
    }
    limit
}

#[test]
fn served_again_under_a_limit_of_the_table_no_more_keys_are_rejected() {
    let algorithms = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_window_log", "sliding_window_counter"];
    for (seed, share) in [(1, "0%"), (2, "10%"), (3, "25%")] {
        let traffic = traffic(seed);
        for algorithm in algorithms {
            let files = Files::new();
            let own = format!("unit: minute, requests_per_unit: 9, algorithm: {algorithm}");
            serve(&traffic, &own, Some(&files.path("log")));
            let results =
                files.recommend(&format!("--rule shop.login --traffic log --rejected-keys {share} --json")).json();
            let allowed = results["goal"]["rejected_keys"].as_u64().unwrap();
            let rows = results["limits"].as_array().unwrap();
            assert_eq!(rows.len(), 2, "a minute and a second: {results}");
            for row in rows {
                let limit = row["requests_per_unit"].as_u64().unwrap();
                assert_eq!(row["algorithm"], algorithm);
                let rejected_under = |limit| serve(&traffic, &limit_text(row, limit), None).len() as u64;
                let rejected = rejected_under(limit);
                assert_eq!(row["rejected_keys"], rejected, "seed {seed}: {row}");
                assert!(rejected <= allowed, "seed {seed}: {row}");
                let with_less = rejected_under(limit - 1);
                assert!(with_less > allowed, "seed {seed}, {with_less} with a limit of one less: {row}");
            }
        }
    }
}

#[test]
fn earlier_rejections_are_demand_and_are_told() {
    let traffic = traffic(5);
    let (free, limited) = (Files::new(), Files::new());
    serve(&traffic, "unit: minute, requests_per_unit: 1000", Some(&free.path("log")));
    let rejected = serve(&traffic, "unit: minute, requests_per_unit: 3", Some(&limited.path("log")));
    let recommend = |files: &Files| files.recommend("--rule shop.login --traffic log --rejected-keys 5% --json").json();
    let (free, limited) = (recommend(&free), recommend(&limited));
    assert_eq!(free["limits"], limited["limits"], "the limits depend on earlier rejections");
    assert_eq!(free["basis"]["already_rejected"]["requests"], 0);
    let already = &limited["basis"]["already_rejected"];
    assert_eq!(already["keys"], rejected.len());
    assert_eq!(already["by_limit"]["shop.login"], already["requests"]);
    assert_eq!(limited["rule"]["rejected_keys"], rejected.len());
    assert!(limited["warnings"][0].as_str().unwrap().contains("clients may have asked for more"), "{limited}");
}

#[test]
fn limits_beside_others_and_in_wildcards_are_found_by_path() {
    let files = Files::new();
    let sink = format!("file:{}", files.path("log").display());
    let env = [("TOLLKEEPER_DECISION_LOG", &*sink), ("TOLLKEEPER_DECISION_LOG_WHEN", "all")];
    let service = TestService::new(env, START);
    let rules = "descriptors:
- key: tenant
  value: a*
  share_threshold: true
  descriptors:
  - key: path
    rate_limit:
    - {unit: second, requests_per_unit: 2, name: burst}
    - {unit: minute, requests_per_unit: 4, algorithm: token_bucket, bucket_size: 6}
- {key: vip, rate_limit: {unit: second, requests_per_unit: 99, replaces: [{name: burst}]}}
";
    load_shop_rules(&service, rules);
    for number in 0..24 {
        service.advance_us(3_000_000);
        // Both tenants share a counter, and each third request replaces the limit `burst`.
        let request = ["tenant=ab,path=/x", "tenant=ac,path=/x", "tenant=ab,path=/x; vip=1"][number % 3];
        decide(&service, &shop_request(request).hits(3));
    }
    service.finish_log();
    let recommend =
        |rule: &str| files.recommend(&format!("--rule {rule} --traffic log --rejected-keys 0% --json")).json();
    let burst = recommend("shop.tenant_a*.path");
    assert_eq!((&burst["basis"]["requests"], &burst["basis"]["keys"]), (&16.into(), &1.into()));
    assert_eq!(limit_of(&burst, "second"), 3);
    let minute = recommend("shop.tenant_a*.path.minute_token_bucket");
    assert_eq!(minute["basis"]["requests"], 24);
    let rows = minute["limits"].as_array().unwrap();
    assert_eq!((&rows[0]["algorithm"], &rows[0]["recommended"]), (&"token_bucket".into(), &true.into()));
    // The limit that rejects first hides nothing of the demand on the other.
    assert!(rows.iter().all(|row| row["rejected_keys"] == 0), "{minute}");
    let yaml = minute["yaml"].as_str().unwrap();
    assert!(yaml.contains("value: \"a*\"\n  share_threshold: true\n  descriptors:\n  - key: path\n"), "{yaml}");
    let checked = files.with("pasted.yaml", yaml).run("check", "pasted.yaml");
    assert!(checked.0.status.success(), "{yaml}\n{checked:?}");
}
