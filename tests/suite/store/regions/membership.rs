//! Membership of a region: its identity, its fencing tokens, and the registry of regions.

use std::slice::from_ref;

use redis::{Connection, RedisResult, cmd};
use tollkeeper::base::clock::Time;
use tollkeeper::store::client::redis::connection::Script;
use tollkeeper::store::redis::regions::registry::{
    self, FencingToken, FencingTokens, IdentityCall, IdentityClaim, IdentityReply, OtherRegion, RegionIdentity,
    RegionListHash, RegionRedisId, RegionReport, RegistryReply,
};
use tollkeeper::store::redis::script::{global_members_script, region_identity_script};

use kit::redis::{self as servers, Server};

pub(super) const START: Time = Time::from_secs(1_783_512_000);
pub(super) const SECOND: u64 = 1_000_000;
const HOUR: u64 = 3600 * SECOND;
const NEVER: Time = Time::from_micros(0);

pub(super) fn hash(names: &[&str]) -> RegionListHash {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    RegionListHash::new(&names)
}

fn two() -> RegionListHash {
    hash(&["eu", "us"])
}

fn three() -> RegionListHash {
    hash(&["asia", "eu", "us"])
}

const fn id(number: u8) -> RegionRedisId {
    RegionRedisId([number; 16])
}

const fn token(number: u8) -> FencingToken {
    FencingToken([number; 8])
}

fn after(seconds: u64) -> Time {
    START.plus_us(seconds * SECOND)
}

/// Scripts of one Redis, called at chosen times.
pub(super) struct Scripts(Connection);

impl Scripts {
    pub(super) fn new(server: &Server) -> Self {
        let client = ::redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
        Self(client.get_connection().expect("the server answers"))
    }

    fn try_run(&mut self, script: &Script, key: &str, argument: &[u8]) -> RedisResult<Vec<u8>> {
        cmd("EVAL").arg(&script.text).arg(1).arg(key).arg(argument).query(&mut self.0)
    }

    /// Calls the script of an identity at a key.
    pub(super) fn call_identity(&mut self, key: &str, call: &IdentityCall, now: Time) -> IdentityReply {
        let argument = registry::encode_identity_call(call, Some(now));
        let reply = self.try_run(region_identity_script(), key, &argument).expect("the script has no mistake");
        let reply = registry::decode_identity_reply(&reply).expect("the reply can be read");
        assert_eq!(reply.now, now);
        reply
    }

    fn identity(&mut self, claim: IdentityClaim, list: RegionListHash, now: Time) -> RegionIdentity {
        self.call_identity("tk1:{identity}", &IdentityCall { claim, list, ..CALL }, now).identity
    }

    /// Calls the script of the registry.
    pub(super) fn call_registry(&mut self, report: RegionReport<'_>, now: Time) -> RegistryReply {
        let argument = registry::encode_region_report(report, Some(now));
        let reply =
            self.try_run(global_members_script(), "tk1:{members}", &argument).expect("the script has no mistake");
        let reply = registry::decode_registry_reply(&reply).expect("the reply can be read");
        assert_eq!(reply.now, now);
        reply
    }

    /// Reports a Redis with a fence of its own.
    fn report(&mut self, name: &str, id: RegionRedisId, list: RegionListHash, now: Time) -> RegistryReply {
        let RegionRedisId([number, ..]) = id;
        let fence = FencingTokens { generation: 1, current: FencingToken::NONE, next: token(number) };
        self.call_registry(RegionReport { name, id, list, fence, ..report_at(now) }, now)
    }

    /// Reports tokens of one Redis.
    fn report_tokens(&mut self, fence: (u64, u8, u8), now: Time) -> RegistryReply {
        let (generation, current, next) = fence;
        let fence = FencingTokens { generation, current: token(current), next: token(next) };
        self.call_registry(RegionReport { fence, ..report_at(now) }, now)
    }
}

/// Call of a process that knows nothing.
const CALL: IdentityCall = IdentityCall {
    claim: IdentityClaim::Propose(id(1)),
    list: RegionListHash([0; 16]),
    other_list_changed_ago_us: None,
    leased_until: NEVER,
    jumped_ago_us: None,
    accepted: FencingToken::NONE,
    proposal: token(101),
};

/// Report of the region eu that is sent at a time.
fn report_at(now: Time) -> RegionReport<'static> {
    let fence = FencingTokens { generation: 1, current: FencingToken::NONE, next: token(1) };
    RegionReport { name: "eu", id: id(1), fence, list: two(), sent: now, lease_us: HOUR, jumped_ago_us: None }
}

