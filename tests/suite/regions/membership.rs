//! Membership of a region: its identity, the registry of regions, and the times in which its own parts are unused.

use std::slice::from_ref;
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::region::GlobalView;
use tollkeeper::store::client::redis::connection::Script;
use tollkeeper::store::client::redis::server_clock::process_us;
use tollkeeper::store::redis::regions::membership_notices::membership_notices;
use tollkeeper::store::redis::regions::registry::{
    self, IdentityClaim, IdentityReply, OtherRegion, RegionId, RegionIdentity, RegionListHash, RegionReport,
    RegistryReply,
};
use tollkeeper::store::redis::regions::standing::{CUT_OFF_AFTER, Findings, RegionStanding};
use tollkeeper::store::redis::script::{global_members_script, region_identity_script};
use tollkeeper::store::stats::MembershipNotice;

use crate::kit::redis::{self as servers, Server};

const START: Time = Time::from_secs(1_783_512_000);
const SECOND: u64 = 1_000_000;
const MINUTE: u64 = 60 * SECOND;
const NEVER: Time = Time::from_micros(0);

fn hash(names: &[&str]) -> RegionListHash {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    RegionListHash::new(&names)
}

fn two() -> RegionListHash {
    hash(&["eu", "us"])
}

fn three() -> RegionListHash {
    hash(&["asia", "eu", "us"])
}

const fn id(number: u8) -> RegionId {
    RegionId([number; 16])
}

fn after(seconds: u64) -> Time {
    START.plus_us(seconds * SECOND)
}

/// Scripts of one Redis, called at chosen times.
struct Scripts(Connection);

impl Scripts {
    fn new(server: &Server) -> Self {
        let client = ::redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
        Self(client.get_connection().expect("the server answers"))
    }

    fn try_run(&mut self, script: &Script, key: &str, argument: &[u8]) -> RedisResult<Vec<u8>> {
        cmd("EVAL").arg(&script.text).arg(1).arg(key).arg(argument).query(&mut self.0)
    }

    fn identity(&mut self, claim: IdentityClaim, list: RegionListHash, now: Time) -> RegionIdentity {
        let argument = registry::encode_claim(claim, list, Some(now));
        let reply =
            self.try_run(region_identity_script(), "tk1:{region}", &argument).expect("the script has no mistake");
        let reply = registry::decode_identity(&reply).expect("the reply can be read");
        assert_eq!(reply.now, now);
        reply.identity
    }

    fn report(&mut self, name: &str, id: RegionId, list: RegionListHash, now: Time) -> RegistryReply {
        let argument = registry::encode_report(RegionReport { name, id, list }, Some(now));
        let reply =
            self.try_run(global_members_script(), "tk1:{regions}", &argument).expect("the script has no mistake");
        let reply = registry::decode_registry(&reply).expect("the reply can be read");
        assert_eq!(reply.now, now);
        reply
    }
}

fn remember(identity: RegionIdentity, is_settled: bool) -> IdentityClaim {
    IdentityClaim::Remember { identity, is_settled }
}

#[test]
fn first_identity_stays_and_counts_as_a_change_until_it_is_settled() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let new = RegionIdentity { id: id(1), list_changed: START, is_new: true };
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(1)), two(), START), new);
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), two(), after(1)), new, "a second process adopts it");
    assert_eq!(scripts.identity(remember(new, false), two(), after(2)), new);
    let settled = RegionIdentity { list_changed: NEVER, is_new: false, ..new };
    assert_eq!(scripts.identity(remember(new, true), two(), after(3)), settled);
    assert_eq!(scripts.identity(remember(settled, true), two(), after(4)), settled);
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), two(), after(5)), settled);
    let life: i64 = server.query(&["PTTL", "tk1:{region}"]);
    let longest = 366 * 86_400_000;
    assert!(longest - 60_000 < life && life <= longest, "{life}");
}

