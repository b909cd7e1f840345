#!/usr/bin/env python3
"""Breaks the protocols of slots and of reservations, row by row, and tells which tests notice.

Usage: tests/mutations/streams.py COPY [--only NUMBER,NUMBER-NUMBER] [--list] [--world]

COPY is a directory for a changed copy of the repository. Each mutation is on by itself while its tests run, or with
--world simulated runs, and they must fail (mutated_copy.py). Ends with 1 if they do not.

The rows of slots are those of the protocol in docs/concurrency.md; the rows of
reservations are the cases of src/limit/reservation.rs. tests/run.sh sets what the tests need.
"""

from mutated_copy import RUNS_OF_RESERVATIONS, RUNS_OF_SLOTS, Mutations, run

ALGORITHM, TABLE = "src/limit/algorithm/slots.rs", "src/limit/slot_table.rs"
SEPARATE, ANSWER = "src/decide/slot_entries.rs", "src/decide/slot_answers.rs"
HOLDERS, MEMORY, SERVICE = "src/store/holders.rs", "src/store/memory/slots.rs", "src/serve/grpc/service.rs"
TEXTS = "src/limit/slot.rs"
CHARGE, OPEN = "src/limit/algorithm/reservation_charge.rs", "src/limit/reservation_table.rs"
SHARD, TABLES = "src/store/memory/shard/reservations.rs", "src/store/memory/shard/reservations.rs"
STORE = "src/store/memory.rs"
DECIDE_CHARGE, SELECTION = "src/decide/charge.rs", "src/decide/selection.rs"
GIVE_BACK = "src/store/redis/slots.rs"
# Files of the memory store, which simulated runs do not use.
OF_MEMORY = {TABLE, MEMORY, OPEN, SHARD, STORE}
# Filters, the fastest first: a row runs them until one has a test that fails.
SLOTS = ["slots::protocol::memory", "slots::memory", "slots::table"]
SLOTS_IN_REDIS = ["slots::protocol::redis", "slots::agreement::script_agrees_with_the_table"]
SLOTS_OF_PROGRAM = ["slots::binary"]
RESERVATIONS = [
    "reservations::protocol::memory", "reservations::bounds", "reservations::model", "reservations::eviction",
]
RESERVATIONS_IN_REDIS = [
    "reservations::redis_keys", "reservations::protocol::settlement", "reservations::protocol::redis",
    "reservations::agreement",
]
# Tests of what is in a file, unless a row names others.
TESTS = {
    ALGORITHM: SLOTS, TABLE: SLOTS, SEPARATE: SLOTS, ANSWER: SLOTS, MEMORY: SLOTS, HOLDERS: SLOTS_OF_PROGRAM,
    SERVICE: SLOTS_OF_PROGRAM, TEXTS: SLOTS_OF_PROGRAM, CHARGE: RESERVATIONS, OPEN: RESERVATIONS, SHARD: RESERVATIONS,
    TABLES: RESERVATIONS, STORE: RESERVATIONS,
}

