//! Scripts that count in Redis: their texts, their argument, and the results of a call from their reply.
//!
//! - *Texts* are composed of a driver and the parts of algorithms. A line `--: NAME` in a Lua file starts a part, and
//!   a line `--> NAME` is replaced by a part. A script for one counter has the parts inline in the driver: it runs
//!   without creating functions and tables, which halves its time. A script for several counters has the same parts as
//!   functions. Comments are removed, so that the hash of a script, and the copy that servers cache, changes with its
//!   code only.
//! - *The argument* is a string of signed 64-bit little-endian numbers, in the layout that `lua/driver.lua` documents.
//!   Dry runs and peeks change nothing and are not sent. Delays are bounded so that a Lua number holds every value
//!   exactly.
//! - *Results* are not computed by the script, which decides charges and changes states. It returns its time and the
//!   states as it found them. The same charges are repeated here on those states by the algorithms of
//!   [`algorithm`](crate::limit::algorithm), so that each result is computed in one place for all stores.

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use bytes::{BufMut, Bytes, BytesMut};
use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::joint_charge::{charge_together, divide_refund};
use crate::limit::algorithm::region_pool::TakenHits;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::stored_state::{MAX_LUA_INTEGER, MalformedReply, ReplyReader, ScriptCharge};
use crate::limit::algorithm::{CountingMethod, for_each_counting};
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::limit::hold::{TotalHold, supports_holds};
use crate::limit::request::Hits;
use crate::limit::reservation::ReservationPolicy;
use crate::limit::slot::{SlotAction, SlotUse};
use crate::store::charge::{OwnedCharge, OwnedCounter};
use crate::store::client::redis::connection::Script;
use crate::store::holders::SlotHolderTable;

/// Files of parts that any algorithm may use.
const SHARED_LUA_TEXTS: [&str; 6] = [
    include_str!("lua/driver.lua"),
    include_str!("lua/leases.lua"),
    include_str!("lua/exact.lua"),
    include_str!("lua/leaky_level.lua"),
    include_str!("lua/log.lua"),
    include_str!("lua/streams.lua"),
];

/// File of the parts of countings whose hits can be held, which replace shared parts of the same name.
const HOLD_LUA_TEXT: &str = include_str!("lua/hold.lua");

/// File of the parts of a region's pools, and of the script that answers their requests.
const POOL_LUA_TEXT: &str = include_str!("lua/pool.lua");

/// Parts with helper functions, in the order in which a script defines them.
const HELPER_PARTS: [&str; 2] = ["divide", "log"];

macro_rules! define_lua_files {
    ($($variant:ident, $name:ident, $lua_file:literal, $properties:expr;)*) => {
        /// Returns the text of a counting's Lua file.
        const fn lua_file_text(counting: CountingMethod) -> &'static str {
            match counting {
                $(CountingMethod::$variant => include_str!(concat!("lua/", $lua_file)),)*
            }
        }
    };
}
for_each_counting!(define_lua_files);

/// Number of countings.
const COUNTING_METHOD_COUNT: usize = CountingMethod::ALL.len();

/// File of the parts of limits that overflow into each other.
const OVERFLOW_LUA_TEXT: &str = include_str!("lua/overflow.lua");

/// Parts by name.
type LuaParts<'t> = HashMap<&'t str, &'t str>;

/// Returns the script for counters of these countings, one for each key of the call.
pub fn script_for_countings(countings: impl Iterator<Item = impl Into<CountingMethod>>) -> &'static Script {
    static SINGLE_COUNTER_SCRIPTS: [OnceLock<Script>; COUNTING_METHOD_COUNT] =
        [const { OnceLock::new() }; COUNTING_METHOD_COUNT];
    let (mut keys, mut set, mut first) = (0, 0, CountingMethod::FixedWindow);
    for counting in countings.map(Into::into) {
        (keys, set, first) = (keys + 1, set | 1 << counting as usize, counting);
    }
    if keys == 1 && first != CountingMethod::Slots {
        SINGLE_COUNTER_SCRIPTS[first as usize].get_or_init(|| compose_single_counter_script(first))
    } else {
        script_for_several_counters(set)
    }
}

