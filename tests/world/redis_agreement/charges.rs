//! Charges through the scripts: counters of every counting method, alone and together, with bans, reservations, slots,
//! leases and holds.

use std::num::{NonZeroU16, NonZeroU32};
use std::slice;

use bytes::Bytes;
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::RegionConnection;
use tollkeeper::limit::algorithm::{Algorithm, CountingMethod};
use tollkeeper::limit::ban::Ban;
use tollkeeper::limit::calendar::Zone;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::overflow::ChainPosition;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::reservation::{ReservationPolicy, UnsettledPolicy};
use tollkeeper::limit::slot::{HolderId, SlotAction, SlotId, SlotToken, SlotUse};
use tollkeeper::limit::window::WindowSpec;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, MAX_REQUESTS_PER_UNIT, RegionLossPolicy, Scope};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::holders::SlotHolderTable;
use tollkeeper::store::redis::eventual::{LeaseArguments, LeasePurpose, OwnLease, StoredLease, build_full_refund};
use tollkeeper::store::redis::script::{CallTime, encode_charges, encode_slot, hold_script, script_for_limits};

use super::script_calls::ScriptCalls;

/// What a descriptor has beside its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extra {
    None,
    Bans,
    Reservations,
    BansAndReservations,
    Slots,
    Regions,
    Overflow,
}

/// Descriptors that are not one counter alone: what they have, and the least and most counters.
const COMPOSED_KINDS: [(Extra, u64, u64); 10] = [
    (Extra::None, 2, 3),
    (Extra::Bans, 1, 1),
    (Extra::Bans, 2, 3),
    (Extra::Reservations, 1, 1),
    (Extra::Reservations, 2, 3),
    (Extra::BansAndReservations, 1, 3),
    (Extra::Slots, 2, 3),
    (Extra::Regions, 1, 1),
    (Extra::Regions, 2, 3),
    (Extra::Overflow, 2, 4),
];

/// Number of kinds of descriptors: one counter of each counting method, and composed ones.
pub(crate) const DESCRIPTOR_KINDS: u64 = (CountingMethod::ALL.len() + COMPOSED_KINDS.len()) as u64;

impl Extra {
    /// What a counter of a counting method needs.
    const fn of_counting(counting: CountingMethod) -> Self {
        match counting {
            CountingMethod::Slots => Self::Slots,
            _ => Self::None,
        }
    }

    /// Name of a call with one counter, of this counting method, or with several.
    const fn call_name(self, single: Option<CountingMethod>) -> &'static str {
        match (self, single) {
            (Self::None | Self::Slots, Some(counting)) => counting.name(),
            (Self::None, None) => "several counters",
            (Self::Bans, Some(_)) => "one counter with a ban",
            (Self::Bans, None) => "several counters with bans",
            (Self::Reservations, _) => "reservations",
            (Self::BansAndReservations, _) => "bans and reservations",
            (Self::Slots, None) => "slots and other counters",
            (Self::Regions, Some(_)) => "one counter of a region",
            (Self::Regions, None) => "several counters of a region",
            (Self::Overflow, _) => "limits that overflow",
        }
    }
}

/// Counters that are charged together.
#[derive(Debug)]
pub(crate) struct Descriptor {
    tag: u64,
    extra: Extra,
    /// For each counter, its limit before and after a change of the rules.
    counters: Vec<[OwnedCounter; 2]>,
}

impl Descriptor {
    /// Creates a descriptor; its kind depends on its tag.
    pub(crate) fn random(calls: &mut ScriptCalls, tag: u64) -> Self {
        let kind = usize::try_from(tag % DESCRIPTOR_KINDS).expect("a small number");
        if let Some(&counting) = CountingMethod::ALL.get(kind) {
            let extra = Extra::of_counting(counting);
            let counters = std::iter::repeat_with(|| random_counters(calls, extra, 0));
            let is_wanted = |counters: &[OwnedCounter; 2]| counters[0].limit.counting_method() == counting;
            return Self { tag, extra, counters: counters.filter(is_wanted).take(1).collect() };
        }
        let (extra, least, most) = COMPOSED_KINDS[kind - CountingMethod::ALL.len()];
        let count = calls.chance.between(least, most);
        Self { tag, extra, counters: (0..count).map(|place| random_counters(calls, extra, place)).collect() }
    }