/// Identity of Redis 1 before its tokens change.
fn first_identity(list_changed: Time, is_new: bool) -> RegionIdentity {
    let fence = FencingTokens { generation: 1, current: FencingToken::NONE, next: token(101) };
    RegionIdentity { id: id(1), list_changed, is_new, fence }
}

fn remember(identity: RegionIdentity, is_settled: bool) -> IdentityClaim {
    IdentityClaim::Remember { identity, is_settled }
}

#[test]
fn first_identity_stays_and_counts_as_a_change_until_it_is_settled() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let new = first_identity(START, true);
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(1)), two(), START), new);
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), two(), after(1)), new, "a second process adopts it");
    assert_eq!(scripts.identity(remember(new, false), two(), after(2)), new);
    let settled = first_identity(NEVER, false);
    assert_eq!(scripts.identity(remember(new, true), two(), after(3)), settled);
    assert_eq!(scripts.identity(remember(settled, true), two(), after(4)), settled);
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), two(), after(5)), settled);
    let life: i64 = server.query(&["PTTL", "tk1:{identity}"]);
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
    assert_eq!(changed, first_identity(after(100), false));
    assert_eq!(scripts.identity(remember(changed, true), three(), after(101)), changed);
    // A replica with the old list still runs: each report is a change.
    assert_eq!(scripts.identity(remember(settled, true), two(), after(102)).list_changed, after(102));
    assert_eq!(scripts.identity(remember(changed, true), three(), after(103)).list_changed, after(103));
    // A change in another region, which a process knows from the registry, is told to those that do not reach it.
    let told = IdentityCall {
        claim: remember(changed, true),
        list: three(),
        other_list_changed_ago_us: Some(2 * SECOND),
        ..CALL
    };
    assert_eq!(scripts.call_identity("tk1:{identity}", &told, after(110)).identity.list_changed, after(108));
    // A clock that was set back does not put the change into the future.
    assert_eq!(scripts.identity(IdentityClaim::Propose(id(2)), three(), after(50)).list_changed, after(50));
}

#[test]
fn replicas_write_a_lost_identity_back() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let known = first_identity(after(7), false);
    assert_eq!(scripts.identity(remember(known, true), two(), after(10)), known);
    server.query::<()>(&["FLUSHALL"]);
    // A process that starts comes before those that remember.
    let new = scripts.identity(IdentityClaim::Propose(id(2)), two(), after(20));
    assert_eq!(new, RegionIdentity { id: id(2), ..first_identity(after(20), true) });
    assert_eq!(scripts.identity(remember(known, false), two(), after(21)), known);
    assert_eq!(scripts.identity(remember(new, false), two(), after(22)), known, "the later process follows");
    // An identity that is no longer new is another Redis's, and stays.
    let other = RegionIdentity { id: id(3), ..first_identity(NEVER, false) };
    assert_eq!(scripts.identity(remember(other, false), two(), after(23)), known);
}

#[test]
fn lost_identity_tells_all_processes_that_counters_were_lost() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let new = first_identity(after(1), true);
    let known = first_identity(NEVER, false);
    let mut call = |claim, now| {
        let reply = scripts.call_identity("tk1:{identity}", &IdentityCall { claim, list: two(), ..CALL }, now);
        reply.clock_jumped
    };
    // The first identity of a Redis counts as a change of the list instead.
    assert_eq!(call(IdentityClaim::Propose(id(1)), after(1)), NEVER);
    assert_eq!(call(remember(new, true), after(2)), NEVER);
    assert_eq!(call(remember(known, true), after(3)), NEVER);
    server.query::<()>(&["FLUSHALL"]);
    assert_eq!(call(remember(known, true), after(10)), after(10));
    assert_eq!(call(remember(known, true), after(11)), after(10), "once");
    assert_eq!(call(IdentityClaim::Propose(id(2)), after(12)), after(10), "a process that starts is told");
    server.query::<()>(&["FLUSHALL"]);
    assert_eq!(call(IdentityClaim::Propose(id(2)), after(20)), NEVER);
    assert_eq!(call(remember(known, true), after(21)), after(21), "written back over it");
}

