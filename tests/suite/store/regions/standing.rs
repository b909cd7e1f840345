//! Standing of a region: what replies of both Redis and jumps of clocks let it do, and the notices that tell so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::settings::redis::regions::DEFAULT_REGION_LEASE;
use tollkeeper::store::client::redis::deployment_context::ConnectionOpenings;
use tollkeeper::store::client::redis::server_clock::{
    ClockJumps, ClockReading, InstantRange, ServerClock, process_time_us,
};
use tollkeeper::store::redis::regions::region_notices::collect_region_notices;
use tollkeeper::store::redis::regions::registry::{
    FencingTokens, IdentityClaim, IdentityReply, OtherRegion, RegionIdentity, RegionRedisId, RegistryReply,
};
use tollkeeper::store::redis::regions::standing::{
    CUT_OFF_AFTER, CallTimes, ClockAndConnectionEvents, OwnRegionSettings, RegionConflictKind, RegionFindings,
    RegionStanding, ReportedRegionCounts,
};
use tollkeeper::store::stats::RegionNotice;

use super::membership::START;

const SECOND: u64 = 1_000_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const NEVER: Time = Time::from_micros(0);

/// Process time of all replies here, in microseconds.
const RECEIVED_US: i64 = 5_000_000_000;
const AT_ONCE: CallTimes = CallTimes { sent_us: RECEIVED_US, answered_us: RECEIVED_US };

fn after(seconds: u64) -> Time {
    START.plus_us(seconds * SECOND)
}

fn own() -> OwnRegionSettings {
    OwnRegionSettings::with_names("eu", &["asia", "eu", "us"], DEFAULT_REGION_LEASE)
}

fn identity(number: u8, list_changed: Time, is_new: bool) -> IdentityReply {
    let identity =
        RegionIdentity { id: RegionRedisId([number; 16]), list_changed, is_new, fence: FencingTokens::default() };
    IdentityReply { now: after(1000), identity, leased_until: NEVER, clock_jumped: NEVER }
}

fn registry(list_changed: Time, others: Vec<OtherRegion>) -> RegistryReply {
    RegistryReply {
        now: after(1000),
        recorded: true,
        accepted: true,
        list_changed,
        contested_until: NEVER,
        clock_jumped: NEVER,
        others,
    }
}

/// Region that was seen a minute ago at most.
fn other(name: &str, has_other_list: bool, list_changed: Time) -> OtherRegion {
    OtherRegion {
        name: name.into(),
        id: RegionRedisId([9; 16]),
        has_other_list,
        list_changed,
        seen: after(990),
        leased_until: after(990 + 3600),
    }
}

fn both() -> Vec<OtherRegion> {
    vec![other("asia", false, NEVER), other("us", false, NEVER)]
}

fn settled() -> RegionFindings {
    RegionFindings::default().after_identity_reply(&identity(1, NEVER, false), AT_ONCE)
}

/// Microseconds after the replies from which the parts may be used.
fn waits_us(findings: &RegionFindings, period_us: u64) -> i64 {
    findings.parts_usable_from_us(period_us).expect("the identity is known").saturating_sub(RECEIVED_US)
}

fn micros(us: u64) -> i64 {
    i64::try_from(us).expect("it fits")
}

/// A time on another clock, for which this process waits a thousandth longer.
fn waited(us: u64) -> i64 {
    micros(us + us.div_ceil(999))
}

fn remember(identity: RegionIdentity, is_settled: bool) -> IdentityClaim {
    IdentityClaim::Remember { identity, is_settled }
}

#[test]
fn parts_are_unused_for_a_period_after_a_list_changed() {
    assert_eq!(RegionFindings::default().parts_usable_from_us(MINUTE), None);
    assert!(waits_us(&settled(), HOUR) < 0, "a list that never changed");
    let changed = RegionFindings::default().after_identity_reply(&identity(1, after(990), false), AT_ONCE);
    assert_eq!(waits_us(&changed, HOUR), micros(HOUR - 10 * SECOND));
    assert_eq!(waits_us(&changed, SECOND), micros(50 * SECOND), "at least a minute");
    // Another region changed later.
    let reply = registry(NEVER, vec![other("us", false, after(999))]);
    assert_eq!(waits_us(&changed.after_registry_reply(&reply, AT_ONCE, &own()), HOUR), micros(HOUR - SECOND));
}