    /// Creates another descriptor of the same kind.
    pub(crate) fn replacement(&self, calls: &mut ScriptCalls) -> Self {
        Self::random(calls, self.tag + DESCRIPTOR_KINDS)
    }

    fn key(&self, name: &str) -> Bytes {
        format!("{{{}}}:{name}", self.tag).into()
    }

    /// Keys of a call: the counters, then the bans, the reservations and the pools of those that have some.
    fn keys(&self) -> Vec<Bytes> {
        let places = 0..self.counters.len();
        let named = |name: &'static str, has: fn(&Limit) -> bool| {
            let places = places.clone().filter(move |place| has(&self.counters[*place][0].limit));
            places.map(move |place| self.key(&format!("{name}{place}")))
        };
        let counters = named("", |_| true);
        let bans = named("ban", |limit| limit.ban().is_some());
        let reservations = named("reservations", |limit| limit.reservations().is_some());
        counters.chain(bans).chain(reservations).chain(named("pool", Limit::is_counted_in_region)).collect()
    }

    /// Keys of the pools of a region, and the limits of their counters.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (Bytes, Limit)> {
        let limits = self.counters.iter().map(|counters| counters[0].limit).enumerate();
        let of_region = limits.filter(|(_, limit)| limit.is_counted_in_region());
        of_region.map(|(place, limit)| (self.key(&format!("pool{place}")), limit))
    }

    fn owned_counters(&self, calls: &mut ScriptCalls) -> SmallVec<[OwnedCounter; 1]> {
        let rules = usize::from(calls.chance.one_in(6));
        self.counters.iter().map(|counters| counters[rules]).collect()
    }
}

/// Limits of a counter before and after a change of the rules.
fn random_counters(calls: &mut ScriptCalls, extra: Extra, place: u64) -> [OwnedCounter; 2] {
    loop {
        let spec = random_spec(calls, extra, place);
        let is_region = extra == Extra::Regions && place < 2;
        let requests = 1 + calls.chance.below(spec.requests_per_unit + 5);
        let changed = LimitSpec {
            requests_per_unit: requests,
            period: if calls.chance.one_in(3) { random_period(calls) } else { spec.period },
            ..spec
        };
        let shadow = calls.chance.one_in(6);
        let connection = calls.chance.pick(&[RegionConnection::Connected, RegionConnection::CutOff]);
        let counter = |spec: &LimitSpec| {
            let limit = Limit::new(spec).ok()?;
            let limit = if is_region { limit.as_counted_in_region(connection) } else { limit };
            Some(OwnedCounter { limit, shadow, quota: false, tag: 0 })
        };
        if let (Some(first), Some(second)) = (counter(&spec), counter(&changed))
            && first.limit.counting_method() == second.limit.counting_method()
        {
            return [first, second];
        }
    }
}

fn random_period(calls: &mut ScriptCalls) -> Period {
    let unit = calls.chance.pick(&[Unit::Second, Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Month]);
    let multiplier = u32::try_from(calls.chance.between(1, 4)).expect("a small number");
    Period::new(unit, multiplier).expect("a short period")
}