#[test]
fn accepted_token_becomes_the_current_one_every_ten_seconds() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let mut call = |identity: Option<RegionIdentity>, accepted: u8, proposal: u8, now| {
        let claim = identity.map_or(CALL.claim, |identity| remember(identity, false));
        let tokens = IdentityCall { accepted: token(accepted), proposal: token(proposal), ..CALL };
        scripts.call_identity("tk1:{identity}", &IdentityCall { claim, list: two(), ..tokens }, now).identity
    };
    let fence = |identity: RegionIdentity| {
        let FencingTokens { generation, current, next } = identity.fence;
        (generation, current.0[0], next.0[0])
    };
    let first = call(None, 0, 11, START);
    assert_eq!(fence(first), (1, 0, 11));
    assert_eq!(fence(call(Some(first), 11, 12, after(9))), (1, 0, 11), "too early");
    assert_eq!(fence(call(Some(first), 77, 12, after(10))), (1, 0, 11), "another token");
    let second = call(Some(first), 11, 12, after(10));
    assert_eq!(fence(second), (2, 11, 12));
    assert_eq!(fence(call(Some(first), 11, 13, after(21))), (2, 11, 12), "an earlier token");
    assert_eq!(fence(call(None, 0, 13, after(22))), (2, 11, 12), "a process that starts changes nothing");
    // The Redis forgets its last writes: the process that remembers later tokens writes them back.
    let old = server.query::<Vec<u8>>(&["GET", "tk1:{identity}"]);
    let third = call(Some(second), 12, 14, after(23));
    assert_eq!(fence(third), (3, 12, 14));
    cmd("SET").arg("tk1:{identity}").arg(&old).exec(&mut Scripts::new(&server).0).expect("it is set");
    assert_eq!(fence(call(Some(second), 0, 15, after(24))), (2, 11, 12));
    assert_eq!(fence(call(Some(third), 0, 15, after(24))), (3, 12, 14));
    assert_eq!(fence(call(Some(second), 0, 15, after(25))), (3, 12, 14));
}

#[test]
fn processes_share_the_lease_until_the_clock_of_their_redis_jumps() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let known = scripts.identity(CALL.claim, two(), START);
    let mut call = |claim, leased_until, jumped_ago_us, now| {
        let call = IdentityCall { claim, list: two(), leased_until, jumped_ago_us, ..CALL };
        let reply = scripts.call_identity("tk1:{identity}", &call, now);
        (reply.leased_until, reply.clock_jumped)
    };
    let (starts, knows) = (IdentityClaim::Propose(id(2)), remember(known, false));
    assert_eq!(call(knows, after(3600), None, after(1)), (after(3600), NEVER));
    assert_eq!(call(knows, after(3500), None, after(2)), (after(3600), NEVER), "another knew more");
    assert_eq!(call(starts, NEVER, None, after(3)), (after(3600), NEVER));
    let other = remember(RegionIdentity { id: id(3), ..known }, false);
    assert_eq!(call(other, after(9000), None, after(4)), (after(3600), NEVER), "the lease of another Redis");
    assert_eq!(call(knows, after(3600), Some(2 * SECOND), after(10)), (after(3600), after(8)), "told by a process");
    assert_eq!(call(starts, NEVER, Some(3 * SECOND), after(11)), (after(3600), after(8)), "the same jump");
    assert_eq!(call(starts, NEVER, Some(SECOND), after(60)), (NEVER, after(59)));
    assert_eq!(call(knows, after(3600), None, after(61)), (after(3600), after(59)));
    assert_eq!(call(starts, NEVER, None, after(60)), (after(3600), after(59)), "a step of a second");
    assert_eq!(call(starts, NEVER, None, after(58)), (NEVER, after(58)), "set back");
}

#[test]
fn two_redis_of_one_name_see_the_ends_of_their_leases() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let others = |reply: RegistryReply| {
        let seconds = |time: Time| time.since_us(START) / SECOND;
        let row = |other: &OtherRegion| (other.id.0[0], seconds(other.seen), seconds(other.leased_until));
        reply.others.iter().map(row).collect::<Vec<_>>()
    };
    assert_eq!(others(scripts.report("eu", id(1), two(), START)), []);
    assert_eq!(others(scripts.report("eu", id(2), two(), after(10))), [(1, 0, 3600)]);
    assert_eq!(others(scripts.report("eu", id(1), two(), after(20))), [(2, 10, 3610)]);
    assert_eq!(others(scripts.report("eu", id(2), two(), after(3619))), [(1, 20, 3620)]);
    let read = RegionReport { id: id(2), sent: NEVER, ..report_at(after(3620)) };
    assert_eq!(others(scripts.call_registry(read, after(3620))), [(1, 20, 3620)]);
    assert_eq!(others(scripts.report("eu", id(2), two(), after(3620))), [(1, 20, 3620)], "its end is known");
    assert_eq!(others(scripts.report("eu", id(1), two(), after(3621))), [(2, 3620, 7220)], "the first comes back");
    // The longest lease that was reported counts.
    let short = RegionReport { lease_us: 60 * SECOND, ..report_at(after(3622)) };
    assert!(scripts.call_registry(short, after(3622)).recorded);
    assert_eq!(others(scripts.report("eu", id(2), two(), after(3623))), [(1, 3622, 7221)]);
}