#[test]
fn parts_are_unused_while_another_list_has_a_lease() {
    let differing = registry(NEVER, vec![other("asia", false, NEVER), other("us", true, NEVER)]);
    let findings = settled().after_registry_reply(&differing, AT_ONCE, &own());
    // Then they are unused for a period.
    let until_us = waited(HOUR - 10 * SECOND);
    assert_eq!(waits_us(&findings, MINUTE), until_us + micros(MINUTE));
    assert_eq!(findings.lease_ends_us(), None, "no lease either");
    // A removed region that runs on is not listed.
    let removed = registry(NEVER, vec![other("old", true, NEVER)]);
    let resting = settled().after_registry_reply(&removed, AT_ONCE, &own());
    assert_eq!(waits_us(&resting, HOUR), until_us + micros(HOUR));
    let ended = OtherRegion { leased_until: after(995), ..other("old", true, NEVER) };
    let ended = settled().after_registry_reply(&registry(NEVER, vec![ended]), AT_ONCE, &own());
    assert_eq!(waits_us(&ended, HOUR), micros(HOUR - 5 * SECOND));
    assert!(ended.conflicts().is_empty() && ended.lease_ends_us().is_some());
    assert_eq!(ended.us_since_registry_change(RECEIVED_US), Some(5 * SECOND), "processes that are cut off learn it");
    // Cut off, it stands; one list ends it.
    let later = findings.after_identity_reply(&identity(1, NEVER, false), AT_ONCE);
    assert_eq!(waits_us(&later, HOUR), until_us + micros(HOUR));
    let agreed = registry(NEVER, vec![other("us", false, after(995))]);
    assert_eq!(waits_us(&findings.after_registry_reply(&agreed, AT_ONCE, &own()), MINUTE), micros(55 * SECOND));
}

#[test]
fn forward_jump_of_the_global_clock_shortens_no_rest() {
    let differing = registry(NEVER, vec![other("us", true, NEVER)]);
    let findings = settled().after_registry_reply(&differing, AT_ONCE, &own());
    let jumped = RegistryReply { now: after(1000 + 7200), ..registry(NEVER, vec![other("us", true, NEVER)]) };
    assert_eq!(
        waits_us(&findings.after_registry_reply(&jumped, AT_ONCE, &own()), MINUTE),
        waited(HOUR - 10 * SECOND) + micros(MINUTE)
    );
    // A process that starts later knows from the registry that the clock jumped since the last report.
    let told = RegistryReply { clock_jumped: after(8190), ..jumped };
    assert_eq!(
        waits_us(&settled().after_registry_reply(&told, AT_ONCE, &own()), MINUTE),
        waited(HOUR - 10 * SECOND) + micros(MINUTE)
    );
    // Once the pause is over it is forgotten.
    let end_us = findings.conflicts()[0].until_us;
    let times = CallTimes { sent_us: end_us, answered_us: end_us };
    let ended = findings.after_registry_reply(&registry(NEVER, vec![]), times, &own());
    assert_eq!((ended.conflicts(), ended.parts_usable_from_us(MINUTE)), (&[][..], Some(end_us + micros(MINUTE))));
}

#[test]
fn parts_of_both_redis_of_one_name_rest() {
    let second = registry(NEVER, vec![other("eu", false, NEVER)]);
    let findings = settled().after_registry_reply(&second, AT_ONCE, &own());
    assert_eq!((findings.conflicts()[0].kind, findings.lease_ends_us()), (RegionConflictKind::SecondRedis, None));
    assert_eq!(waits_us(&findings, MINUTE), waited(HOUR - 10 * SECOND) + micros(MINUTE));
    // The pause does not end before the lease of the other, also if the registry forgot it.
    let forgot = findings.after_registry_reply(&registry(NEVER, vec![]), AT_ONCE, &own());
    assert_eq!(waits_us(&forgot, MINUTE), waited(HOUR - 10 * SECOND) + micros(MINUTE));
    // Another Redis of this region is another case.
    let replaced = findings.after_identity_reply(&identity(2, NEVER, false), AT_ONCE);
    assert!(waits_us(&replaced, MINUTE) < 0);
}