fn random_spec(calls: &mut ScriptCalls, extra: Extra, place: u64) -> LimitSpec {
    let period = random_period(calls);
    let chance = &mut calls.chance;
    let mut small = |most: u64| u32::try_from(chance.between(1, most)).expect("a small number");
    let (few, many, size, seconds) = (small(12), small(3000), small(40), small(900));
    let is_region = extra == Extra::Regions && place < 2;
    let algorithm = match extra {
        Extra::Slots if place == 0 => Algorithm::Concurrent,
        _ if is_region => {
            chance.pick(&[Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindowCounter])
        }
        Extra::Overflow => chance.pick(&[
            Algorithm::TokenBucket,
            Algorithm::FixedWindow,
            Algorithm::SlidingWindowCounter,
            Algorithm::SlidingWindowLog,
        ]),
        _ => chance.pick(&Algorithm::ALL),
    };
    let requests = if chance.one_in(20) { 0 } else { chance.pick(&[few, few, many]).into() };
    let is_large = algorithm.counts_above_32_bits() && !is_region && chance.one_in(4);
    let large = chance.pick(&[MAX_REQUESTS_PER_UNIT - u64::from(few), (1 << 32) + u64::from(few)]);
    let requests = if is_large { large } else { requests };
    let ban = chance.pick(&[1_000_000, 60_000_000, 5_000_000_000]);
    let ban = Ban::new(ban, few.min(4)).map(|ban| ban.with_count_of_peeks(chance.one_in(2)));
    let unsettled = chance.pick(&[UnsettledPolicy::Keep, UnsettledPolicy::Return]);
    let estimate = if chance.one_in(2) { NonZeroU32::new(few) } else { None };
    let scope = Scope::Global(GlobalScope {
        on_region_loss: chance.pick(&RegionLossPolicy::ALL),
        ..GlobalScope::new(NonZeroU16::new(3).expect("3 is not 0"))
    });
    let zone = chance.pick(&["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/New_York"]);
    let window = WindowSpec::in_zone(Zone::from_name(zone).expect("the zone is known"));
    LimitSpec {
        bucket_size: (algorithm == Algorithm::TokenBucket && chance.one_in(2)).then_some(size),
        queue_size: (algorithm == Algorithm::LeakyBucket).then_some(size),
        max_wait_us: if chance.one_in(3) { Some(chance.below(3_000_000)) } else { None },
        count_rejected: if chance.one_in(3) { Some(chance.one_in(2)) } else { None },
        calendar_months: chance.one_in(3),
        window: (algorithm == Algorithm::FixedWindow && !is_region && chance.one_in(2)).then_some(window),
        sole: false,
        ban: ban.filter(|_| matches!(extra, Extra::Bans | Extra::BansAndReservations) && !chance.one_in(4)),
        reservations: ReservationPolicy::new(seconds, unsettled, estimate)
            .filter(|_| matches!(extra, Extra::Reservations | Extra::BansAndReservations)),
        scope: is_region.then_some(scope),
        chain_position: match (extra, u8::try_from(place).unwrap_or(u8::MAX)) {
            (Extra::Overflow, 0) => ChainPosition::First,
            // The fourth stands beside them.
            (Extra::Overflow, 1..=2) => ChainPosition::After,
            _ => ChainPosition::NotInChain,
        },
        ..LimitSpec::new(algorithm, requests, period)
    }
}

impl ScriptCalls {
    /// Makes a random call on the counters of a descriptor.
    pub(crate) fn charge(&mut self, descriptor: &Descriptor) {
        let has_slot = matches!(descriptor.extra, Extra::Slots | Extra::Reservations | Extra::BansAndReservations);
        let count = if has_slot { 1 } else { self.chance.pick(&[1, 1, 2, 4]) };
        let mut charges = Vec::new();
        for _ in 0..count {
            let charge = self.random_charge(descriptor, has_slot);
            let times = if has_slot { 1 } else { self.chance.pick(&[1, 1, 1, 2, 5]) };
            charges.extend(std::iter::repeat_n(charge, times));
        }
        let script = script_for_limits(charges[0].counters.iter().map(|counter| &counter.limit));
        let (keys, mut arguments) = (descriptor.keys(), vec![self.encode(&charges)]);
        if let Some(slot) = charges[0].slot.as_deref() {
            let slot = self.encode_slot(slot);
            arguments.extend([Bytes::new(), slot]);
        } else if descriptor.extra == Extra::None && self.chance.one_in(3) {
            return self.charge_with_leases(descriptor, charges);
        }
        if self.chance.one_in(200) {
            let key = keys[self.chance.place(keys.len())].clone();
            self.spoil(&key);
        }
        let single = match &*descriptor.counters {
            [counters] => Some(counters[0].limit.counting_method()),
            _ => None,
        };
        self.call(descriptor.extra.call_name(single), script, &keys, &arguments);
    }