#[test]
fn other_list_of_a_region_is_a_change_that_settles_never() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let new = scripts.identity(IdentityClaim::Propose(id(1)), two(), START);
    let settled = scripts.identity(remember(new, true), two(), after(1));
    let changed = scripts.identity(IdentityClaim::Propose(id(2)), three(), after(100));
    assert_eq!(changed, RegionIdentity { id: id(1), list_changed: after(100), is_new: false });
    assert_eq!(scripts.identity(remember(changed, true), three(), after(101)), changed);
    // A replica with the old list still runs: each report is a change.
    assert_eq!(scripts.identity(remember(settled, true), two(), after(102)).list_changed, after(102));
    assert_eq!(scripts.identity(remember(changed, true), three(), after(103)).list_changed, after(103));
    // A clock that was set back does not put the change into the future.
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), three(), after(50)).list_changed, after(50));
}

#[test]
fn replicas_write_a_lost_identity_back() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let known = RegionIdentity { id: id(1), list_changed: after(7), is_new: false };
    assert_eq!(scripts.identity(remember(known, true), two(), after(10)), known);
    server.query::<()>(&["FLUSHALL"]);
    // A process that starts comes before those that remember.
    let new = scripts.identity(IdentityClaim::Propose(id(2)), two(), after(20));
    assert_eq!(new, RegionIdentity { id: id(2), list_changed: after(20), is_new: true });
    assert_eq!(scripts.identity(remember(known, false), two(), after(21)), known);
    assert_eq!(scripts.identity(remember(new, false), two(), after(22)), known, "the later process follows");
    // An identity that is no longer new is another Redis's, and stays.
    let other = RegionIdentity { id: id(3), list_changed: NEVER, is_new: false };
    assert_eq!(scripts.identity(remember(other, false), two(), after(23)), known);
}

#[test]
fn second_redis_of_a_region_gets_nothing_until_the_first_is_silent_for_a_minute() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    assert!(!scripts.report("eu", id(1), two(), START).is_second);
    assert!(scripts.report("eu", id(2), two(), after(1)).is_second);
    assert!(!scripts.report("eu", id(1), two(), after(59)).is_second);
    assert!(scripts.report("eu", id(2), two(), after(118)).is_second);
    assert!(!scripts.report("us", id(2), two(), after(118)).is_second, "of another region");
    assert!(!scripts.report("eu", id(2), two(), after(119)).is_second);
    assert!(scripts.report("eu", id(1), two(), after(120)).is_second, "the roles are changed");
}

#[test]
fn registry_tells_the_lists_and_changes_of_the_other_regions() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let reply = scripts.report("eu", id(1), two(), START);
    assert_eq!(reply, RegistryReply { now: START, is_second: false, list_changed: NEVER, others: vec![] });
    let eu = OtherRegion { name: "eu".into(), has_other_list: false, list_changed: NEVER, seen: START };
    assert_eq!(scripts.report("us", id(2), two(), after(1)).others, from_ref(&eu));
    let reply = scripts.report("us", id(2), three(), after(2));
    assert_eq!((reply.list_changed, reply.others), (after(2), vec![OtherRegion { has_other_list: true, ..eu }]));
    let us = OtherRegion { name: "us".into(), has_other_list: true, list_changed: after(2), seen: after(2) };
    assert_eq!(scripts.report("eu", id(1), two(), after(3)).others, from_ref(&us));
    let reply = scripts.report("eu", id(1), three(), after(4));
    assert_eq!((reply.list_changed, reply.others), (after(4), vec![OtherRegion { has_other_list: false, ..us }]));
    // A region's first list is no change.
    assert_eq!(scripts.report("asia", id(3), three(), after(5)).list_changed, NEVER);
    let life: i64 = server.query(&["PTTL", "tk1:{regions}"]);
    assert!(life > 365 * 86_400_000, "{life}");
}

#[test]
fn registry_is_bounded_and_forgets_old_regions() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let long = "x".repeat(63);
    scripts.report(&long, id(1), two(), START);
    for region in 0..200 {
        let reply = scripts.report(&format!("region-{region}"), id(2), two(), after(1 + region));
        assert!(reply.others.len() <= 128, "{}", reply.others.len());
    }
    let reply = scripts.report("eu", id(3), two(), after(300));
    assert!(reply.others.iter().all(|other| other.name != long), "the one without a report for longest is gone");
    assert!(reply.others.iter().any(|other| other.name == "region-199"));
    assert_eq!(scripts.report("eu", id(3), two(), after(400 * 86_400)).others, []);
}