/// Returns the script for counters of these limits, one for each key of the call, and the bans, reservations and pools
/// beside them.
pub fn script_for_limits<'l>(limits: impl Iterator<Item = &'l Limit> + Clone) -> &'static Script {
    let has_ban = limits.clone().any(|limit| limit.ban().is_some());
    let has_reservations = limits.clone().any(|limit| limit.reservations().is_some());
    let has_pools = limits.clone().any(Limit::is_counted_in_region);
    let has_overflow = limits.clone().any(|limit| limit.chain_position().takes_overflow());
    let countings = limits.map(Limit::counting_method);
    if !has_ban && !has_reservations && !has_pools && !has_overflow {
        return script_for_countings(countings);
    }
    let set = countings.fold(0, |set, counting| set | 1 << counting as usize);
    let beside = (usize::from(has_ban) * BANS_BIT)
        | (usize::from(has_reservations) * RESERVATIONS_BIT)
        | (usize::from(has_pools) * POOLS_BIT)
        | (usize::from(has_overflow) * OVERFLOW_BIT);
    script_for_several_counters(set | beside)
}

/// Bit of a set of countings for bans beside the counters.
const BANS_BIT: usize = 1 << COUNTING_METHOD_COUNT;
/// Bit of a set of countings for reservations beside the counters.
const RESERVATIONS_BIT: usize = 2 << COUNTING_METHOD_COUNT;

/// Bit of a set of countings for pools of a region beside the counters.
const POOLS_BIT: usize = 4 << COUNTING_METHOD_COUNT;

/// Bit of a set of countings for counters whose limits overflow into each other.
const OVERFLOW_BIT: usize = 8 << COUNTING_METHOD_COUNT;

/// Returns the script for counters of a set of countings, a bit for each, and what is beside them.
fn script_for_several_counters(set: usize) -> &'static Script {
    static SCRIPTS: [OnceLock<Script>; 16 << COUNTING_METHOD_COUNT] =
        [const { OnceLock::new() }; 16 << COUNTING_METHOD_COUNT];
    SCRIPTS[set].get_or_init(|| {
        let (has_ban, has_reservations) = (set & BANS_BIT != 0, set & RESERVATIONS_BIT != 0);
        let has_pools = set & POOLS_BIT != 0;
        let counter_count = ("counter_count", "count, position = unpack('<i8', args, position)");
        let mut parts = LuaParts::from_iter((has_ban || has_reservations || has_pools).then_some(counter_count));
        parts.extend(split_parts(POOL_LUA_TEXT).filter(|_| has_pools));
        parts.extend(split_parts(OVERFLOW_LUA_TEXT).filter(|_| set & OVERFLOW_BIT != 0));
        parts.extend(split_parts(include_str!("lua/ban.lua")).filter(|_| has_ban));
        parts.extend(split_parts(include_str!("lua/reservations.lua")).filter(|_| has_reservations));
        let used = CountingMethod::ALL.into_iter().filter(|&counting| set >> counting as usize & 1 == 1);
        Script::new(compose_several_counters_script(used, parts))
    })
}

/// Returns the script that changes a hold on a counter; `prepared_call` encodes its argument and decodes its reply.
pub fn hold_script(counting: CountingMethod) -> &'static Script {
    static SCRIPTS: [OnceLock<Script>; COUNTING_METHOD_COUNT] = [const { OnceLock::new() }; COUNTING_METHOD_COUNT];
    SCRIPTS[counting as usize].get_or_init(|| Script::new(expand_with_counting(counting, "--> adjust_hold")))
}

/// Returns the script that answers the request of a region's pool; `regions::exchange` encodes its argument and decodes
/// its reply.
pub fn pool_exchange_script() -> &'static Script {
    static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
        let mut parts = shared_lua_parts();
        parts.extend(split_parts(POOL_LUA_TEXT));
        Script::new(expand_parts("--> exchange", &parts))
    });
    &SCRIPT
}