#[test]
fn parts_of_a_copied_redis_rest() {
    let copied = RegistryReply { contested_until: after(2000), ..registry(NEVER, both()) };
    let findings = settled().after_registry_reply(&copied, AT_ONCE, &own());
    assert_eq!((findings.conflicts()[0].kind, findings.lease_ends_us()), (RegionConflictKind::CopiedRedis, None));
    assert_eq!(waits_us(&findings, MINUTE), waited(1000 * SECOND) + micros(MINUTE));
    let healed = RegistryReply { contested_until: after(1000), ..registry(NEVER, both()) };
    assert_eq!(waits_us(&settled().after_registry_reply(&healed, AT_ONCE, &own()), MINUTE), micros(MINUTE));
}

#[test]
fn lease_runs_from_the_sending_of_an_uncontested_report() {
    let times = CallTimes { sent_us: RECEIVED_US - 300_000, answered_us: RECEIVED_US };
    let lease_us = micros(HOUR - HOUR.div_ceil(999));
    let findings = settled().after_registry_reply(&registry(NEVER, both()), times, &own());
    assert_eq!(findings.lease_ends_us(), Some(RECEIVED_US - 300_000 + lease_us));
    let read = RegistryReply { recorded: false, ..registry(NEVER, both()) };
    assert_eq!(settled().after_registry_reply(&read, times, &own()).lease_ends_us(), None, "it only read");
    // Another Redis has no lease of this one.
    assert_eq!(
        findings.after_identity_reply(&identity(1, NEVER, false), AT_ONCE).lease_ends_us(),
        findings.lease_ends_us()
    );
    assert_eq!(findings.after_identity_reply(&identity(2, NEVER, false), AT_ONCE).lease_ends_us(), None);
    // What another process of the region knows.
    let shared = IdentityReply { leased_until: after(1000 + 3600), ..identity(1, NEVER, false) };
    let told = settled().after_identity_reply(&shared, times);
    assert_eq!(told.lease_ends_us(), Some(RECEIVED_US - 300_000 + lease_us));
}

#[test]
fn new_identity_is_settled_if_no_region_has_had_another_list() {
    let new = RegionFindings::default().after_identity_reply(&identity(1, after(1000), true), AT_ONCE);
    let with = |reply| new.after_registry_reply(&reply, AT_ONCE, &own());
    let known = new.identity().expect("it is known");
    let proposal = RegionRedisId([9; 16]);
    assert_eq!(new.build_identity_claim(proposal), remember(known, false));
    assert!(with(registry(NEVER, both())).should_clear_new_mark());
    assert_eq!(with(registry(NEVER, both())).build_identity_claim(proposal), remember(known, true));
    let cases = [
        registry(after(1), vec![]),
        registry(NEVER, vec![other("us", false, after(1))]),
        registry(NEVER, vec![other("us", true, NEVER)]),
        registry(NEVER, vec![other("eu", false, NEVER)]),
        RegistryReply { contested_until: after(1001), ..registry(NEVER, both()) },
        RegistryReply { recorded: false, ..registry(NEVER, both()) },
    ];
    for reply in cases {
        assert!(!with(reply.clone()).should_clear_new_mark(), "{reply:?}");
    }
    assert_eq!(RegionFindings::default().build_identity_claim(proposal), IdentityClaim::Propose(proposal));
}

/// A standing and the clocks that it knows.
struct Region {
    standing: RegionStanding,
    region_clock: ServerClock,
    global_clock: ServerClock,
    connections: Arc<ConnectionOpenings>,
    start: Instant,
}