#[test]
fn report_that_arrives_late_only_reads() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let sent_before = |seconds: u64| RegionReport { sent: after(100 - seconds), ..report_at(after(100)) };
    assert!(!scripts.call_registry(sent_before(6), after(100)).recorded);
    assert!(!server.query::<bool>(&["EXISTS", "tk1:{members}"]));
    assert!(scripts.call_registry(sent_before(5), after(100)).recorded);
    let before = server.query::<Vec<u8>>(&["GET", "tk1:{members}"]);
    let late = RegionReport { list: three(), sent: after(100), ..report_at(after(100)) };
    let reply = scripts.call_registry(late, after(106));
    assert!(!reply.recorded && !reply.accepted && reply.list_changed == NEVER, "{reply:?}");
    assert_eq!(server.query::<Vec<u8>>(&["GET", "tk1:{members}"]), before);
}

#[test]
fn registry_accepts_one_chain_of_tokens() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let mut report = |fence, now| {
        let reply = scripts.report_tokens(fence, now);
        (reply.accepted, reply.contested_until)
    };
    assert_eq!(report((1, 0, 11), START), (true, NEVER), "the first report");
    assert_eq!(report((1, 0, 11), after(1)), (true, NEVER), "another process, or a lost reply");
    assert_eq!(report((2, 11, 12), after(10)), (true, NEVER));
    // A process that read the tokens before.
    assert_eq!(report((1, 0, 11), after(19)), (false, NEVER));
    assert_eq!(report((2, 11, 12), after(20)), (true, NEVER));
    // A copy with the same tokens proposes another next one.
    assert_eq!(report((3, 12, 13), after(21)), (true, NEVER));
    assert_eq!(report((3, 12, 93), after(22)), (true, after(3622)), "the copy");
    assert_eq!(report((3, 12, 13), after(23)), (true, after(3623)), "the original, which contests it");
    assert_eq!(report((3, 12, 93), after(24)), (true, after(3624)), "both go on");
    // Only one goes on: what was contested stays so for the lease.
    assert_eq!(report((4, 93, 94), after(40)), (true, after(3624)));
    assert_eq!(report((5, 94, 95), after(60)), (true, after(3624)));
    // A copy that stood still is found once the token before no longer counts.
    assert_eq!(report((4, 93, 94), after(69)), (false, after(3624)));
    assert_eq!(report((4, 93, 94), after(70)), (true, after(3670)));
}

#[test]
fn restored_registry_accepts_later_tokens() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    assert!(scripts.report_tokens((1, 0, 11), START).accepted);
    let old = server.query::<Vec<u8>>(&["GET", "tk1:{members}"]);
    for (generation, current, next) in [(2, 11, 12), (3, 12, 13), (4, 13, 14)] {
        assert!(scripts.report_tokens((generation, current, next), after(10 * generation)).accepted);
    }
    cmd("SET").arg("tk1:{members}").arg(&old).exec(&mut scripts.0).expect("it is set");
    let reply = scripts.report_tokens((4, 13, 14), after(41));
    assert_eq!((reply.accepted, reply.contested_until), (true, NEVER));
    server.query::<()>(&["FLUSHALL"]);
    let reply = scripts.report_tokens((9, 50, 51), after(42));
    assert_eq!((reply.accepted, reply.contested_until), (true, NEVER));
}