/// Declares the getter of each script that charges by no algorithm, with its Lua file and the function that expands it.
macro_rules! define_scripts {
    ($($(#[$doc:meta])* $getter:ident = $file:literal, $expand:ident;)*) => {$(
        $(#[$doc])*
        pub fn $getter() -> &'static Script {
            static SCRIPT: LazyLock<Script> =
                LazyLock::new(|| Script::new($expand(include_str!(concat!("lua/", $file, ".lua")))));
            &SCRIPT
        }
    )*};
}

define_scripts! {
    /// Returns the script that assigns slots to replicas; `replicas` encodes its argument and decodes its reply.
    replicas_script = "replicas", expand_with_shared_parts;
    /// Returns the script that the health check of the global Redis runs.
    global_probe_script = "global_probe", expand_with_shared_parts;
    /// Returns the script that shares heartbeats of holders; `holder_exchange` encodes its argument and decodes its
    /// reply.
    holders_script = "holders", expand_with_shared_parts;
    /// Returns the script that charges and refunds a counter in the key format of envoyproxy/ratelimit.
    window_charges_script = "window_charges", remove_comments;
}

/// Removes the comments of a script that refers to no part.
fn remove_comments(text: &str) -> String {
    expand_parts(text, &LuaParts::new())
}

/// Expands the shared parts in a script, and removes its comments.
fn expand_with_shared_parts(text: &str) -> String {
    expand_parts(text, &shared_lua_parts())
}

fn compose_single_counter_script(counting: CountingMethod) -> Script {
    let merged = Script::new(expand_with_counting(counting, "--> merged"));
    Script { merged: Some(Box::new(merged)), ..Script::new(expand_with_counting(counting, "--> one_call")) }
}

/// Returns a text with the parts of a counting and its helper functions.
fn expand_with_counting(counting: CountingMethod, text: &str) -> String {
    let helpers = join_helper_functions(&[counting].into_iter());
    let mut parts = lua_parts_of_counting(counting);
    parts.insert("helpers", &helpers);
    expand_parts(text, &parts)
}

/// Returns the script of several counters; `extra` are the parts for bans, reservations and pools, empty
/// without any.
fn compose_several_counters_script(
    countings: impl Iterator<Item = CountingMethod> + Clone,
    extra: LuaParts<'_>,
) -> String {
    let helpers = join_helper_functions(&countings);
    let constructors: String = countings
        .map(|counting| {
            let mut parts = lua_parts_of_counting(counting);
            for methods in ["reservation_methods", "overflow_methods"] {
                parts.insert(methods, extra.get(methods).copied().unwrap_or_default());
            }
            let constructor = expand_parts(include_str!("lua/counter.lua"), &parts);
            format!("constructors[{}] = {constructor}", counting.properties().wire_id)
        })
        .collect();
    let mut parts: LuaParts<'_> = shared_lua_parts();
    parts.extend(["ban_functions", "ban_of_counter", "reservation_functions"].map(|name| (name, "")));
    parts.extend(
        ["reservation_of_counter", "counter_count", "pool_functions", "pool_of_counter", "overflow_of_counter"]
            .map(|name| (name, "")),
    );
    parts.extend(extra);
    parts.extend([("helpers", helpers.as_str()), ("constructors", &constructors)]);
    expand_parts(include_str!("lua/together.lua"), &parts)
}

/// Returns the helper functions that these countings call.
fn join_helper_functions(countings: &(impl Iterator<Item = CountingMethod> + Clone)) -> String {
    let shared = shared_lua_parts();
    let is_used = |name: &&str| countings.clone().any(|counting| counting.properties().lua_helpers.contains(name));
    HELPER_PARTS.into_iter().filter(is_used).map(|name| shared[name]).collect()
}

fn shared_lua_parts() -> LuaParts<'static> {
    SHARED_LUA_TEXTS.iter().flat_map(|file| split_parts(file)).collect()
}