impl Region {
    fn new() -> Self {
        let region = Arc::<ClockJumps>::default();
        let global = Arc::new(region.for_other_deployment());
        let connections = Arc::<ConnectionOpenings>::default();
        Self {
            region_clock: ServerClock::new(Arc::clone(&region)),
            global_clock: ServerClock::new(Arc::clone(&global)),
            standing: RegionStanding::new(
                own(),
                ClockAndConnectionEvents {
                    region_jumps: region,
                    region_connections: Arc::clone(&connections),
                    global_jumps: global,
                },
            ),
            connections,
            start: Instant::now(),
        }
    }

    /// A region in which everything is known.
    fn settled() -> Self {
        let region = Self::new();
        region.identity(&identity(1, NEVER, false), 0);
        region.registry(&registry(NEVER, both()), 0);
        region
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    fn times(&self, seconds: u64) -> CallTimes {
        let us = process_time_us(self.at(seconds));
        CallTimes { sent_us: us, answered_us: us }
    }

    fn identity(&self, reply: &IdentityReply, seconds: u64) {
        self.standing.record_identity(reply, self.times(seconds));
    }

    fn registry(&self, reply: &RegistryReply, seconds: u64) {
        self.standing.record_registry(reply, self.times(seconds));
    }

    /// Reads a clock that shows `server` seconds.
    fn read(&self, clock: &ServerClock, seconds: u64, server: u64) {
        self.read_at(clock, seconds, after(server));
    }

    fn read_at(&self, clock: &ServerClock, seconds: u64, server: Time) {
        let from = self.at(seconds);
        clock.record(&ClockReading { within: InstantRange { from, until: from }, server });
    }

    fn restrict_view(&self, period_us: u64, at: Instant) -> GlobalTimeAndStanding {
        self.standing.restrict_view(VIEW, period_us, at)
    }

    fn notices(&self, seconds: u64) -> Vec<RegionNotice> {
        collect_region_notices(&self.standing, self.at(seconds))
    }

    fn notice_names(&self, seconds: u64) -> Vec<&'static str> {
        self.notices(seconds).iter().map(RegionNotice::name).collect()
    }
}

const VIEW: GlobalTimeAndStanding = GlobalTimeAndStanding { valid_until: START, ..GlobalTimeAndStanding::UNKNOWN };
const FREE: GlobalTimeAndStanding = GlobalTimeAndStanding { can_request: true, ..VIEW };

#[test]
fn region_is_cut_off_five_seconds_after_the_last_answer() {
    let region = Region::new();
    let nothing = GlobalTimeAndStanding { cut_off: true, parts_unusable: true, ..VIEW };
    assert_eq!(region.restrict_view(MINUTE, region.start), nothing);
    assert_eq!(region.notices(0), [RegionNotice::CutOff { parts_left: None }, RegionNotice::LeaseEnded]);
    region.identity(&identity(1, NEVER, false), 0);
    assert_eq!(region.restrict_view(MINUTE, region.start), nothing);
    region.standing.record_global_answer_time(process_time_us(region.start));
    assert_eq!(region.restrict_view(MINUTE, region.start), nothing, "no report was recorded");
    region.registry(&registry(NEVER, both()), 0);
    assert_eq!(region.restrict_view(MINUTE, region.start + CUT_OFF_AFTER), FREE);
    assert_eq!(region.notices(5), []);
    let cut_off = region.start + CUT_OFF_AFTER + Duration::from_micros(1);
    assert_eq!(region.restrict_view(MINUTE, cut_off), GlobalTimeAndStanding { cut_off: true, ..VIEW });
    region.standing.record_global_answer_time(process_time_us(region.at(7)));
    assert_eq!(region.restrict_view(MINUTE, cut_off), FREE, "a grant is an answer too");
}