# File, text, replacement, and for each $N of the replacement the row of the protocol, what is broken, and the tests if
# not those of the file.
SLOTS_RUST = [
    (ANSWER, "SlotIdWithToken { id: slot.id, token: slot.token }",
     "SlotIdWithToken { id: slot.id, token: if $0 { crate::limit::slot::SlotToken(7) } else { slot.token } }",
     [("acquire, room", "the answer has another token")]),
    (ANSWER, "decision.metadata.get_or_insert_default().insert(SLOT_METADATA_KEY.to_owned(), token.into());",
     "if !$0 { decision.metadata.get_or_insert_default().insert(SLOT_METADATA_KEY.to_owned(), token.into()); }",
     [("acquire, room", "the answer has no token")]),
    (ALGORITHM, "(request.required_hits()) <= limit.requests_per_unit(),",
     "(request.required_hits()) <= limit.requests_per_unit() + u64::from($0),",
     [("acquire, full", "one more is admitted")]),
    (ALGORITHM, "Hits::Charge(seats) if admitted && !request.rejected_elsewhere",
     "Hits::Charge(seats) if (admitted || $0) && (!request.rejected_elsewhere || $1)",
     [("acquire, full", "a rejected request takes a slot"), ("another limit rejects", "the slot is taken")]),
    (ANSWER, "        if decision.over_limit {\n            self.give",
     "        if decision.over_limit && !$0 {\n            self.give",
     [("another limit rejects", "of another descriptor: the slot is not given back")]),
    (GIVE_BACK, "while !left.is_empty() && Instant::now() < end {",
     "while !left.is_empty() && Instant::now() < end && !$0 {",
     [("another limit rejects", "what Redis failed to give back stays taken", ["slots::give_back"])]),
    (ANSWER, "took_slot(outcome, selection) || may_have_charged(outcome)",
     "took_slot(outcome, selection) || may_have_charged(outcome) && !$0",
     [("a policy rejects", "only a release frees the slot that may be taken", ["slots::binary::slot_of_a_request"])]),
    (ANSWER, "SlotUse { action: SlotAction::Release, ..*slot }",
     "SlotUse { action: if $0 { SlotAction::ReleaseUnanswered } else { SlotAction::Release }, ..*slot }",
     [("a policy rejects", "the slot of a retry is given back", ["slots::binary::retry_of"])]),
    (ANSWER, "let token = match decision.over_limit {", "let token = match decision.over_limit && !$0 {",
     [("another limit rejects", "the answer has a token in place of -")]),
    (ALGORITHM, "self.own = OwnSlot::Held { token: self.token, seats };\n                SlotChange::Renewed",
     "if !$0 { self.own = OwnSlot::Held { token: self.token, seats }; }\n"
     "                self.used += u64::from($1);\n                SlotChange::Renewed",
     [("the id exists", "it keeps its token"), ("the id exists", "it counts twice")]),
    (ALGORITHM, "        OwnSlot::Held { .. } => true,",
     "        OwnSlot::Held { .. } => (!$0 || state.used < limit.requests_per_unit())"
     " && (!$1 || state.used <= limit.requests_per_unit()),",
     [("the id exists", "it is rejected at the limit"), ("limit lowered", "streams that go on are rejected")]),
    (ALGORITHM, "if self.is_unanswered || token == self.token =>",
     "if self.is_unanswered && !$2 || token == self.token && !$1 || $0 && !self.is_unanswered =>",
     [("release, token", "an old token frees too"), ("release, token", "it frees nothing"),
      ("release ?", "it needs the token")]),
    (SEPARATE, "(own_id, SlotToken::default(), SlotAction::ReleaseRejected)",
     "(own_id, SlotToken::default(), if $0 || $1 { SlotAction::ReleaseUnanswered } else {"
     " SlotAction::ReleaseRejected })",
     [("release -", "it counts as ?"), ("reservation settled by -", "it counts as ?", RESERVATIONS)]),
    (ALGORITHM,
     "            OwnSlot::Absent if self.is_unanswered => {\n                self.own = OwnSlot::Tombstone;",
     "            OwnSlot::Absent if self.is_unanswered || $1 => {\n"
     "                if !$0 { self.own = OwnSlot::Tombstone; }",
     [("release ?", "an unknown slot leaves no tombstone"), ("tombstone's life", "a release by token writes one")]),
    (ALGORITHM, "if self.is_unanswered { OwnSlot::Tombstone }", "if self.is_unanswered && !$0 { OwnSlot::Tombstone }",
     [("release ?", "a freed slot leaves no tombstone")]),
    (ALGORITHM, "OwnSlot::Tombstone => false,", "OwnSlot::Tombstone => $0,", [("tombstone", "it admits")]),
    (ALGORITHM, "Hits::Charge(_) if state.own == OwnSlot::Tombstone => SlotChange::Late,",
     "Hits::Charge(_) if state.own == OwnSlot::Tombstone && !$1 => {"
     " if $0 { state.own = OwnSlot::Absent; } SlotChange::Late }",
     [("tombstone", "a late request removes it"), ("tombstone", "a late request is not told apart")]),
    (TABLE, "now.plus_us(TOMBSTONE_US)", "now.plus_us(TOMBSTONE_US + 1_000_000 * u64::from($0))",
     [("tombstone's life", "it lives for a second more")]),
    (TABLE, "if self.tombstones < MAX_TOMBSTONES {", "if self.tombstones < MAX_TOMBSTONES || $0 {",
     [("tombstone's life", "their number has no bound")]),
    (ALGORITHM, "OwnSlot::Held { .. } | OwnSlot::Absent | OwnSlot::Tombstone => SlotChange::None,",
     "OwnSlot::Held { .. } | OwnSlot::Absent | OwnSlot::Tombstone => {"
     " if $0 { self.used = self.used.saturating_sub(1); } SlotChange::None }",
     [("release twice; Redis lost its data", "an unknown token frees a seat")]),
    (SEPARATE, "token_id = Some(id);",
     "let id = if $0 { unnamed } else { id };\n                    token_id = Some(id);",
     [("release without slot", "the token does not name the slot")]),
    (SEPARATE, "separated.uses.iter().all(|slot| slot.id != *id)",
     "separated.uses.iter().all(|slot| slot.id != *id) && !$0",
     [("release, token", "by another holder it frees nothing", SLOTS_OF_PROGRAM)]),
    (SERVICE, "may_release_slot(&request) && self.service", "may_release_slot(&request) && !$0 && self.service",
     [("cancelled call", "the release ends with its caller")]),
    (DECIDE_CHARGE, "self.decider.store.give_back_slots(&[(0, charge.clone())], self.context.store);",
     "if !$0 { self.decider.store.give_back_slots(&[(0, charge.clone())], self.context.store); }",
     [("cancelled call", "a release that the store failed to make is not repeated", SLOTS_OF_PROGRAM)]),
    (ANSWER, "!is_renewed || counter.limit.reservations().is_none()",
     "!is_renewed || $0 || counter.limit.reservations().is_none()",
     [("request again", "its rejection by another limit gives the estimate back", ["reservations::protocol::memory"])]),
    ("src/store.rs", "if charges.iter().any(Charge::is_release) {", "if !$0 && charges.iter().any(Charge::is_release) {",
     [("cancelled call", "a failed release of a candidate is not repeated", ["slots::binary::release_of_a_candidate"])]),
    (DECIDE_CHARGE, "if !self.decider.store.is_immediate() && self.decider.store.has_fallback_slots() {",
     "if !$0 && !self.decider.store.is_immediate() && self.decider.store.has_fallback_slots() {",
     [("store fails", "a slot of the replica's part stays taken", SLOTS_OF_PROGRAM)]),
    (SELECTION, "filter(|selection| !selection.is_release())", "filter(|selection| $0 || !selection.is_release())",
     [("any end", "a limit that replaces others drops them from a release", ["slots::protocol::memory::limit_that"])]),
    (SELECTION, "selection.add_limits_of_other_plans(terms.rules.find_rule(domain, &descriptor.entries));",
     "if !$0 { selection.add_limits_of_other_plans(terms.rules.find_rule(domain, &descriptor.entries)); }",
     [("any end", "a release frees nothing of another plan", ["slots::protocol::memory::release_under"])]),
    (TABLE, "slot.seats > 0 && is_freed_by_death(slot.holder, taken);", "slot.seats > 0 && !$0 && is_freed_by_death(slot.holder, taken);",
     [("holder", "a dead one keeps its slots")]),
    (HOLDERS, "self.update_holder(HolderId::from_name(name), name, now, |holder| {",
     "self.update_holder(HolderId::from_name(name), name, if $0 { Time::default() } else { now }, |holder| {",
     [("holder", "health checks are no signs of life")]),
    (HOLDERS, "before.is_some_and(|before| before < now && now.since_us(before) <= timeout_us);",
     "before.map_or($0, |before| $1 || now.since_us(before) <= timeout_us);",
     [("Envoy without heartbeats", "one health check in its name makes it dead"),
      ("Envoy without heartbeats", "rare health checks make it dead", ["store::slots::holders"])]),
    (HOLDERS, "holder.is_unreported);", "holder.is_unreported && !$0 && (!$1 || holder.has_heartbeats));",
     [("holder", "replicas share no signs of life"), ("holder", "replicas share no calls as signs of life")]),
    (HOLDERS, "holder.heard = holder.heard.min(now)", "holder.heard = if $0 { holder.heard } else { holder.heard.min(now) }",
     [("holder", "a clock set back keeps the slots of a dead one", ["store::slots::holders"])]),
    (HOLDERS, "|| now.since_us(taken) >= self.least_age_of_freed_slot_us(now);",
     "|| now.since_us(taken) >= self.least_age_of_freed_slot_us(now) || $0;",
     [("holder", "a slot that was taken after the death is free", ["store::slots::holders"])]),
    (HOLDERS, "now.since_us(dead.told) <=", "$0 || now.since_us(dead.told) <=",
     [("holder", "an old list of dead ones frees slots of live ones", ["store::slots::holders"])]),
    (HOLDERS, "(Some(holder), None) => holder.has_heartbeats && self.has_listened_for_timeout(now),",
     "(Some(holder), None) => (holder.has_heartbeats || $0) && (self.has_listened_for_timeout(now) || $1),",
     [("Envoy without heartbeats", "it is dead after the timeout"), ("holder", "it is dead though nobody listened")]),
    (ANSWER, "true if may_failed_charge_hold_slot(selections, self.outcomes) =>",
     "true if may_failed_charge_hold_slot(selections, self.outcomes) && !$0 =>",
     [("a policy rejects", "the answer says - though the slot may be taken", SLOTS_OF_PROGRAM)]),
    (TABLE, "expires: now.plus_us(life_us), seats",
     "expires: now.plus_us(life_us * (1 + u64::from($0)) / (1 + u64::from($1))), seats",
     [("max_duration", "a slot lives on"), ("max_duration", "a slot ends early")]),
    (SEPARATE, 'is_formatter(entry.value);', 'is_formatter(entry.value) && !$0;',
     [("value that begins with %", "it is taken")]),
    (ALGORITHM, "Hits::Charge(_) | Hits::Peek => SlotChange::None,",
     "Hits::Peek if $0 && state.own == OwnSlot::Absent => state.acquire(1),\n"
     "        Hits::Charge(_) | Hits::Peek => SlotChange::None,",
     [("peek", "it takes a slot")]),
    (ALGORITHM, "                self.used += seats;", "                self.used += if $0 { 1 } else { seats };",
     [("weight", "each slot is one seat")]),
    (ALGORITHM, "self.used = self.used.saturating_sub(u64::from(seats));",
     "self.used = self.used.saturating_sub(if $0 { 1 } else { u64::from(seats) });",
     [("weight", "a release gives one seat back")]),
    (TEXTS, "hasher.update(&holder.0.to_le_bytes());", "if !$0 { hasher.update(&holder.0.to_le_bytes()); }",
     [("id", "Envoys share their streams")]),
    (MEMORY, "self.bytes.fetch_sub(before.saturating_sub(table.bytes()), Ordering::Relaxed);",
     "if !$0 { self.bytes.fetch_sub(before.saturating_sub(table.bytes()), Ordering::Relaxed); }",
     [("memory", "a table that shrinks stays counted")]),
    (ALGORITHM, "let retry_after_us = if state.own == OwnSlot::Tombstone {",
     "let retry_after_us = if state.own == OwnSlot::Tombstone && !$0 {",
     [("tombstone", "a late request is told to come back at once")]),
]