/// Returns the parts of a counting's file and the shared parts that it does not replace.
fn lua_parts_of_counting(counting: CountingMethod) -> LuaParts<'static> {
    let mut parts = shared_lua_parts();
    // Optional: only a log reads more before it writes.
    parts.insert("plan", "");
    if supports_holds(counting) {
        parts.extend(split_parts(HOLD_LUA_TEXT));
    }
    parts.extend(split_parts(lua_file_text(counting)));
    parts
}

/// Splits a file into its named parts; the text before the first part is the header.
fn split_parts(file: &str) -> impl Iterator<Item = (&str, &str)> {
    file.split("\n--: ").skip(1).filter_map(|part| part.split_once('\n'))
}

/// Replaces the references in a text by their parts, and removes comments.
fn expand_parts(text: &str, parts: &LuaParts<'_>) -> String {
    let mut expanded = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("--> ") {
            expanded.push_str(&expand_parts(parts[name], parts));
        } else if !line.is_empty() && !line.starts_with("--") {
            expanded.push_str(line);
            expanded.push('\n');
        }
    }
    expanded
}

/// Time at which a call charges.
#[derive(Clone, Copy, Debug)]
pub enum CallTime {
    /// Time of the server.
    Server {
        /// Time of this process, which is about the same.
        about: Time,
    },
    /// This time.
    Given(Time),
}

/// Encodes a call of at most [`MAX_CHARGES_PER_CALL`](crate::store::charge::MAX_CHARGES_PER_CALL) charges.
pub fn encode_charges(charges: &[OwnedCharge], time: CallTime) -> Bytes {
    let mut encoder = ArgumentEncoder(Vec::with_capacity(128));
    let now = match time {
        CallTime::Server { about } => {
            encoder.push(-1);
            about
        }
        CallTime::Given(now) => {
            encoder.push(time_word(now));
            now
        }
    };
    encoder.push_counters(charges, now);
    encoder.push_runs(charges);
    encoder.0.into()
}

/// Encodes the slot of a call: an argument that `lua/slots.lua` documents. Calls that may look for slots of others, for
/// seats or for room for a tombstone, have the holders that are dead, up to 8 KB, and how old their slots must be.
pub fn encode_slot(slot: &SlotUse, holders: &SlotHolderTable, now: Time) -> Bytes {
    let SlotUse { id, token, holder, action } = *slot;
    let number = match action {
        SlotAction::Acquire => 1,
        SlotAction::Release | SlotAction::ReleaseRejected => 2,
        SlotAction::ReleaseUnanswered => 3,
    };
    let mut argument = BytesMut::with_capacity(33);
    argument.put_u128_le(id.0);
    argument.put_u64_le(token.0);
    argument.put_u64_le(holder.0);
    argument.put_u8(number);
    if matches!(action, SlotAction::Acquire | SlotAction::ReleaseUnanswered) {
        argument.put_slice(&holders.encode_dead_holders(now));
    }
    argument.freeze()
}

/// Appends a time in microseconds, or -1 for the server's own time, to an argument of numbers.
pub fn put_time(argument: &mut BytesMut, time: Option<Time>) {
    argument.put_i64_le(time.and_then(|time| i64::try_from(time.as_micros()).ok()).unwrap_or(-1));
}

/// Returns the hits that a charge adds, negative for a refund, 0 for a peek that may begin a ban, and below -1 by the
/// true cost for the settlement of a reservation, whose cost may be 0; `None` if the charge cannot change a counter.
fn encode_signed_hits(charge: &OwnedCharge) -> Option<i64> {
    match charge.request.hits {
        _ if charge.dry_run => None,
        Hits::Refund(cost) if charge.slot.as_deref().is_some_and(|slot| slot.action.is_release()) => {
            Some(-1 - signed_word(cost.min(MAX_LUA_INTEGER - 1)))
        }
        Hits::Peek => {
            let mut limits = charge.counters.iter().map(|counter| &counter.limit);
            limits.any(|limit| charge.request.counts_for_ban(limit)).then_some(0)
        }
        Hits::Charge(hits) => Some(signed_word(hits)),
        Hits::Refund(hits) => Some(-signed_word(hits)),
    }
}