#[test]
fn foreign_values_are_an_error_and_stay() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let identity = registry::encode_claim(IdentityClaim::Propose(id(1)), two(), Some(START));
    let report = registry::encode_report(RegionReport { name: "eu", id: id(1), list: two() }, Some(START));
    let cases = [
        (region_identity_script(), "tk1:{region}", &identity, vec!["x".to_owned(), "y".repeat(49)]),
        (global_members_script(), "tk1:{regions}", &report, vec!["\u{1}".to_owned(), "z".repeat(60)]),
    ];
    for (script, key, argument, values) in cases {
        for value in values {
            server.query::<()>(&["SET", key, &value]);
            let error = scripts.try_run(script, key, argument).expect_err("no state of the script");
            assert!(error.to_string().contains("WRONGTYPE"), "{error}");
            assert_eq!(server.query::<String>(&["GET", key]), value);
        }
        server.query::<()>(&["DEL", key]);
        server.query::<()>(&["LPUSH", key, "x"]);
        assert!(scripts.try_run(script, key, argument).expect_err("a list").to_string().contains("WRONGTYPE"));
    }
}

#[test]
fn malformed_replies_are_errors() {
    let word = |number: u64| number.to_le_bytes().to_vec();
    let identity = |is_new: u64, id: usize| [word(1), word(0), word(is_new), vec![7; id]].concat();
    assert!(registry::decode_identity(&identity(1, 16)).is_ok());
    for bytes in [identity(2, 16), identity(0, 15), identity(0, 17), vec![], vec![0; 23]] {
        assert!(registry::decode_identity(&bytes).is_err(), "{bytes:?}");
    }
    let head = || [word(1), word(0), word(0)].concat();
    let row = |name: &[u8], differs: u8| {
        let length = vec![u8::try_from(name.len()).unwrap()];
        [length, name.to_vec(), vec![differs], word(1), word(2)].concat()
    };
    assert_eq!(registry::decode_registry(&[head(), row(b"eu", 1)].concat()).unwrap().others.len(), 1);
    let many = [head(), row(b"eu", 0).repeat(129)].concat();
    let unread = [row(b"", 0), row(b"e u", 0), row(b"eu\n", 0), row(&[b'x'; 64], 0), row(b"eu", 2), vec![9, 1]];
    let unread = unread.into_iter().map(|row| [head(), row].concat());
    for bytes in unread.chain([many, [word(1), word(2), word(0)].concat(), vec![1]]) {
        assert!(registry::decode_registry(&bytes).is_err(), "{bytes:?}");
    }
}

fn identity_reply(list_changed: Time, is_new: bool, now: Time) -> IdentityReply {
    IdentityReply { now, identity: RegionIdentity { id: id(1), list_changed, is_new } }
}

fn registry_reply(list_changed: Time, others: Vec<OtherRegion>) -> RegistryReply {
    RegistryReply { now: after(1000), is_second: false, list_changed, others }
}

fn other(has_other_list: bool, list_changed: Time, seen: Time) -> OtherRegion {
    OtherRegion { name: "us".into(), has_other_list, list_changed, seen }
}