#[test]
fn cut_off_region_loses_its_parts_when_its_lease_ends() {
    let region = Region::settled();
    assert!(!region.restrict_view(MINUTE, region.at(3590)).parts_unusable);
    let notices = region.notices(60);
    let [RegionNotice::CutOff { parts_left: Some(left) }] = notices[..] else { panic!("{notices:?}") };
    assert!((3530..3540).contains(&left.as_secs()), "{left:?}");
    assert!(notices[0].to_string().contains("end in 59m (TOLLKEEPER_REGION_LEASE)"), "{}", notices[0]);
    let cut_off = GlobalTimeAndStanding { cut_off: true, parts_unusable: true, ..VIEW };
    assert_eq!(region.restrict_view(MINUTE, region.at(3597)), cut_off, "a thousandth earlier");
    assert_eq!(region.notice_names(3597), ["cut_off", "lease_ended"]);
}

#[test]
fn conflict_takes_the_parts_and_leaves_the_grants() {
    let cases = [
        (registry(NEVER, vec![other("asia", false, NEVER), other("us", true, NEVER)]), "other_lists"),
        (registry(NEVER, [both(), vec![other("eu", false, NEVER)]].concat()), "second_redis"),
        (RegistryReply { contested_until: after(1100), ..registry(NEVER, both()) }, "copied_redis"),
    ];
    for (reply, notice) in cases {
        let region = Region::settled();
        region.registry(&reply, 10);
        assert_eq!(
            region.restrict_view(MINUTE, region.at(11)),
            GlobalTimeAndStanding { parts_unusable: true, ..FREE },
            "{notice}"
        );
        assert_eq!(region.notice_names(11), [notice]);
        assert!(region.notices(11)[0].restricts_region());
    }
}

#[test]
fn notice_of_a_second_redis_tells_when_it_ends() {
    let region = Region::settled();
    region.registry(&registry(NEVER, [both(), vec![other("eu", false, NEVER)]].concat()), 0);
    let text = region.notices(20)[0].to_string();
    assert!(
        text.contains("last reported 31s ago") && text.contains("60m from now") | text.contains("1h from now"),
        "{text}"
    );
}

#[test]
fn missing_regions_are_named_and_counted() {
    let region = Region::new();
    region.identity(&identity(1, NEVER, false), 0);
    assert_eq!(region.standing.count_reported_regions(), ReportedRegionCounts { reported: 0, listed: 3 });
    region.registry(&RegistryReply { recorded: false, ..registry(NEVER, vec![]) }, 0);
    assert_eq!(region.standing.count_reported_regions(), ReportedRegionCounts { reported: 0, listed: 3 });
    region.registry(&registry(NEVER, vec![]), 0);
    assert_eq!(region.standing.count_reported_regions(), ReportedRegionCounts { reported: 1, listed: 3 });
    assert_eq!(region.notices(0), [RegionNotice::NeverReported(vec!["asia".into(), "us".into()])]);
    let silent = OtherRegion { seen: after(939), ..other("us", false, NEVER) };
    region.registry(&registry(NEVER, vec![silent, other("old", false, NEVER)]), 0);
    assert_eq!(region.standing.count_reported_regions(), ReportedRegionCounts { reported: 2, listed: 3 });
    let expected = [RegionNotice::NeverReported(vec!["asia".into()]), RegionNotice::NotSeen(vec!["us".into()])];
    assert_eq!(region.notices(0), expected);
    region.registry(&registry(NEVER, both()), 0);
    assert_eq!(region.standing.count_reported_regions(), ReportedRegionCounts { reported: 3, listed: 3 });
    assert_eq!(region.notices(0), []);
}

#[test]
fn jump_of_the_global_clock_stops_grants_for_a_period() {
    let region = Region::settled();
    region.read(&region.global_clock, 0, 1000);
    region.read_at(&region.global_clock, 1, after(1000).plus_us(100_000));
    assert_eq!(region.restrict_view(MINUTE, region.at(1)), FREE, "a step of less than a second");
    assert_eq!(region.notices(1), []);
    region.read(&region.global_clock, 2, 1001);
    region.read(&region.global_clock, 3, 1005);
    region.registry(&registry(NEVER, both()), 60);
    let resting = GlobalTimeAndStanding { cut_off: true, ..GlobalTimeAndStanding::UNKNOWN };
    assert_eq!(region.restrict_view(MINUTE, region.at(60)), resting);
    assert!(region.standing.global_clock_jumped_recently(MINUTE, region.at(60)));
    assert_eq!(region.notice_names(60), ["global_clock_jumped"]);
    assert_eq!(region.restrict_view(MINUTE, region.at(64)), FREE);
    assert!(!region.standing.global_clock_jumped_recently(MINUTE, region.at(64)));
    assert_eq!(region.restrict_view(HOUR, region.at(64)), resting, "a longer period rests longer");
    assert_eq!(region.notice_names(64), ["global_clock_jumped"], "and the notice is about the longest");
}