/// Returns the word of a limit that scripts call `wait`: for a refund the time from which it is void, 0 if it never is;
/// for a charge its longest delay in microseconds, or under a global limit the most hits that could ever pass.
fn encode_wait_word(charge: &OwnedCharge, limit: &Limit) -> i64 {
    let void_from = || charge.void_from.map_or(0, time_word);
    let longest_delay_us = || signed_word(charge.request_with_bounded_delay().longest_delay_us(limit));
    match charge.request.hits {
        Hits::Refund(_) => void_from(),
        Hits::Charge(_) if limit.is_counted_in_region() => signed_word(limit.largest_charge_in_region()),
        Hits::Charge(_) | Hits::Peek => longest_delay_us(),
    }
}

/// Returns the flags of a limit: 1 if its rejection rejects the charge, plus 2 if rejected hits count, plus 8 times the
/// `max_wait` in microseconds for a bucket.
pub(super) fn encode_flags_word(counter: &OwnedCounter) -> i64 {
    let limit = &counter.limit;
    let counts_rejected = limit.counts_rejected_hits();
    let of_counting = match limit.counting_method() {
        CountingMethod::TokenBucket => 8 * signed_word(limit.max_tokens_wait_us()),
        _ => 0,
    };
    i64::from(counter.as_joint_limit().rejects_others) + 2 * i64::from(counts_rejected) + of_counting
}

fn time_word(time: Time) -> i64 {
    signed_word(time.as_micros().min(MAX_LUA_INTEGER - 1))
}