#[test]
fn parts_are_unused_while_lists_differ_and_for_a_period_after_a_change() {
    let unknown = Findings::default();
    assert_eq!(unknown.parts_usable_from_us(MINUTE), None);
    let (received, hour) = (5_000_000_000, 60 * MINUTE);
    let settled = unknown.with_identity(&identity_reply(NEVER, false, START), received);
    assert!(settled.parts_usable_from_us(hour).unwrap() < 0, "a list that never changed");
    let waits =
        |findings: &Findings, period| findings.parts_usable_from_us(period).map(|from| from.saturating_sub(received));
    let changed = unknown.with_identity(&identity_reply(START, false, after(10)), received);
    assert_eq!(waits(&changed, hour), Some(3_590_000_000));
    assert_eq!(waits(&changed, SECOND), Some(50_000_000), "at least a minute");
    // Another region changed later.
    let reply = registry_reply(NEVER, vec![other(false, after(999), after(1000))]);
    assert_eq!(waits(&changed.with_registry(&reply, received), hour), Some(3_599_000_000));
    let differs = |seen| settled.with_registry(&registry_reply(NEVER, vec![other(true, NEVER, seen)]), received);
    assert_eq!(waits(&differs(after(940)), hour), None);
    assert_eq!(differs(after(940)).differing(), ["us"]);
    assert!(waits(&differs(after(939)), hour).is_some(), "not seen for more than a minute");
    // What was known stands.
    let later = differs(after(940)).with_identity(&identity_reply(NEVER, false, after(2000)), received);
    assert_eq!(waits(&later, hour), None);
    let second = settled.with_registry(&RegistryReply { is_second: true, ..registry_reply(NEVER, vec![]) }, received);
    assert!(second.is_second() && waits(&second, hour).is_none());
    assert!(!second.with_registry(&registry_reply(NEVER, vec![]), received).is_second());
}

#[test]
fn new_identity_is_settled_if_no_region_has_had_another_list() {
    let new = Findings::default().with_identity(&identity_reply(START, true, START), 0);
    assert_eq!(new.claim(id(9)), remember(new.identity().unwrap(), false));
    let alike = registry_reply(NEVER, vec![other(false, NEVER, after(1000))]);
    assert!(new.with_registry(&alike, 0).should_clear_creation());
    assert_eq!(new.with_registry(&alike, 0).claim(id(9)), remember(new.identity().unwrap(), true));
    let cases = [
        registry_reply(after(1), vec![]),
        registry_reply(NEVER, vec![other(false, after(1), after(1000))]),
        registry_reply(NEVER, vec![other(true, NEVER, after(1000))]),
        RegistryReply { is_second: true, ..alike },
    ];
    for reply in cases {
        assert!(!new.with_registry(&reply, 0).should_clear_creation(), "{reply:?}");
    }
    assert_eq!(Findings::default().claim(id(9)), IdentityClaim::Propose(id(9)));
}

#[test]
fn region_is_cut_off_five_seconds_after_the_last_answer() {
    let (standing, start) = (RegionStanding::default(), Instant::now());
    let clock = GlobalView { valid_until: after(1), ..GlobalView::UNKNOWN };
    let restricted = |at| standing.restrict(clock, MINUTE, at);
    assert!(restricted(start).cut_off && !restricted(start).can_request && restricted(start).parts_unusable);
    assert_eq!(membership_notices(&standing, start), [MembershipNotice::CutOff]);
    standing.record_identity(&identity_reply(NEVER, false, START), process_us(start));
    assert!(restricted(start).cut_off && !restricted(start).parts_unusable, "parts need no answer");
    standing.record_registry(&registry_reply(NEVER, vec![]), process_us(start));
    let free = GlobalView { can_request: true, ..clock };
    assert_eq!(restricted(start + CUT_OFF_AFTER), free);
    assert_eq!(membership_notices(&standing, start + CUT_OFF_AFTER), []);
    let cut_off = start + CUT_OFF_AFTER + Duration::from_micros(1);
    assert_eq!(restricted(cut_off), GlobalView { cut_off: true, ..clock });
    standing.record_answer(process_us(start) + 7_000_000);
    assert_eq!(restricted(cut_off), free, "a grant is an answer too");
    let second = RegistryReply { is_second: true, ..registry_reply(NEVER, vec![]) };
    standing.record_registry(&second, process_us(start));
    assert_eq!(
        restricted(start),
        GlobalView { cut_off: true, parts_unusable: true, ..GlobalView::UNKNOWN },
        "a second Redis spends nothing"
    );
    assert_eq!(membership_notices(&standing, start), [MembershipNotice::SecondRedis]);
}
