//! Leases of several processes from one region's counter: never more than the region was granted and has in reserve.

use std::collections::BTreeMap;
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use proptest::prelude::*;
use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::local_budget::LocalBudget;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Consistency, GlobalScope, Limit, LimitSpec, Overshoot, RegionLossPolicy, Scope};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::descriptor::{DescriptorId, EventualDescriptor};
use tollkeeper::store::redis::eventual::table::EventualTable;
use tollkeeper::store::redis::eventual::{AdmitContext, DescriptorStateReport, LeaseTicket, LocalDecision};

const PERIOD_US: u64 = 2_000_000;
/// Global time minus the time of the region's Redis.
const OFFSET_US: u64 = 700_000;
const REGION_START_US: u64 = 1_700_000_000_000_000;

/// Step of the region, `after_us` after the one before it.
#[derive(Clone, Debug)]
struct Step {
    after_us: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A process is asked for hits; a call takes these times there and back, in microseconds.
    Charge {
        process: usize,
        hits: u64,
        there_us: u64,
        back_us: u64,
        below_us: u64,
        above_us: u64,
    },
    /// A refund, perhaps of more than was charged.
    Refund(u64),
    Grant(u64),
    CutOff(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let width = || prop_oneof![3 => 0..5_000_u64, 1 => 0..200_000_u64];
    let delay = || prop_oneof![3 => 0..3_000_u64, 1 => 0..300_000_u64];
    let charge = (0..3_usize, 1..4_u64, delay(), delay(), width(), width()).prop_map(
        |(process, hits, there_us, back_us, below_us, above_us)| Kind::Charge {
            process,
            hits,
            there_us,
            back_us,
            below_us,
            above_us,
        },
    );
    let kind = prop_oneof![
        60 => charge,
        2 => (1..60_u64).prop_map(Kind::Refund),
        3 => (1..80_u64).prop_map(Kind::Grant),
        1 => proptest::bool::weighted(0.3).prop_map(Kind::CutOff),
    ];
    let after = prop_oneof![8 => 0..15_000_u64, 1 => 0..600_000_u64];
    (after, kind).prop_map(|(after_us, kind)| Step { after_us, kind })
}

/// Processes of one region over its counter.
struct Region {
    start: Instant,
    elapsed_us: u64,
    state: State,
    descriptor: EventualDescriptor,
    processes: Vec<(EventualTable, Vec<LeaseTicket>)>,
    cut_off: bool,
    /// Leases with the time of the region's Redis until which they are recorded, and their hits.
    record: Vec<(Time, u64)>,
    granted: BTreeMap<u64, u64>,
    admitted: BTreeMap<u64, u64>,
    /// Hits admitted from leases.
    leased: u64,
    /// Hits of leases that were returned.
    returned: u64,
}

impl Region {
    fn new(algorithm: Algorithm) -> Self {
        let scope = GlobalScope {
            on_region_loss: RegionLossPolicy::Deny,
            reserve_milli_percent: 10_000,
            ..GlobalScope::new(NonZeroU16::new(2).unwrap())
        };
        let spec = LimitSpec {
            scope: Some(Scope::Global(scope)),
            consistency: Some(Consistency::Eventual(Overshoot::DEFAULT)),
            ..LimitSpec::new(algorithm, 1000, Period::new(Unit::Second, 2).unwrap())
        };
        let limit = Limit::new(&spec).unwrap().as_counted_in_region();
        let counters: SmallVec<[OwnedCounter; 1]> =
            smallvec![OwnedCounter { limit, shadow: false, quota: false, tag: 0 }];
        let budget = LocalBudget::for_limits([limit].iter(), NonZeroU32::MIN).unwrap();
        assert_eq!(budget.share, 0);
        Self {
            start: Instant::now(),
            elapsed_us: 0,
            state: State::empty(limit.counting_method()),
            descriptor: EventualDescriptor { id: DescriptorId::new(1, &counters), budget, counters },
            processes: (0..3).map(|_| (EventualTable::new(1 << 20), Vec::new())).collect(),
            cut_off: false,
            record: Vec::new(),
            granted: BTreeMap::new(),
            admitted: BTreeMap::new(),
            leased: 0,
            returned: 0,
        }
    }

    fn limit(&self) -> Limit {
        self.descriptor.counters[0].limit
    }

    fn at(&self) -> Instant {
        self.start + Duration::from_micros(self.elapsed_us)
    }

    fn redis_time(&self) -> Time {
        Time::from_micros(REGION_START_US + self.elapsed_us)
    }

    /// Window of the true global time.
    fn window(&self) -> u64 {
        (REGION_START_US + OFFSET_US + self.elapsed_us) / PERIOD_US
    }

    fn admit(&mut self, hits: u64) {
        *self.admitted.entry(self.window()).or_default() += hits;
    }

    fn clock(&self, below_us: u64, above_us: u64) -> GlobalTimeAndStanding {
        let offset = |us: u64| i64::try_from(us).unwrap();
        GlobalTimeAndStanding {
            valid_until: Time::from_micros(REGION_START_US + self.elapsed_us + 1),
            offset_lo: offset(OFFSET_US) - offset(below_us),
            offset_hi: offset(OFFSET_US + above_us),
            can_request: true,
            cut_off: self.cut_off,
            ..GlobalTimeAndStanding::UNKNOWN
        }
    }