#[test]
fn registry_tells_the_lists_and_changes_of_the_other_regions() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let reply = scripts.report("eu", id(1), two(), START);
    assert_eq!((reply.recorded, reply.list_changed, reply.others), (true, NEVER, vec![]));
    let lease = after(3600);
    let eu = OtherRegion {
        name: "eu".into(),
        id: id(1),
        has_other_list: false,
        list_changed: NEVER,
        seen: START,
        leased_until: lease,
    };
    assert_eq!(scripts.report("us", id(2), two(), after(1)).others, from_ref(&eu));
    let reply = scripts.report("us", id(2), three(), after(2));
    assert_eq!(
        (reply.list_changed, reply.others),
        (after(2), vec![OtherRegion { has_other_list: true, ..eu.clone() }])
    );
    let us = OtherRegion {
        name: "us".into(),
        id: id(2),
        has_other_list: true,
        list_changed: after(2),
        seen: after(2),
        leased_until: after(3602),
    };
    assert_eq!(scripts.report("eu", id(1), two(), after(3)).others, from_ref(&us));
    let reply = scripts.report("eu", id(1), three(), after(4));
    assert_eq!((reply.list_changed, reply.others), (after(4), vec![OtherRegion { has_other_list: false, ..us }]));
    // A region's first list is no change.
    assert_eq!(scripts.report("asia", id(3), three(), after(5)).list_changed, NEVER);
    let life: i64 = server.query(&["PTTL", "tk1:{members}"]);
    assert!(life > 365 * 86_400_000, "{life}");
}

#[test]
fn registry_notices_that_its_clock_jumped() {
    let server = servers::options().start();
    let mut scripts = Scripts::new(&server);
    let mut report = |name: &str, number, now| {
        let reply = scripts.report(name, id(number), two(), now);
        (reply.clock_jumped, reply.others)
    };
    assert_eq!(report("eu", 1, after(1000)).0, NEVER);
    assert_eq!(report("us", 2, after(999)).0, NEVER, "a step of a second");
    let (jumped, others) = report("us", 2, after(870));
    assert_eq!(jumped, after(870));
    // The lease of eu lasts as long as before from its last report.
    assert_eq!((others[0].seen, others[0].leased_until), (after(870), after(870 + 3600)));
    let (jumped, others) = report("eu", 1, after(1018));
    assert_eq!((jumped, others[0].seen), (after(870), after(870)), "forwards nobody can see it here");
    let told = RegionReport { jumped_ago_us: Some(3 * SECOND), ..report_at(after(1020)) };
    assert_eq!(scripts.call_registry(told, after(1020)).clock_jumped, after(1017), "but a process tells");
    let read = RegionReport { sent: NEVER, jumped_ago_us: Some(SECOND), ..report_at(after(1021)) };
    assert_eq!(scripts.call_registry(read, after(1021)).clock_jumped, after(1017));
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
    let identity = registry::encode_identity_call(&CALL, Some(START));
    let report = registry::encode_region_report(report_at(START), Some(START));
    let cases = [
        (region_identity_script(), "tk1:{identity}", &identity, vec!["x".to_owned(), "y".repeat(105)]),
        (global_members_script(), "tk1:{members}", &report, vec!["\u{1}".to_owned(), "z".repeat(60)]),
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
    let identity =
        |is_new: u64, rest: usize| [word(1), word(0), word(is_new), word(1), word(0), word(0), vec![7; rest]].concat();
    assert!(registry::decode_identity_reply(&identity(1, 32)).is_ok());
    for bytes in [identity(2, 32), identity(0, 31), identity(0, 33), vec![], vec![0; 47]] {
        assert!(registry::decode_identity_reply(&bytes).is_err(), "{bytes:?}");
    }
    let numbers = |recorded, accepted| [word(1), word(recorded), word(accepted), word(0), word(0), word(0)].concat();
    let head = || numbers(1, 1);
    let row = |name: &[u8], differs: u8| {
        let length = vec![u8::try_from(name.len()).unwrap()];
        [length, name.to_vec(), vec![differs], vec![9; 16], word(1), word(2), word(3)].concat()
    };
    assert_eq!(registry::decode_registry_reply(&[head(), row(b"eu", 1)].concat()).unwrap().others.len(), 1);
    let many = [head(), row(b"eu", 0).repeat(129)].concat();
    let unread = [row(b"", 0), row(b"e u", 0), row(b"eu\n", 0), row(&[b'x'; 64], 0), row(b"eu", 2), vec![9, 1]];
    let unread = unread.into_iter().map(|row| [head(), row].concat());
    for bytes in unread.chain([many, numbers(2, 0), numbers(0, 2), vec![1]]) {
        assert!(registry::decode_registry_reply(&bytes).is_err(), "{bytes:?}");
    }
}