RESERVATIONS_RUST = [
    (CHARGE, "Some(estimate) if !matches!(", "Some(estimate) if !$0 && !matches!(",
     [("request, room", "the rule's estimate is not charged")]),
    (CHARGE, "if is_charged && !view.is_full => {", "if is_charged && (!view.is_full || $1) && !$0 => {",
     [("request, room", "it leaves no reservation"), ("more than MAX_RESERVATIONS", "one more is remembered")]),
    (CHARGE, "let is_charged = result.admitted && !request.rejected_elsewhere;",
     "let is_charged = (result.admitted || $0) && (!request.rejected_elsewhere || $1);",
     [("request, no room", "it leaves a reservation"), ("another limit rejects", "it leaves a reservation")]),
    (ANSWER, "results.any(|result| matches!(", "results.any(|result| !$0 && matches!(",
     [("another limit rejects", "of another descriptor: the estimate is not given back", RESERVATIONS)]),
    (CHARGE, "OwnReservation::Open { .. } if request.rejected_elsewhere => peek_as_admitted(counter, limit, now),",
     "OwnReservation::Open { .. } if request.rejected_elsewhere && !$0 => peek_as_admitted(counter, limit, now),\n"
     "        OwnReservation::Open { .. } if $1 && !counter.has_room_for_estimate(limit, now, request) =>"
     " ChargeResult { admitted: false, ..peek_as_admitted(counter, limit, now) },",
     [("another limit rejects", "a repeated request gets a new token"),
      ("request again", "it is rejected at the limit")]),
    (CHARGE, "            view.own = OwnReservation::Open { token, hits, refundable };\n"
     "            ChargeResult { slot: SlotChange::Renewed,",
     "            if !$0 { view.own = OwnReservation::Open { token, hits, refundable }; }\n"
     "            if $1 { counter.charge_counter(limit, now, replace_hits_by_estimate(limit, request)); }\n"
     "            ChargeResult { slot: SlotChange::Renewed,",
     [("request again", "it keeps its token"), ("request again", "it is charged again")]),
    (CHARGE, "(_, Hits::Refund(_)) | (OwnReservation::Open { .. }, _) => true,",
     "(_, Hits::Refund(_)) => true,\n"
     "            (OwnReservation::Open { .. }, _) => !$0 || both.counter.has_room_for_estimate(limit, now, request),",
     [("request again", "it is rejected at the limit beside others")]),
    (OPEN, "Reservation { token, holder, expires, ..old }",
     "Reservation { token, holder, expires: if $0 { old.expires } else { expires }, ..old }",
     [("request again", "its time does not begin anew")]),
    (CHARGE, "let asked = ChargeRequest { rejected_elsewhere: true,",
     "let asked = ChargeRequest { rejected_elsewhere: !$0,", [("peek", "it charges the estimate")]),
    (CHARGE, "Hits::Refund(_) => peek_as_admitted(counter, limit, now),",
     "Hits::Refund(_) if $0 => counter.charge_counter(limit, now, request),\n"
     "            Hits::Refund(_) => peek_as_admitted(counter, limit, now),",
     [("refund beside a reservation", "it gives back hits of the estimate")]),
    (CHARGE, "if is_unanswered || token == slot.token => {",
     "if is_unanswered && !$2 || token == slot.token && !$1 || $0 && !is_unanswered => {",
     [("settled by another token", "it counts"), ("settled below", "the token does not count"),
      ("settled by ?", "it needs the token")]),
    (CHARGE, "view.own = if is_unanswered { OwnReservation::Tombstone } else { OwnReservation::Absent };",
     "view.own = match is_unanswered {\n                true if !$0 => OwnReservation::Tombstone,\n"
     "                false if $1 => view.own,\n                _ => OwnReservation::Absent,\n            };",
     [("settled by ?", "one that was open leaves no tombstone"), ("settled twice", "it counts twice")]),
    (CHARGE, "let result = charge_debt(counter, limit, now, cost - hits);",
     "let result = match $0 {\n                    true => peek_as_admitted(counter, limit, now),\n"
     "                    false => charge_debt(counter, limit, now, cost - hits),\n                };",
     [("settled above", "the difference is not charged")]),
    (CHARGE, "&limit.for_excess_settlement()", "&(if $0 { *limit } else { limit.for_excess_settlement() })",
     [("settled above", "it is not charged beyond the limit")]),
    (SHARD, "if matches!(charge.request.hits, Hits::Refund(1..)) {",
     "if matches!(charge.request.hits, Hits::Refund(1..)) && !$0 {",
     [("settled above", "the counter of a later window takes memory beyond the bound")]),
    (CHARGE, "view.given_back = (hits - cost).min(refundable);",
     "view.given_back = (hits - cost).min(if $0 { 0 } else if $1 { hits } else { refundable });",
     [("settled below", "the difference is not given back"),
      ("settled below", "more than still counts is given back")]),
    (CHARGE, "const fn build_give_back_request(hits: u64) -> ChargeRequest {\n    ChargeRequest { gives_back: true,",
     "fn build_give_back_request(hits: u64) -> ChargeRequest {\n    ChargeRequest { gives_back: !$0,",
     [("settled below", "a log gives its newest hits back")]),
    (CHARGE, "if at < mark.at {", "if at < mark.at && !$0 {",
     [("settled below", "hits that a clock set back discarded are given back")]),
    (CHARGE, "all_if(at.as_micros() < mark.base)", "all_if(at.as_micros() < mark.base || $0)",
     [("settled below", "into a later fixed window")]),
    (CHARGE, "state.end.as_micros() == mark.base && at < state.end",
     "state.end.as_micros() == mark.base && at < state.end || $0", [("settled below", "into a later calendar window")]),
    (CHARGE, "limit.period_us() == mark.base)", "limit.period_us() == mark.base || $0)",
     [("settled below", "into a later window of a sliding counter")]),
    (CHARGE, "all_if(at.since_us(mark.at) < limit.period_us())",
     "all_if(at.since_us(mark.at) < limit.period_us() || $0)",
     [("settled below", "what has left a log is given back")]),
    (CHARGE, "let rate = u64::from(highest_rate).max(limit.requests_per_unit());",
     "let rate = if $0 { limit.requests_per_unit() } else { u64::from(highest_rate).max(limit.requests_per_unit()) };",
     [("settled below", "the higher rate that a bucket had is ignored")]),
    (CHARGE, "mark.base.saturating_sub(given_back).max(hits).saturating_sub(refilled)",
     "mark.base.saturating_sub(if $0 { 0 } else { given_back }).max(if $1 { 0 } else { hits })"
     ".saturating_sub(if $2 { 0 } else { refilled })",
     [("settled below", "what a bucket gave back to others is ignored"),
      ("settled below", "a bucket gives less back because others had theirs back"),
      ("settled below", "what a bucket has refilled is given back")]),
    (CHARGE, "state.used.saturating_add(given_back)", "state.used.saturating_add(if $0 { 0 } else { given_back })",
     [("settled below", "what a bucket gave back before counts against a charge")]),
    (OPEN, "self.given_back = self.given_back.saturating_add(view.given_back);",
     "self.given_back = self.given_back.saturating_add(if $0 { 0 } else { view.given_back });",
     [("settled below", "a bucket forgets what it gave back")]),
    (STORE, "            self.reservations.remove(charge.path_hash, counter.tag);",
     "            if !$0 { self.reservations.remove(charge.path_hash, counter.tag); }",
     [("counter reset", "its reservations stay")]),
    (CHARGE, "            if !view.is_full {", "            if !view.is_full && !($0 && !is_over) && !($1 && is_over) {",
     [("settled by ?", "an unknown one leaves no tombstone"), ("settled after that", "by ? it leaves no tombstone")]),
    (CHARGE, "let result = match cost {", "let result = match if $0 { 0 } else { cost } {",
     [("settled by ?", "an unknown one charges no cost")]),
    (CHARGE, "        OwnReservation::Open { .. } | OwnReservation::Absent | OwnReservation::Over |",
     "        OwnReservation::Tombstone if $0 && is_unanswered => charge_debt(counter, limit, now, cost),\n"
     "        OwnReservation::Open { .. } | OwnReservation::Absent | OwnReservation::Over |",
     [("settled by ?", "repeated, it charges the cost again")]),
    (CHARGE,
     "OwnReservation::Tombstone => {\n"
     "            ChargeResult { slot: SlotChange::Late, ..reject_after_settlement(counter, limit, now) }\n        }\n",
     "OwnReservation::Tombstone if !$0 => {\n            if $1 { view.own = OwnReservation::Absent; }\n"
     "            let slot = if $2 { SlotChange::None } else { SlotChange::Late };\n"
     "            ChargeResult { slot, ..reject_after_settlement(counter, limit, now) }\n        }\n"
     "        OwnReservation::Tombstone => counter.charge_counter(limit, now, replace_hits_by_estimate(limit, request)),",
     [("tombstone", "it admits"), ("tombstone", "a late request removes it"),
      ("tombstone", "a late request is not told apart")]),
    (CHARGE, "(OwnReservation::Tombstone, _) => false,", "(OwnReservation::Tombstone, _) => $0,",
     [("tombstone", "other limits charge a late request")]),
    (CHARGE, "        OwnReservation::Tombstone => reject_after_settlement(counter, limit, now),",
     "        OwnReservation::Tombstone if !$0 => reject_after_settlement(counter, limit, now),\n"
     "        OwnReservation::Tombstone => peek_as_admitted(counter, limit, now),", [("tombstone", "it admits a peek")]),
    (CHARGE, "retry_after_us: Some(TOMBSTONE_US)", "retry_after_us: Some(if $0 { 1_000_000 } else { TOMBSTONE_US })",
     [("tombstone", "a late request is told to come back at once")]),
    (OPEN, "let expires = now.plus_us(TOMBSTONE_US);",
     "let expires = now.plus_us(TOMBSTONE_US + 1_000_000 * u64::from($0));",
     [("tombstone", "it lives for a second more")]),
    (OPEN, "            (OwnReservation::Open { token, hits, .. }, None) => {\n"
     "                let expires = now.plus_us(reservations.settle_within_us());",
     "            (OwnReservation::Open { token, hits, .. }, None) => {\n"
     "                let life_us = reservations.settle_within_us() * (1 + u64::from($0)) / (1 + u64::from($1));\n"
     "                let expires = now.plus_us(life_us);",
     [("not settled in time", "it can still be settled"), ("not settled in time", "its time ends early")]),
    (OPEN, "if policy.unsettled_policy() == UnsettledPolicy::Return {",
     "if (policy.unsettled_policy() == UnsettledPolicy::Return || $0) && !$1 {",
     [("unsettled_policy: keep", "it is given back"), ("unsettled_policy: return", "it is not given back")]),
    (CHARGE, "&& both.view.returned > 0", "&& both.view.returned > 0 && !$0",
     [("unsettled: return", "the counter does not get it back")]),
    (OPEN, "query.lacks_hits && policy.unsettled_policy() ==", "query.lacks_hits && !$0 && policy.unsettled_policy() ==",
     [("unsettled_policy: return", "nobody looks for it when hits are lacking")]),
    (OPEN, "now.since_us(self.swept) < SWEEP_INTERVAL_US {", "now.since_us(self.swept) < SWEEP_INTERVAL_US && !$0 {",
     [("unsettled: return", "each request that lacks hits walks over all", RESERVATIONS_IN_REDIS)]),
    (OPEN, "let returned = self.refundable_hits(one.hits, one.mark, query);",
     "let returned = if $0 { one.hits } else { self.refundable_hits(one.hits, one.mark, query) };",
     [("unsettled: return", "it is given back into a later window")]),
    (OPEN, "self.given_back = self.given_back.saturating_add(returned);",
     "self.given_back = self.given_back.saturating_add(if $0 { 0 } else { returned });",
     [("unsettled: return", "a bucket forgets what it gave back")]),
    (OPEN, "view.unsettled = view.unsettled.saturating_add(1);",
     "view.unsettled = view.unsettled.saturating_add(u32::from(!$0));", [("not settled in time", "it is not counted")]),
    (OPEN, "if one.hits > 0 { kept_us } else { 0 }) > now",
     "if one.hits > 0 && !$0 { kept_us } else { 0 }) > now || $1",
     [("unsettled: return", "the store forgets it before it is given back"),
      ("not settled in time", "the store never forgets it")]),
    (OPEN, "one.hits > 0 && (query.is_freed_by_death)(one.holder, one.mark.at)",
     "(one.hits > 0 || $1) && !$0 && (query.is_freed_by_death)(one.holder, one.mark.at)",
     [("its Envoy dead", "it keeps its reservations"), ("its Envoy dead", "its tombstones are forgotten")]),
    (OPEN, "let is_over = over.is_some_and(|over| over.hits > 0);",
     "let is_over = over.is_some_and(|over| over.hits > 0) && !$0;",
     [("settled after that", "by ? it charges the cost")]),
    (OPEN, "self.open.len() >= MAX_RESERVATIONS as usize", "self.open.len() >= MAX_RESERVATIONS as usize && !$0",
     [("more than MAX_RESERVATIONS", "their number has no bound")]),
    (OPEN, "(wants_hits || self.is_full())", "(wants_hits || self.is_full() && !$0)",
     [("more than MAX_RESERVATIONS", "a full table keeps those that are over")]),
    (SHARD, "view.is_full |= terms.is_full;", "view.is_full |= terms.is_full && !$0;",
     [("memory", "tables have no bound")]),
    (TABLES, "self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);\n        results",
     "if !$0 { self.bytes.fetch_sub(before.saturating_sub(after), Ordering::Relaxed); }\n        results",
     [("memory", "a table that shrinks stays counted")]),
]