    /// Ends the leases of a process whose time is over, and returns their unused hits.
    fn end_leases(&mut self, process: usize) {
        let (at, now, limit) = (self.at(), self.redis_time(), self.limit());
        let clock = self.clock(0, 0);
        let (table, tickets) = &mut self.processes[process];
        let (ended, live): (Vec<_>, Vec<_>) = tickets.drain(..).partition(|ticket| ticket.end <= at);
        *tickets = live;
        for ticket in ended {
            let unused = table.end_lease(self.descriptor.id, ticket.serial);
            let Some(void_from) = ticket.void_from.filter(|void_from| unused > 0 && now < *void_from) else { continue };
            self.state.set_global_view(&clock);
            self.state.charge(&limit, now, ChargeRequest::new(Hits::Refund(unused), 0));
            self.record.retain(|record| *record != (ticket.recorded.end, ticket.recorded.hits));
            self.returned += unused;
            assert!(void_from <= now.plus_us(PERIOD_US), "a return waits for another window");
        }
    }

    fn run(&mut self, step: &Step) {
        self.elapsed_us += step.after_us;
        match step.kind {
            Kind::CutOff(cut_off) => self.cut_off = cut_off,
            Kind::Grant(hits) => {
                if let State::RegionWindow(state) = &mut self.state {
                    state.counts.granted += hits;
                    state.counts.granted_total += hits;
                    *self.granted.entry(state.counts.window).or_default() += hits;
                }
            }
            Kind::Refund(hits) => {
                let (now, limit, clock) = (self.redis_time(), self.limit(), self.clock(0, 0));
                self.record.retain(|(end, _)| *end > now);
                let lent = self.record.iter().map(|(_, hits)| hits).sum();
                self.state.set_global_view(&clock);
                let refund = ChargeRequest { lent, ..ChargeRequest::new(Hits::Refund(hits), 0) };
                self.state.charge(&limit, now, refund);
                let admitted = self.admitted.entry(self.window()).or_default();
                *admitted = admitted.saturating_sub(hits);
            }
            Kind::Charge { process, hits, there_us, back_us, below_us, above_us } => {
                let command =
                    OwnedCharge::new(self.descriptor.counters.clone(), ChargeRequest::new(Hits::Charge(hits), 0));
                let at = self.at();
                let now = self.redis_time();
                self.end_leases(process);
                let (table, _) = &mut self.processes[process];
                let context = AdmitContext { at, now, may_use_share: true, is_retry: false };
                if let LocalDecision::Local { .. } = table.try_admit(&self.descriptor, &command, context) {
                    self.leased += hits;
                    return self.admit(hits);
                }
                let lease = table.hits_to_lease(&self.descriptor, at, 3);
                self.elapsed_us += there_us;
                let (now, limit, clock) = (self.redis_time(), self.limit(), self.clock(below_us, above_us));
                self.state.set_global_view(&clock);
                if self.state.charge(&limit, now, command.request).admitted {
                    self.admit(hits);
                }
                let request = ChargeRequest::new(Hits::Charge(lease), 0);
                let leased = if lease > 0 && self.state.charge(&limit, now, request).admitted { lease } else { 0 };
                if leased > 0 {
                    self.record.push((now.plus_us(self.descriptor.budget.lease_record_lifetime_us()), leased));
                }
                let report = DescriptorStateReport { sent: at, now, states: smallvec![self.state.clone()], leased };
                self.elapsed_us += back_us;
                let (table, tickets) = &mut self.processes[process];
                if let Some(ticket) = table.record_report(&self.descriptor, report) {
                    tickets.push(ticket);
                }
            }
        }
    }
}

fn check(algorithm: Algorithm, steps: &[Step]) -> Result<Region, TestCaseError> {
    let mut region = Region::new(algorithm);
    let reserve = u64::from(region.limit().region_reserve());
    for step in steps {
        region.run(step);
        for (window, admitted) in &region.admitted {
            let most = region.granted.get(window).copied().unwrap_or(0) + reserve;
            prop_assert!(*admitted <= most, "{admitted} of {most} in window {window}");
        }
    }
    Ok(region)
}

proptest! {
    #[test]
    fn leases_admit_what_the_region_may_in_each_window(
        is_fixed in any::<bool>(),
        steps in proptest::collection::vec(step(), 100..600),
    ) {
        let algorithm = if is_fixed { Algorithm::FixedWindow } else { Algorithm::SlidingWindowCounter };
        check(algorithm, &steps)?;
    }
}

/// Charges so many times, 2 ms apart, and once more in the same window when the last lease has ended.
fn charge_steadily(times: usize) -> Region {
    let mut steps = vec![Step { after_us: 1_400_000, kind: Kind::Refund(1) }];
    let charge = Kind::Charge { process: 0, hits: 1, there_us: 100, back_us: 100, below_us: 100, above_us: 100 };
    steps.push(Step { after_us: 0, kind: charge });
    steps.push(Step { after_us: 0, kind: Kind::Grant(800) });
    steps.extend((0..times).map(|_| Step { after_us: 2_000, kind: charge }));
    steps.push(Step { after_us: 1_050_000, kind: charge });
    check(Algorithm::FixedWindow, &steps).unwrap()
}

#[test]
fn steady_demand_is_admitted_from_leases() {
    let leased = charge_steadily(300).leased;
    assert!(leased > 50, "{leased} of 300 hits were leased");
}

#[test]
fn unused_hits_of_a_lease_return_in_their_window() {
    let returned = [4, 8, 12, 16, 20].map(|times| charge_steadily(times).returned);
    assert!(returned.iter().any(|hits| *hits > 0), "{returned:?}");
}

#[test]
fn allowance_of_an_unknown_window_is_not_lent() {
    let mut region = Region::new(Algorithm::FixedWindow);
    let (now, limit, clock) = (region.redis_time(), region.limit(), region.clock(0, 0));
    region.state.set_global_view(&clock);
    if let State::RegionWindow(state) = &mut region.state {
        // A window ahead of global time comes from a clock that was wrong.
        state.counts.window = (REGION_START_US + OFFSET_US) / PERIOD_US + 1;
    }
    assert_eq!(region.state.grant_time_left_us(&limit, now), 0);
}