#[test]
fn registry_that_knows_of_a_jump_stops_grants_too() {
    let region = Region::settled();
    region.registry(&RegistryReply { clock_jumped: after(970), ..registry(NEVER, both()) }, 10);
    let rests = |seconds| region.restrict_view(MINUTE, region.at(seconds)).cut_off;
    region.registry(&registry(NEVER, both()), 40);
    assert!(rests(39) && !rests(41));
    // A jump forwards does not end the pause.
    let jumped = RegistryReply { clock_jumped: after(970), ..registry(NEVER, both()) };
    region.registry(&RegistryReply { now: after(1130), ..jumped }, 20);
    region.registry(&registry(NEVER, both()), 38);
    assert!(rests(39) && !rests(41));
}

#[test]
fn jump_of_the_region_clock_lets_the_parts_rest() {
    let region = Region::settled();
    region.read(&region.region_clock, 0, 1000);
    region.read(&region.region_clock, 1, 1130);
    region.registry(&registry(NEVER, both()), 60);
    assert_eq!(region.restrict_view(MINUTE, region.at(60)), GlobalTimeAndStanding { parts_unusable: true, ..FREE });
    assert_eq!(region.notice_names(60), ["region_clock_jumped"]);
    assert_eq!(region.restrict_view(MINUTE, region.at(62)), FREE);
    // What the region's Redis was told by another process.
    let region = Region::settled();
    region.identity(&IdentityReply { clock_jumped: after(990), ..identity(1, NEVER, false) }, 0);
    assert!(region.restrict_view(MINUTE, region.at(4)).parts_unusable);
    assert_eq!(region.notice_names(4), ["region_clock_jumped"]);
}

#[test]
fn parts_are_unused_from_a_new_connection_until_the_identity_is_read_again() {
    let region = Region::settled();
    region.connections.record(process_time_us(region.at(2)));
    assert!(region.restrict_view(MINUTE, region.at(2)).parts_unusable, "behind it may be an empty Redis");
    region.identity(&identity(1, NEVER, false), 1);
    assert!(region.restrict_view(MINUTE, region.at(3)).parts_unusable, "sent before");
    region.identity(&identity(1, NEVER, false), 3);
    assert!(!region.restrict_view(MINUTE, region.at(3)).parts_unusable);
}

#[test]
fn jump_of_one_clock_hides_none_of_another() {
    let region = Region::settled();
    region.read(&region.region_clock, 0, 1000);
    region.read(&region.global_clock, 0, 1000);
    region.read(&region.region_clock, 1, 1100);
    region.read(&region.global_clock, 2, 1100);
    assert!(
        region.restrict_view(MINUTE, region.at(3)).cut_off,
        "the first jump voided the estimate of the other clock"
    );
    let region = Region::settled();
    region.read(&region.region_clock, 0, 1000);
    region.read(&region.global_clock, 0, 1000);
    region.read(&region.region_clock, 1, 1100);
    region.read(&region.global_clock, 2, 1002);
    region.read(&region.region_clock, 3, 1102);
    region.read(&region.global_clock, 4, 1004);
    assert_eq!(region.restrict_view(MINUTE, region.at(4)), GlobalTimeAndStanding { parts_unusable: true, ..FREE });
    assert_eq!(region.region_clock_jumps(), 1, "the jump is counted once");
}

impl Region {
    fn region_clock_jumps(&self) -> u64 {
        self.region_clock.deployment_jumps().count()
    }
}