    fn encode(&mut self, charges: &[OwnedCharge]) -> Bytes {
        let about = self.now();
        encode_charges(charges, self.given_time().map_or(CallTime::Server { about }, CallTime::Given))
    }

    fn random_charge(&mut self, descriptor: &Descriptor, has_slot: bool) -> OwnedCharge {
        let counters = descriptor.owned_counters(self);
        let requests = counters[0].limit.requests_per_unit();
        let hits = match self.chance.below(10) {
            0 if !has_slot => Hits::Peek,
            1 | 2 if !has_slot => Hits::Refund(self.chance.pick(&[1, 2, requests.max(1), 1 << 40])),
            3 => Hits::Charge(self.chance.between(1, requests + 2)),
            _ => Hits::Charge(self.chance.pick(&[1, 1, 2, 5])),
        };
        let slot = has_slot.then(|| Box::new(self.random_slot()));
        let hits = match &slot {
            Some(slot) if slot.action.is_release() => Hits::Refund(self.chance.pick(&[0, 1, 3, 8, requests])),
            _ => hits,
        };
        let max_delay_us = self.chance.pick(&[0, 0, 10_000, 3_000_000, 1 << 60]);
        let is_refund = matches!(hits, Hits::Refund(_)) && !has_slot;
        let void_from = if is_refund && self.chance.one_in(3) { Some(self.time_within(10_000_000)) } else { None };
        let request =
            ChargeRequest { is_sent_by_client: self.chance.one_in(2), ..ChargeRequest::new(hits, max_delay_us) };
        OwnedCharge { void_from, slot, ..OwnedCharge::new(counters, request) }
    }

    fn random_slot(&mut self) -> SlotUse {
        let action = self.chance.pick(&[
            SlotAction::Acquire,
            SlotAction::Acquire,
            SlotAction::Acquire,
            SlotAction::Release,
            SlotAction::Release,
            SlotAction::ReleaseUnanswered,
            SlotAction::ReleaseRejected,
        ]);
        let (id, token) = (SlotId(u128::from(self.chance.below(8))), SlotToken(self.chance.below(3)));
        SlotUse { id, token, holder: HolderId(self.chance.below(4)), action }
    }

    fn encode_slot(&mut self, slot: &SlotUse) -> Bytes {
        let (holders, now) = (SlotHolderTable::default(), self.now());
        if self.chance.one_in(3) {
            holders.set_shared_dead_holders([HolderId(self.chance.below(4)), HolderId(9)].into_iter(), now);
        }
        encode_slot(slot, &holders, now)
    }

    /// Makes a call that concerns leases.
    fn charge_with_leases(&mut self, descriptor: &Descriptor, mut charges: Vec<OwnedCharge>) {
        let record = descriptor.key("leases");
        let recorded = self.numbers(&record);
        let mut own: SmallVec<[OwnLease; 2]> = SmallVec::new();
        for lease in recorded.chunks_exact(2).take(2) {
            if self.chance.one_in(2) {
                let lease = StoredLease { end: Time::from_micros(lease[0]), hits: lease[1] };
                own.push(OwnLease { lease, done: self.chance.below(lease.hits + 1) });
            }
        }
        let purpose = match self.chance.below(4) {
            0 if !own.is_empty() => {
                own.truncate(1);
                charges = vec![build_full_refund(descriptor.owned_counters(self))];
                charges[0].request.hits = Hits::Refund(own[0].lease.hits.max(1));
                LeasePurpose::Return
            }
            1 => {
                charges = vec![build_full_refund(descriptor.owned_counters(self))];
                LeasePurpose::Reset
            }
            _ => {
                let requested = self.chance.between(1, 30);
                let request = ChargeRequest::new(Hits::Charge(requested), 0);
                charges.push(OwnedCharge::new(descriptor.owned_counters(self), request));
                LeasePurpose::Charge { requested, kept_us: self.chance.between(1, 2_000_000) }
            }
        };
        let script = script_for_limits(charges[0].counters.iter().map(|counter| &counter.limit));
        let mut keys = descriptor.keys();
        keys.push(record);
        let arguments = [self.encode(&charges), LeaseArguments { purpose, own }.encode()];
        self.call("leases", script, &keys, &arguments);
    }