fn signed_word(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Buffer of the argument.
struct ArgumentEncoder(Vec<u8>);

impl ArgumentEncoder {
    /// Appends the counters of a call, and what is beside each.
    fn push_counters(&mut self, charges: &[OwnedCharge], now: Time) {
        let counters = charges.first().map_or(&[][..], |charge| &charge.counters);
        let count = |has: fn(&Limit) -> bool| counters.iter().filter(|counter| has(&counter.limit)).count() as u64;
        let bans = count(|limit| limit.ban().is_some());
        let reservations = count(|limit| limit.reservations().is_some());
        let pools = count(Limit::is_counted_in_region);
        let overflows = count(|limit| limit.chain_position().takes_overflow());
        // The keys of the counters, then those of bans, of reservations and of pools.
        let mut last_ban = counters.len() as u64;
        let mut last_reservations = last_ban + bans;
        let mut last_pool = last_reservations + reservations;
        if bans + reservations + pools > 0 {
            self.push(signed_word(last_ban));
        }
        for (index, OwnedCounter { limit, .. }) in counters.iter().enumerate() {
            self.push(i64::from(limit.counting_method().properties().wire_id));
            self.push(signed_word(limit.period_us()));
            let call_charges = charges
                .iter()
                .map(|charge| ScriptCharge { limit: &charge.counters[index].limit, hits: charge.request.hits });
            let [a, b] = State::script_arguments(limit.counting_method(), call_charges, now);
            self.push(a);
            self.push(b);
            self.push_digits(limit.period_us() / 1000);
            if pools > 0 {
                last_pool += u64::from(limit.is_counted_in_region());
                self.push(if limit.is_counted_in_region() { signed_word(last_pool) } else { 0 });
            }
            if bans > 0 {
                last_ban += u64::from(limit.ban().is_some());
                self.push_ban(limit, last_ban);
            }
            if reservations > 0 {
                last_reservations += u64::from(limit.reservations().is_some());
                self.push_reservations(limit, last_reservations);
            }
            if overflows > 0 {
                self.push(i64::from(limit.chain_position().takes_overflow()));
            }
        }
    }

    /// Appends the runs of equal charges that may change a counter.
    fn push_runs(&mut self, charges: &[OwnedCharge]) {
        let mut changing = charges.iter().filter_map(|charge| Some((charge, encode_signed_hits(charge)?))).peekable();
        while let Some((charge, hits)) = changing.next() {
            let mut times = 1;
            while changing.next_if(|(next, _)| *next == charge).is_some() {
                times += 1;
            }
            self.push(times);
            self.push(hits);
            for counter in &charge.counters {
                self.push_limit(counter, encode_wait_word(charge, &counter.limit));
            }
        }
    }

    fn push(&mut self, number: i64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    /// Appends the number of digits as one byte, then the decimal digits.
    fn push_digits(&mut self, number: u64) {
        let mut buffer = itoa::Buffer::new();
        let digits = buffer.format(number);
        self.0.push(u8::try_from(digits.len()).expect("a number has at most 20 digits"));
        self.0.extend_from_slice(digits.as_bytes());
    }

    /// Appends the index of a ban's key, 0 without a ban, then its length in microseconds, the rejections before it, and
    /// the hits that must fit for a peek to pass, -1 if peeks do not count.
    fn push_ban(&mut self, limit: &Limit, key: u64) {
        let ban = limit.ban();
        self.push(ban.map_or(0, |_| signed_word(key)));
        self.push(ban.map_or(0, |ban| signed_word(ban.length_us())));
        self.push(ban.map_or(0, |ban| signed_word(ban.rejections_before_ban())));
        let peek = if limit.passes_peeks_at_limit() { 0 } else { 1 };
        self.push(ban.filter(|ban| ban.counts_peeks()).map_or(-1, |_| peek));
    }

    /// Appends the index of the key of reservations, 0 without any, then the times that they live and are kept, in
    /// microseconds, and the estimate.
    fn push_reservations(&mut self, limit: &Limit, key: u64) {
        let reservations = limit.reservations();
        self.push(reservations.map_or(0, |_| signed_word(key)));
        self.push(reservations.map_or(0, |reservations| signed_word(reservations.settle_within_us())));
        self.push(reservations.map_or(0, |reservations| signed_word(reservations.kept_us(limit.period_us()))));
        let estimate = reservations.and_then(ReservationPolicy::fixed_estimate);
        self.push(estimate.map_or(0, |estimate| i64::from(estimate.get())));
    }

    fn push_limit(&mut self, counter: &OwnedCounter, wait_word: i64) {
        let limit = counter.limit.limit_for_scripts();
        self.push(signed_word(limit.requests_per_unit()));
        self.push(signed_word(limit.capacity_for_scripts()));
        self.push(wait_word);
        self.push(encode_flags_word(counter));
    }
}

/// Outcome of a call.
#[derive(Clone, Debug)]
pub struct ScriptOutcome {
    /// Results of each charge, one for each of its counters.
    pub results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// States after all charges. Records of a log that no charge of the call can distinguish are merged.
    pub states: SmallVec<[State; 1]>,
    /// Time at which the charges were made.
    pub now: Time,
    /// Effects on the pools of global limits.
    pub pools: PoolEffects,
    /// Holds that the charges left out, each with the index of its counter.
    pub holds: HoldsByCounter,
}

/// Holds on some counters of a call, each with the index of its counter.
pub type HoldsByCounter = SmallVec<[(usize, TotalHold); 1]>;

/// Effects of a call on the pools of a region; none on other counters.
#[derive(Clone, Debug, Default)]
pub struct PoolEffects {
    /// Indices of the counters whose pool has a new request. Their states describe it.
    pub requesting: Vec<usize>,
    /// Hits that the call admitted.
    pub taken: TakenHits,
}

/// Repeats the charges of a call on the states in its script's reply, which ends with the leased hits if the call concerns
/// leases.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn replay_charges(
    charges: &[OwnedCharge],
    reply: &[u8],
    has_leases: bool,
) -> Result<ScriptOutcome, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let now = reader.read_time()?;
    let counters = charges.first().map_or(&[][..], |charge| &charge.counters);
    let mut states: SmallVec<[State; 1]> = SmallVec::with_capacity(counters.len());
    let mut holds = HoldsByCounter::new();
    for (index, counter) in counters.iter().enumerate() {
        let last = reader.read_time()?;
        let mut state = State::read_counter_state_from_reply(counter.limit.counting_method(), &mut reader, last)?;
        if let Some(hold) = TotalHold::read_from_reply(&mut reader, &mut state)? {
            holds.push((index, hold));
        }
        let state = state.with_pool_from_reply(&counter.limit, &mut reader)?;
        let mut state = state.with_ban_from_reply(&counter.limit, &mut reader)?;
        if let Some(slot) = charges.first().and_then(|charge| charge.slot.as_deref()) {
            state.set_slot_use(slot);
            state = state.with_reservations_from_reply(&counter.limit, slot, &mut reader)?;
            state.give_back_unsettled_hits(&counter.limit, now);
        }
        states.push(state);
    }
    let leased = if has_leases { reader.read_number()? } else { 0 };
    if !reader.is_empty() {
        return Err(MalformedReply);
    }
    let numbers_before: SmallVec<[Option<u64>; 1]> = states.iter().map(pool_request_number).collect();
    let terms = ReplayInputs { now, leased };
    holds.retain(|(index, hold)| hold.keep_or_settle(&counters[*index].limit, &mut states[*index], now).is_some());
    let results = match holds.is_empty() {
        true => charges.iter().map(|charge| replay_charge(charge, &mut states, terms)).collect(),
        false => charges.iter().map(|charge| replay_held_charge(charge, &mut states, &holds, terms)).collect(),
    };
    let pools = PoolEffects {
        requesting: (0..states.len())
            .filter(|&index| pool_request_number(&states[index]) != numbers_before[index])
            .collect(),
        taken: states.iter().filter_map(State::pool).map(|counter| counter.taken).sum(),
    };
    Ok(ScriptOutcome { results, states, now, pools, holds })
}