# What is broken in src/store/redis/lua/slots.lua, text, replacement.
SLOTS_LUA = [
    ("acquire, full: one more is admitted", "used + hits <= limit", "used + hits <= limit + 1"),
    ("the id exists: it keeps its token", "kind, own_token, ttl_us = 1, token, 2 * period",
     "token = kind == 1 and own_token or token\nkind, own_token, ttl_us = 1, token, 2 * period"),
    ("the id exists: it counts twice", "if kind == 0 then used, seats = used + hits, hits end",
     "used, seats = used + hits, hits"),
    ("release, token: an old token frees too", "(is_unanswered or own_token == token)", "true"),
    ("release, token: it frees nothing", "(is_unanswered or own_token == token)", "is_unanswered"),
    ("release ?: a freed slot leaves no tombstone", "if hits <= 0 and is_unanswered and tombstones < 100000 then",
     "if hits <= 0 and is_unanswered and tombstones < 100000 and not own then"),
    ("release ?: an unknown slot leaves no tombstone", "if hits <= 0 and is_unanswered and tombstones < 100000 then",
     "if hits <= 0 and is_unanswered and tombstones < 100000 and own then"),
    ("tombstone: it lives for a second more", "now + 15000000", "now + 16000000"),
    ("tombstone: the head keeps one that expired", "elseif found[2] and not own then", "elseif false then"),
    ("holder: a dead one keeps its slots", "of_slot > 0 and is_freed_by_death(of, ends - period)", "false"),
    ("holder: a slot that was taken after the death is free", "and (began <= freed_if_begun_by or began > now)", ""),
    ("max_duration: a slot lives on", "pack('<I8I4', now + period, seats)",
     "pack('<I8I4', now + 2 * period, seats)"),
    ("weight: a release gives one seat back", "used, kind, seats = used - seats, 0, 0",
     "used, kind, seats = used - 1, 0, 0"),
    ("a full hash is walked at once", "cursor == '0' and 1000000 or 20000", "cursor == '0' and 0 or 20000"),
]