    /// Makes calls on single counters in one command.
    pub(crate) fn charge_merged(&mut self, descriptors: &[Descriptor]) {
        let counting = self.chance.pick(&CountingMethod::ALL);
        let is_alone = |descriptor: &&Descriptor| {
            descriptor.counters.len() == 1
                && descriptor.extra == Extra::None
                && descriptor.counters[0][0].limit.counting_method() == counting
        };
        let single: Vec<&Descriptor> = descriptors.iter().filter(is_alone).collect();
        let Some(first) = single.first() else { return };
        let script = script_for_limits([&first.counters[0][0].limit].into_iter());
        let Some(merged) = &script.merged else { return };
        let (mut keys, mut arguments) = (Vec::new(), Vec::new());
        for descriptor in &single {
            // Calls with equal arguments are one group.
            let (about, group) = (self.now(), self.chance.between(1, 2));
            let charge = self.random_charge(descriptor, false);
            let charges = encode_charges(slice::from_ref(&charge), CallTime::Server { about });
            arguments.extend([Bytes::from(group.to_string()), charges]);
            keys.push(descriptor.key("0"));
            keys.extend((1..group).map(|number| descriptor.key(&format!("other{number}"))));
        }
        self.call("merged calls", merged, &keys, &arguments);
    }

    /// Adjusts a hold on a counter, if its limit supports holds; the argument is that of `lua/hold.lua`.
    pub(crate) fn adjust_hold(&mut self, descriptor: &Descriptor) {
        if descriptor.extra != Extra::None {
            return;
        }
        let counter = descriptor.owned_counters(self)[0];
        let limit = &counter.limit;
        let windows = match limit.counting_method() {
            CountingMethod::TokenBucket => 0_u64,
            CountingMethod::FixedWindow | CountingMethod::CalendarWindow => 1,
            CountingMethod::SlidingWindowCounter => 2,
            _ => return,
        };
        let counters = [counter].into_iter().collect();
        let peek = OwnedCharge::new(counters, ChargeRequest::new(Hits::Peek, 0));
        let mut argument = self.encode(slice::from_ref(&peek)).to_vec();
        let calendar = limit.counting_method() == CountingMethod::CalendarWindow || limit.follows_calendar_months();
        let window_end = |after: u64| if calendar { self.now().as_micros() + after * 40_000_000_000 } else { 0 };
        let ends = [window_end(1), window_end(2)];
        let requests = limit.requests_per_unit();
        let used = self.chance.pick(&[0, 0, 1, 3, requests]);
        let wanted = [self.chance.below(requests + 3), self.chance.pick(&[0, 1, 4, 20])];
        let lasts_us = self.chance.pick(&[0, 1_000_000, 100_000_000, 3_600_000_000]);
        let numbers = [
            requests,
            limit.capacity(),
            u64::from(windows == 0),
            windows,
            ends[0],
            ends[1],
            used,
            wanted[0],
            wanted[1],
            lasts_us,
            self.chance.below(10),
            self.chance.below(4),
            self.chance.below(4),
            limit.capacity(),
            1 + 2 * u64::from(limit.counts_rejected_hits()),
        ];
        numbers.iter().for_each(|number| argument.extend_from_slice(&number.to_le_bytes()));
        argument.extend_from_slice(&[u8::try_from(self.chance.below(3)).expect("a small number"); 16]);
        let keys = [descriptor.key("0"), descriptor.key("holds")];
        self.call("holds", hold_script(limit.counting_method()), &keys, &[argument.into()]);
    }
}