/// Number of the last request of a region's pool; `None` of another counter.
fn pool_request_number(state: &State) -> Option<u64> {
    state.pool().map(|counter| counter.pool.number)
}

/// Time of a call, and the hits that are leased at it.
#[derive(Clone, Copy)]
struct ReplayInputs {
    now: Time,
    leased: u64,
}

fn replay_charge(charge: &OwnedCharge, states: &mut [State], terms: ReplayInputs) -> SmallVec<[ChargeResult; 1]> {
    let ReplayInputs { now, leased } = terms;
    let limits = charge.joint_limits();
    let request = ChargeRequest { leased, ..charge.request_with_bounded_delay() };
    if charge.dry_run {
        charge_together(&limits, &mut states.to_vec(), now, request)
    } else if let Some(void_from) = charge.void_from {
        // A refund always passes, and each counter decides for itself whether the refund is void.
        let parts = divide_refund(&limits, states, now, request);
        let refund = |((limit, state), hits): ((&JointLimit<'_>, &mut State), Hits)| {
            let request = ChargeRequest { hits, ..request };
            let result = match state.effective_charge_time(limit.limit, now) >= void_from {
                true => state.clone().charge(limit.limit, now, request),
                false => state.charge(limit.limit, now, request),
            };
            ChargeResult { admitted: true, retry_after_us: None, ..result }
        };
        limits.iter().zip(states.iter_mut()).zip(parts).map(refund).collect()
    } else {
        charge_together(&limits, states, now, request)
    }
}

/// Repeats a charge on the limits without what is held.
fn replay_held_charge(
    charge: &OwnedCharge,
    states: &mut [State],
    holds: &HoldsByCounter,
    terms: ReplayInputs,
) -> SmallVec<[ChargeResult; 1]> {
    let mut lowered = charge.clone();
    for (index, hold) in holds {
        lowered.counters[*index].limit = hold.lower_limit(&charge.counters[*index].limit);
    }
    let mut results = replay_charge(&lowered, states, terms);
    for (index, hold) in holds {
        hold.add_wait_for_hold_end(&mut results[*index], &charge.counters[*index].limit, charge.request, terms.now);
    }
    results
}
