//! Faults of several servers: cluster failover, resharding, a lost shard, and a primary that moves.

use std::collections::HashMap;
use std::time::Instant;

use super::load::{Load, with_policies};
use super::{CALLS_PER_FAULT, assert_log_is_bounded, keeps_no_more_files_than, open_files, wait_for_place};
use kit::grpc::{Client, descriptor, rate_limit_request};
use kit::http;
use kit::redis::cluster::Cluster;
use kit::redis::options;
use kit::redis::sentinels::{NAME, Sentinels};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;
use tollkeeper::base::pb::rate_limit_response::Code;

/// A tollkeeper that counts in the cluster, and knows only some of its nodes.
fn counting_in(cluster: &Cluster, setup: Setup) -> Tollkeeper {
    knowing_some_nodes(cluster, setup).start()
}

fn knowing_some_nodes(cluster: &Cluster, setup: Setup) -> Setup {
    let some = cluster.addresses()[..4].join(",");
    setup.env("REDIS_TYPE", "cluster").env("REDIS_URL", some)
}

#[test]
fn cluster_faults_are_answered_in_time() {
    let _place = wait_for_place();
    let began = Instant::now();
    let cluster = Cluster::start_with(&options().with(&[("cluster-require-full-coverage", "no")]), 1);
    let tollkeeper = counting_in(&cluster, with_policies());
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);
    let slots = Slots::of(&cluster);

    let cut_off = load.run_fault("cluster: a shard frozen (other shards)", |load| {
        cluster.node(2).freeze();
        load.wait_for_calls(CALLS_PER_FAULT);
        cluster.node(2).thaw();
    });
    // Policy answers calls of the frozen shard; calls of other shards must not be affected.
    let cut_off = cut_off.expect_contract().expect_strict(95.0, |tag| slots.slot(tag) < 10_923);
    assert!(cut_off.is_mostly_by_policy(|tag| slots.slot(tag) >= 10_923));

    let moved = load.run_fault("cluster: handed over", |load| {
        cluster.planned_failover(0, 3);
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    moved.expect_contract().expect_strict(70.0, |_| true);
    let failed = load.run_fault("cluster: failover after kill -9", |load| {
        assert_eq!(cluster.fail_over(1), 4);
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    failed.expect_contract().expect_strict(50.0, |_| true);
    let again = load.run_fault("cluster: the old primary comes back as a replica", |load| {
        cluster.node(1).restart();
        cluster.wait_until_healthy();
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    again.expect_contract().expect_strict(90.0, |_| true);
    // Moves the slots of ten counters with their keys, one by one.
    let resharded = load.run_fault("cluster: slots moved under load (MOVED, ASK)", |load| {
        for number in 0..10 {
            let slot = slots.slot(&super::load::tag(number));
            let from = cluster.primary_of(slot);
            let to = if from == 2 { 3 } else { 2 };
            cluster.begin_migration(slot, to);
            load.wait_for_calls(10);
            while cluster.migrate_keys(slot, from, to, 1) > 0 {}
            load.wait_for_calls(10);
            cluster.end_migration(slot, from, to);
        }
    });
    resharded.expect_contract().expect_strict(90.0, |_| true);
    let lost = slots.slot(&super::load::tag(11));
    let down = load.run_fault("cluster: a slot lost, CLUSTERDOWN (other slots)", |load| {
        let owner = cluster.primary_of(lost);
        cluster.unassign_slot(lost);
        load.wait_for_calls(4 * CALLS_PER_FAULT);
        cluster.assign_slot(lost, owner);
    });
    down.expect_contract().expect_strict(95.0, |tag| slots.slot(tag) != lost);

    drop(load);
    keeps_no_more_files_than(&tollkeeper, before + 4);
    assert_log_is_bounded(&tollkeeper, began);
}

/// Slots of all counters of a load, as the servers compute them.
struct Slots(HashMap<String, u16>);

impl Slots {
    fn of(cluster: &Cluster) -> Self {
        let mut caller = cluster.node(0).connect(kit::PATIENCE).expect("a node accepts");
        let slot = |tag: String| {
            let reply = caller.command(&["CLUSTER", "KEYSLOT", &tag]).expect("it is computed");
            (tag, ::redis::from_redis_value(reply).expect("a slot is a number"))
        };
        Self(super::load::tags().map(slot).collect())
    }

    fn slot(&self, tag: &str) -> u16 {
        self.0[tag]
    }
}

#[test]
fn descriptor_of_several_limits_survives_the_move_of_its_slot() {
    let cluster = Cluster::start();
    let rules = "domain: shop
descriptors:
  - key: user
    rate_limit:
      - {unit: hour, requests_per_unit: 7, on_store_error: error}
      - {unit: day, requests_per_unit: 9, on_store_error: error}
";
    // The test is not about latency, so timeouts are long.
    let tollkeeper = counting_in(&cluster, with_rules(rules).env("TOLLKEEPER_STORE_TIMEOUT", "5s"));
    let client = Client::connect(tollkeeper.grpc_port());
    let decide = || {
        client.call(&rate_limit_request("shop", &[("user", "a")])).map(|response| response.statuses[0].limit_remaining)
    };
    assert_eq!(wait_for("the cluster to be found", || decide().ok()), 6);
    let slot = cluster.slot("{shop|user=a}");
    let to = if cluster.primary_of(slot) == 2 { 0 } else { 2 };
    let from = cluster.begin_migration(slot, to);
    assert_eq!(decide().expect("both keys are there"), 5);
    assert_eq!(cluster.migrate_keys(slot, from, to, 1), 1);
    // The keys are on two servers, so neither can decide.
    assert_eq!(decide().expect_err("TRYAGAIN").code(), tonic::Code::Unavailable);
    assert_eq!(cluster.migrate_keys(slot, from, to, 1), 1);
    assert_eq!(decide().expect("both keys are there, by ASK"), 4);
    cluster.end_migration(slot, from, to);
    assert_eq!(decide().expect("by MOVED"), 3);
    assert!(tollkeeper.stderr().contains("no node serves the slot"), "{}", tollkeeper.stderr());
}

const SEVERAL: &str = "domain: shop
descriptors:
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: deny}}
  - {key: allow, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: allow}}
  - {key: error, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: error}}
";

#[test]
fn rejection_beats_error_and_error_beats_other_policies() {
    let cluster = Cluster::start();
    let tollkeeper = counting_in(&cluster, with_rules(SEVERAL));
    let client = Client::connect(tollkeeper.grpc_port());
    let on = |last: bool, key: &str| {
        let is_there = |value: &String| (cluster.slot(&format!("{{shop|{key}={value}}}")) >= 10_923) == last;
        (0..).map(|value: u32| value.to_string()).find(is_there).expect("values are many")
    };
    let (full, denied) = (on(false, "deny"), on(true, "deny"));
    let (allowed, failed) = (on(true, "allow"), on(true, "error"));
    let decide = |entries: &[(&str, &str)]| {
        let mut all = rate_limit_request("shop", &entries[..1]);
        all.descriptors.extend(entries[1..].iter().map(|entry| descriptor(&[*entry])));
        client.call(&all).map(|response| response.overall_code().as_str_name()).map_err(|status| status.code())
    };
    // The first hit fills the limit, on a shard that stays. A rejection by policy lasts a second only.
    wait_for("a rejection by the limit", || {
        let response = client.call(&rate_limit_request("shop", &[("deny", &full)])).ok()?;
        let reset = response.statuses[0].duration_until_reset.as_ref()?;
        (response.overall_code() == Code::OverLimit && reset.seconds > 1).then_some(())
    });
    // Health is refreshed every 100 ms: before the first refresh with a connection the store still counts as lost.
    let is_ready = || http::get(tollkeeper.http_port(), "/readyz").send().status == 200;
    wait_for("the store to be found", || is_ready().then_some(()));
    cluster.node(2).freeze();
    wait_for("the shard to be known as lost", || decide(&[("error", &failed)]).is_err().then_some(()));
    let unavailable = Err(tonic::Code::Unavailable);
    assert_eq!(decide(&[("deny", &full)]), Ok("OVER_LIMIT"));
    assert_eq!(decide(&[("allow", &allowed)]), Ok("OK"));
    assert_eq!(decide(&[("deny", &denied)]), Ok("OVER_LIMIT"));
    assert_eq!(decide(&[("allow", &allowed), ("error", &failed)]), unavailable);
    assert_eq!(decide(&[("deny", &denied), ("error", &failed)]), unavailable);
    assert_eq!(decide(&[("error", &failed), ("deny", &full)]), Ok("OVER_LIMIT"));
    // One lost shard of three does not make the store lost.
    assert!(is_ready());
}

#[test]
fn moved_primary_is_followed() {
    let _place = wait_for_place();
    let sentinels = Sentinels::start_with(&options(), &options());
    let url = format!("{NAME},{}", sentinels.addresses().join(","));
    let tollkeeper = with_policies().env("REDIS_TYPE", "sentinel").env("REDIS_URL", url).start();
    let load = Load::strict_on(&tollkeeper);
    let before = open_files(&tollkeeper);
    let handed_over = load.run_fault("sentinel: handed over, the old master READONLY", |load| {
        sentinels.planned_failover();
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    handed_over.expect_contract().expect_strict(50.0, |_| true);
    let failed = load.run_fault("sentinel: failover after kill -9", |load| {
        sentinels.fail_over();
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    failed.expect_contract();
    let one_is_gone = load.run_fault("sentinel: two of three sentinels gone", |load| {
        sentinels.sentinel(0).kill();
        sentinels.sentinel(1).freeze();
        load.wait_for_calls(2 * CALLS_PER_FAULT);
    });
    one_is_gone.expect_contract().expect_strict(90.0, |_| true);
    drop(load);
    keeps_no_more_files_than(&tollkeeper, before + 2);
}

#[test]
fn start_without_redis_is_decided_by_policy_until_it_appears() {
    let _place = wait_for_place();
    let run_recovery = |name: &str, setup: Setup, appear: &dyn Fn()| {
        let tollkeeper = setup.start();
        let load = Load::on(&tollkeeper);
        load.wait_for_calls(CALLS_PER_FAULT);
        load.run_recovery(name, appear).expect_contract().expect_by_policy();
    };
    let server = options().start();
    server.kill();
    let setup = with_policies().env("REDIS_URL", server.address());
    run_recovery("single: not there at the start", setup, &|| server.restart());

    let cluster = Cluster::start();
    (0..6).for_each(|node| cluster.node(node).kill());
    run_recovery("cluster: not there at the start", knowing_some_nodes(&cluster, with_policies()), &|| {
        (0..6).for_each(|node| cluster.node(node).restart());
        cluster.set_fast_failover(true);
        cluster.wait_until_healthy();
    });
    drop(cluster);

    let sentinels = Sentinels::start_with(&options(), &options());
    (0..3).for_each(|sentinel| sentinels.sentinel(sentinel).kill());
    let url = format!("{NAME},{}", sentinels.addresses().join(","));
    let setup = with_policies().env("REDIS_TYPE", "sentinel").env("REDIS_URL", url);
    run_recovery("sentinel: not there at the start", setup, &|| {
        (0..3).for_each(|sentinel| sentinels.sentinel(sentinel).restart());
    });
}

#[test]
fn cluster_node_without_a_name_is_used_by_all_replicas() {
    let cluster = Cluster::start();
    for node in 0..6 {
        let set = |name: &str, value: &str| cluster.node(node).query::<()>(&["CONFIG", "SET", name, value]);
        set("cluster-preferred-endpoint-type", "hostname");
        if node % 3 < 2 {
            set("cluster-announce-hostname", "localhost");
        }
    }
    wait_for("all nodes to know the names of two primaries", || {
        let named = |node: usize| {
            let reply = cluster.node(node).command(&["CLUSTER", "SLOTS"]).ok()?;
            let text = format!("{reply:?}");
            (text.matches("localhost").count() >= 4 && text.contains("\"?\"") || text.contains("'?'")).then_some(())
        };
        (0..6).all(|node| named(node).is_some()).then_some(())
    });
    let rules = "domain: shop
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 3, on_store_error: error}}
";
    let replicas = [(); 2].map(|()| counting_in(&cluster, with_rules(rules).env("TOLLKEEPER_STORE_TIMEOUT", "5s")));
    let clients = replicas.each_ref().map(|replica| Client::connect(replica.grpc_port()));
    let mut admitted = 0;
    for hit in 0..72 {
        let request = rate_limit_request("shop", &[("user", &(hit / 6).to_string())]);
        let answer = wait_for("an answer", || clients[hit % 2].call(&request).ok());
        admitted += usize::from(answer.overall_code() == Code::Ok);
    }
    // Slots of all three primaries: 12 users of 3 hits each.
    assert_eq!(admitted, 36, "{}", replicas[0].stderr());
    assert!(!replicas[0].stderr().contains("invalid reply"), "{}", replicas[0].stderr());
}

#[test]
fn slots_that_no_node_serves_are_told() {
    let server = options().cluster().with(&[("cluster-require-full-coverage", "no")]).start();
    server.query::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "9999"]);
    let start = |policy: &str| {
        let rules = format!(
            "domain: shop
descriptors:
  - {{key: user, rate_limit: {{unit: day, requests_per_unit: 3, on_store_error: {policy}}}}}
"
        );
        let setup = with_rules(&rules).env("TOLLKEEPER_ON_STORE_ERROR", "allow");
        setup.env("REDIS_TYPE", "cluster").env("REDIS_URL", server.address()).start()
    };
    let (error, allow) = (start("error"), start("allow"));
    let ready = |tollkeeper: &Tollkeeper| http::get(tollkeeper.http_port(), "/readyz").send();
    let told =
        "no node serves 6384 of 16384 hash slots of the cluster: they have no owner (CLUSTER ADDSLOTS assigns them)";
    for tollkeeper in [&error, &allow] {
        wait_for("the log to tell", || tollkeeper.stderr().contains(told).then_some(()));
        wait_for("an alarm", || {
            let alarms = http::get(tollkeeper.debug_port(), "/alarms").send().text();
            (alarms.contains("slots_not_served") && alarms.contains(told)).then_some(())
        });
    }
    wait_for("the server to be used", || (ready(&allow).status == 200).then_some(()));
    wait_for("not ready", || ready(&error).text().contains("no node serves a part of the slots").then_some(()));
    server.query::<()>(&["CLUSTER", "ADDSLOTSRANGE", "10000", "16383"]);
    wait_for("all slots to be served", || (ready(&error).status == 200).then_some(()));
    assert!(error.stderr().contains("nodes serve all hash slots of the cluster again"));
}