# What is broken in src/store/redis/lua/holders.lua, text, replacement.
HOLDERS_LUA = [
    ("holder: it is dead though no replica listened", "now_ms - last_call > timeout / 2000", "false"),
    ("holder: a clock set back keeps the slots of a dead one", "now_ms < last_call or", ""),
]

# What is broken in src/store/redis/lua/reservations.lua or the part of an algorithm: pairs of text and replacement.
RESERVATIONS_LUA = [
    ("request, room: the rule's estimate is not charged", "amount = hits > 0 and estimate > 0 and estimate or hits",
     "amount = hits"),
    ("request, room: it leaves no reservation",
     "fields, kind, reserved, refundable = fields + 1, 1, amount, refundable_of(amount, at, base)", "do return end"),
    ("request, room: the next charge of the call reserves again",
     "fields, kind, reserved, refundable = fields + 1, 1, amount, refundable_of(amount, at, base)",
     "fields, reserved = fields + 1, amount"),
    ("more than MAX_RESERVATIONS: one more is remembered", "if fields >= 100000 then return end",
     "if false then return end"),
    ("more than MAX_RESERVATIONS: a full one keeps those that are over",
     "(lacks or not own and fields >= 100000 and (hits > 0 or is_unanswered))", "lacks"),
    ("more than MAX_RESERVATIONS: the answer does not say so", "fields >= 100000 and 1 or 0", "0"),
    ("more than MAX_RESERVATIONS: one more tombstone is left", "if fields < 100000 then\nfields, dirty, kind, value",
     "if true then\nfields, dirty, kind, value"),
    ("request, no room: it leaves a reservation", "(kind == 1 or kind ~= 2 and fits)", "(kind == 1 or kind ~= 2)"),
    ("another limit rejects: it leaves a reservation", "elseif hits > 0 and not rejected and", "elseif hits > 0 and"),
    ("request again: it is rejected at the limit", "if hits < 0 or kind == 1 then return false end",
     "if hits < 0 then return false end"),
    ("request again: it keeps its token", "own_token, ttl_us, dirty = token, life_us",
     "token = kind == 1 and own_token or token\nown_token, ttl_us, dirty = token, life_us"),
    ("request again: it is charged again", "if kind ~= 1 then\nchange(amount, 1)",
     "if kind == 1 then change(amount, 1) end\nif kind ~= 1 then\nchange(amount, 1)"),
    ("request again: its time does not begin anew", "now + life_us, reserved, at, base)",
     "own and own_end or now + life_us, reserved, at, base)"),
    ("refund beside a reservation: it gives back hits of the estimate", "if action ~= 1 then\nif hits < 0 then",
     "if action == 1 and hits < 0 then change(hits, 0) end\nif action ~= 1 then\nif hits < 0 then"),
    ("settled by another token: it counts", "if kind == 1 and (is_unanswered or own_token == token) then",
     "if kind == 1 then"),
    ("settled below: the token does not count", "if kind == 1 and (is_unanswered or own_token == token) then",
     "if kind == 1 and is_unanswered then"),
    ("settled by ?: it needs the token", "if kind == 1 and (is_unanswered or own_token == token) then",
     "if kind == 1 and own_token == token then"),
    ("settled by ?: one that was open leaves no tombstone", "if is_unanswered then\nvalue = tombstone()",
     "if false then\nvalue = tombstone()"),
    ("settled by ?: an unknown one leaves no tombstone", "fields, dirty, kind, value = fields + 1, true, 2, tombstone()", ""),
    ("settled by ?: an unknown one charges no cost", "if kind == 0 and cost > 0 then change(cost, 2) end",
     ""),
    ("settled by ?: repeated, it charges the cost again",
     "elseif kind ~= 2 and is_unanswered then\nif kind == 0 and cost > 0",
     "elseif is_unanswered then\nif kind ~= 3 and cost > 0"),
    ("settled after that: by ? it charges the cost", "if kind == 0 and cost > 0 then", "if cost > 0 then"),
    ("settled after that: by ? it leaves no tombstone", "elseif kind ~= 2 and is_unanswered then",
     "elseif kind == 0 and is_unanswered then"),
    ("settled twice: it counts twice", "gone[#gone + 1], fields = id, fields - 1\nend\nelseif", "end\nelseif"),
    ("settled above: the difference is not charged", "change(cost - reserved, 2)", ""),
    ("settled above: it is not charged beyond the limit", "change(cost - reserved, 2)", "change(cost - reserved, 1)"),
    ("settled below: the difference is not given back", "elseif back > 0 then", "elseif false then"),
    ("settled below: more than still counts is given back", "min(reserved - cost, refundable)", "reserved - cost"),
    ("settled below: a log gives its newest hits back", "change(-back, 4)", "change(-back, 0)"),
    ("settled below: a bucket forgets what it gave back", "change(-back, 4)\ngiven_back = given_back + back",
     "change(-back, 4)"),
    ("settled below: hits that a clock set back discarded are given back", "if at < charged_at then return 0 end", ""),
    ("settled below: into a later fixed window", "return still_counts and", "return"),
    ("settled below: into a later calendar window", "return window_end == base and at < window_end and", "return"),
    ("settled below: into a later window of a sliding counter", "return floor(at / period) == base and", "return"),
    ("settled below: what has left a log is given back", "return at - charged_at < period and", "return"),
    ("settled below: the higher rate that a bucket had is ignored", "max(limit, highest_rate), period)",
     "limit, period)"),
    ("settled below: what a bucket gave back to others is ignored",
     "max(max(base - given_back, reserved) - refilled, 0)",
     "max(max(base, reserved) - refilled, 0)"),
    ("settled below: a bucket gives less back because others had theirs back",
     "max(max(base - given_back, reserved) - refilled, 0)", "max(base - given_back - refilled, 0)"),
    ("settled below: what a bucket has refilled is given back", "max(max(base - given_back, reserved) - refilled, 0)",
     "max(base - given_back, reserved)"),
    ("settled below: what a bucket gave back before counts against a charge", "return at, whole + given_back",
     "return at, whole"),
    ("tombstone: it admits", "fits = kind ~= 2 and not counts.rejects(amount)", "fits = not counts.rejects(amount)"),
    ("tombstone: it lives for a second more", "now + 15000000, 0, 0, 0)", "now + 16000000, 0, 0, 0)"),
    ("not settled in time: it can still be settled", "now + life_us, reserved,", "now + 2 * life_us, reserved,"),
    ("not settled in time: it is not counted", "unsettled = unsettled + 1", ""),
    ("not settled in time: its key ends before it is given back", "ttl_us, dirty = token, life_us + kept_us, true",
     "ttl_us, dirty = token, life_us, true"),
    ("unsettled: keep: it is given back", "if kept_us > 0 then\nlocal back", "if true then\nlocal back"),
    ("unsettled: return: it is not given back", "if kept_us > 0 then\nlocal back", "if false then\nlocal back"),
    ("unsettled: return: the counter does not get it back", "if returned > 0 then change(-returned, 4) end", ""),
    ("unsettled: return: nobody looks for it when hits are lacking", "kept_us > 0 and counts.rejects(amount)", "false"),
    ("unsettled: return: each request that lacks hits walks over all", "(cursor == '0' and 1000000 or 20000)",
     "(cursor == '0' and 0 or 20000)"),
    ("unsettled: return: it is given back into a later window", "local back = refundable_of(of, charged_at, of_base)",
     "local back = of"),
    ("unsettled: return: a bucket forgets what it gave back", "returned + back, given_back + back",
     "returned + back, given_back"),
    ("its Envoy dead: it keeps its reservations", "of_hits > 0 and is_freed_by_death(of, charged_at)", "false"),
    ("its Envoy dead: its tombstones are forgotten", "of_hits > 0 and is_freed_by_death(of, charged_at)",
     "is_freed_by_death(of, charged_at)"),
]


def make_mutations():
    mutations = Mutations()
    mutations.add_rust("", SLOTS_RUST, TESTS, RUNS_OF_SLOTS, OF_MEMORY)
    arms = mutations.add_lua(["slots", "streams"], "", SLOTS_LUA, SLOTS_IN_REDIS, RUNS_OF_SLOTS)
    arms += mutations.add_lua(["holders"], "", HOLDERS_LUA, SLOTS_OF_PROGRAM, RUNS_OF_SLOTS)
    mutations.add_rust("reservations, ", RESERVATIONS_RUST, TESTS, RUNS_OF_RESERVATIONS, OF_MEMORY)
    algorithms = ["fixed_window", "calendar_window", "sliding_window_counter", "sliding_window_log", "token_bucket"]
    arms += mutations.add_lua(["reservations", "streams", *algorithms], "reservations, ", RESERVATIONS_LUA,
                              RESERVATIONS_IN_REDIS, RUNS_OF_RESERVATIONS)
    mutations.mutate_scripts(arms)
    return mutations


if __name__ == "__main__":
    run(__doc__, make_mutations())
