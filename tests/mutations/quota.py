#!/usr/bin/env python3
"""Breaks the division of quotas among proxies, row by row, and tells which tests notice.

Usage: tests/mutations/quota.py COPY [--only NUMBER,NUMBER-NUMBER] [--list] [--world]

COPY is a directory for a changed copy of the repository. Each mutation is on by itself while its tests run, or with
--world simulated runs, and they must fail (mutated_copy.py). Ends with 1 if they do not.

The rows are the promises of docs/quota.md and of the text of src/limit/division.rs. tests/run.sh sets what the tests of
the suite need.
"""

from mutated_copy import RUNS_OF_QUOTAS, Mutations, run

ASSIGN, LEDGER, HOLDER = "src/limit/division/assign.rs", "src/limit/division/ledger.rs", "src/limit/division/holder.rs"
FAIR, HOLD, SELECT = "src/limit/division/fair_share.rs", "src/limit/hold.rs", "src/decide/quota_buckets.rs"
STREAM, MESSAGES, PAGE = "src/serve/quota/stream.rs", "src/serve/quota/messages.rs", "src/serve/quota/page.rs"
LEVELS = "src/limit/division/levels.rs"
EMPTY, CHANGE = "src/limit/division/empty_buckets.rs", "src/limit/division/limit_change.rs"
POOL = "src/limit/pool.rs"
# Filters, the fastest first: a row runs them until one has a test that fails.
STEPS, SHARES = "limit::division::steps", "limit::division::fair_share"
JOINS = ["limit::division::joins"]
BOUNDS = ["limit::division::lent", "limit::division::rates_of"]
USE = ["limit::division::demand"]
RELOADS = ["limit::division::reloads"]
DIVISION = [STEPS, *BOUNDS, *RELOADS, *USE]
# Without those that need an Envoy.
SUITE = ["quota::buckets_of_a_report", "quota::limits_of_rules", "quota::reports"]
STREAMS = ["serve::quota::streams", *SUITE, "quota::changed_rule"]
# Tests of what is in a file, unless a row names others.
TESTS = {
    ASSIGN: DIVISION, LEDGER: DIVISION, POOL: DIVISION, HOLDER: DIVISION, EMPTY: DIVISION,
    CHANGE: RELOADS,
    LEVELS: [*JOINS, *USE], FAIR: [SHARES], HOLD: [STEPS, "holds::"],
    SELECT: SUITE, STREAM: STREAMS, MESSAGES: STREAMS, PAGE: SUITE,
}

# File, text, replacement, and for each $N of the replacement the promise, what is broken, and the tests if not those of
# the file.
RUST = [
    # Max-min.
    (FAIR, "if want.saturating_mul(others) > left {", "if want.saturating_mul(others) > left || $0 {",
     [("max-min", "all get the same part, whatever they want")]),
    (FAIR, "Self { level: left.div_ceil(others), spread: 0 }",
     "Self { level: if $0 { amount.div_ceil(others) } else { left.div_ceil(others) }, spread: 0 }",
     [("max-min", "small wants are not taken off first")]),
    (FAIR, "Self { level: u64::MAX, spread }", "Self { level: u64::MAX, spread: if $0 { 0 } else { spread } }",
     [("max-min", "what nobody wants stays unused")]),
    (LEDGER, "let floor = if holder.demand.samples == 0 { fair } else { 0 };",
     "let floor = if holder.demand.samples == 0 && !$0 { fair } else { 0 };",
     [("newcomer", "it gets no part at once")]),
    (HOLDER, "_ if self.samples == 0 => measured,", "_ if self.samples == 0 && !$0 => measured,",
     [("demand", "the first sample is smoothed from nothing")]),

    # Charged in advance.
    (LEDGER, "self.pools[index].divisible().saturating_sub(self.reserved(index))",
     "self.pools[index].divisible().saturating_sub(if $0 { 0 } else { self.reserved(index) })",
     [("charged in advance", "what one proxy has is given to another too")]),
    (LEDGER, "let mut held = pool.limit.share_of_amount(answer.granted);",
     "let mut held = pool.limit.share_of_amount(if $0 { request.wanted } else { answer.granted });",
     [("charged in advance", "what was asked for is handed out, not what was granted")]),
    (ASSIGN, "LentChange::Replace(hits) => self.outstanding.saturating_add(hits),",
     "LentChange::Replace(hits) => if $0 { self.outstanding } else { self.outstanding.saturating_add(hits) },",
     [("charged in advance", "lent hits are not reserved")]),
    (ASSIGN, "LentChange::Raise(hits) => self.outstanding.saturating_add(hits - left),",
     "LentChange::Raise(hits) => if $0 { self.outstanding } else { self.outstanding.saturating_add(hits - left) },",
     [("charged in advance", "tokens that a raise mints are not reserved")]),
    (ASSIGN, "let (new, raised) = (hits.min(free).min(MAX_TOKENS), hits.min(left.saturating_add(free)));",
     "let (new, raised) = (hits.min(if $0 { hits } else { free }).min(MAX_TOKENS),"
     " hits.min(left.saturating_add(if $1 { u64::MAX } else { free })));",
     [("charged in advance", "a new bucket takes more than is free"),
      ("charged in advance", "a raise takes more than is free")]),
    (LEDGER, "            pool.hits.record_used_hits(charged);",
     "            pool.hits.record_used_hits(if $0 { lent } else { charged });",
     [("charged in advance", "hits beyond an assignment are not charged as debt")]),

    # Take before give.
    (HOLDER, "if loss.share == 0 && loss.bucket == 0 {", "if loss.share == 0 && loss.bucket == 0 || $0 {",
     [("take before give", "what a proxy gives up of a rate is free at once")]),
    (EMPTY, "self.share = self.share.saturating_add(empty);",
     "self.share = self.share.saturating_add(if $0 { 0 } else { empty });",
     [("take before give", "a rate's bucket moves before it is full again")]),
    (EMPTY, "self.unowned_refill = self.unowned_refill.min(refill);",
     "self.unowned_refill = if $0 { self.unowned_refill } else { self.unowned_refill.min(refill) };",
     [("take before give", "refill that was handed out meanwhile fills buckets")]),
    (ASSIGN, "rate.change_to(*share, Some(now), old_end);",
     "rate.change_to(*share, Some(now), if $0 { now } else { old_end });",
     [("take before give", "a rate moves without evidence that it is out of use")]),
    (HOLDER, "sent.received_by.is_some() && sent.at.plus_us(CONFIRMED_AFTER_US) < received",
     "(sent.received_by.is_some() || $1) && sent.at.plus_us(if $0 { 0 } else { CONFIRMED_AFTER_US }) < received",
     [("take before give", "a report within a second confirms an assignment"),
      ("take before give", "a report confirms an assignment that the proxy did not acknowledge")]),
    (HOLDER, "self.sent.is_none_or(is_simple) || self.is_confirmed_by_report(self.received)",
     "self.sent.is_none_or(is_simple) || self.is_confirmed_by_report(self.received) || $0",
     [("take before give", "a change does not wait until the one before it is confirmed")]),
    (HOLDER, "|received| received.since_us(self.last_sent));",
     "|received| if $0 { 0 } else { received.since_us(self.last_sent) });",
     [("take before give", "an assignment that was acknowledged late counts as begun when it was sent")]),
    (LEDGER, "self.is_lent() && needed > self.known_room() && self.asked_ago_us(now) > MARGIN_US",
     "self.is_lent() && needed > self.known_room() && self.asked_ago_us(now) > MARGIN_US && !$0",
     [("newcomer", "a replica that was granted nothing of a bucket never asks again")]),
    (LEDGER, "            pool.add_share_of_gone_holder(gone);",
     "            if !$0 { pool.add_share_of_gone_holder(gone); }",
     [("take before give", "the part of a lost stream is free at once")]),
    (LEDGER, "(AssignmentForm::Rate, false) => self.limit.refill_us().saturating_sub(MARGIN_US),",
     "(AssignmentForm::Rate, false) => if $0 { 0 } else { self.limit.refill_us().saturating_sub(MARGIN_US) },",
     [("take before give", "the hold of a window's rate ends with the assignment")]),

    # Idle buckets.
    (STREAM, "let is_idle = now.since_us(bucket.used) >= IDLE_US;",
     "let is_idle = now.since_us(bucket.used) >= IDLE_US && !$0;", [("idle bucket", "it is never abandoned")]),
    (ASSIGN, "if !has_lent || holder.outstanding <= 1 {", "if !has_lent || holder.outstanding <= 1 || $0 {",
     [("idle bucket", "it is abandoned with what it has")]),
    (ASSIGN, "Some(sent) if sent.most_left() <= 1 || !holder.can_be_changed() => Retirement::Wait,",
     "Some(sent) if (sent.most_left() <= 1 || !holder.can_be_changed()) && !$0 => Retirement::Wait,",
     [("idle bucket", "it does not wait for the report that confirms a change")]),

    # Times to live.
    (ASSIGN, "let ttl_s = bound_ttl(RATE_TTL_S, held_until, now);",
     "let ttl_s = bound_ttl(if $0 { 10 } else { RATE_TTL_S }, held_until, now);",
     [("15 s or more", "a rate lasts for 10 s")]),
    (LEDGER, "Some(left_us) if left_us > 3 * WINDOW_END_GUARD_US => full_us.min(left_us - WINDOW_END_GUARD_US),",
     "Some(left_us) if left_us > (if $0 { 1 } else { 3 }) * WINDOW_END_GUARD_US =>"
     " full_us.min(left_us - WINDOW_END_GUARD_US),",
     [("15 s or more", "lent hits end soon, because their window does")]),
    (ASSIGN, "let left_s = held_until.since_us(now).saturating_sub(MARGIN_US) / 1_000_000;",
     "let left_s = if $0 { 3600 } else { held_until.since_us(now).saturating_sub(MARGIN_US) / 1_000_000 };",
     [("never beyond the hold", "an assignment lasts longer than what it is made of")]),
    (MESSAGES, "assignment_time_to_live: Some(prost_types::Duration { seconds: ttl_s.into(), nanos: 0 }),",
     "assignment_time_to_live: (!$0).then(|| prost_types::Duration { seconds: ttl_s.into(), nanos: 0 }),",
     [("never what Envoy ignores", "the time to live is unset")]),
    (MESSAGES, "fill_interval: Some(prost_types::Duration { seconds: interval_s.into(), nanos: 0 }),",
     "fill_interval: Some(match $0 {\n"
     "                true => prost_types::Duration { seconds: 0, nanos: 500_000_000 },\n"
     "                false => prost_types::Duration { seconds: interval_s.into(), nanos: 0 },\n            }),",
     [("never what Envoy ignores", "the interval is half a second")]),

    # Renewals.
    (HOLDER, "self.sent.is_some_and(|sent| sent.ends > now.plus_us(MARGIN_US))",
     "self.sent.is_some_and(|sent| sent.ends.plus_us(if $0 { 60_000_000 } else { 0 }) > now.plus_us(MARGIN_US))",
     [("no equal renewal after a lapse", "an assignment counts as in force after its end")]),
    (ASSIGN, "let starts_full = is_fresh && (self.sent.is_some() || self.has_unknown_assignment);",
     "let starts_full = is_fresh && (self.sent.is_some() && !$0 || self.has_unknown_assignment && !$1);",
     [("pair for fresh buckets", "a fresh bucket keeps the ratio of the one before"),
      ("never what Envoy ignores", "a bucket comes with its former tokens and another interval")]),
    (ASSIGN, "starts_full: assignment.starts_full && !is_in_force,",
     "starts_full: assignment.starts_full && (!is_in_force || $0),",
     [("pair for fresh buckets", "a rate that changes begins with a full bucket")]),
    (MESSAGES, "    if assignment.starts_full {\n", "    if assignment.starts_full && !$0 {\n",
     [("pair for fresh buckets", "the deny before it is not sent")]),
    (HOLDER, "        now.since_us(self.reported) < ALIVE_US", "        now.since_us(self.reported) < ALIVE_US || $0",
     [("silent proxy", "it gets renewals, and more")]),
    (HOLDER, "        now.since_us(self.reported) > SILENT_AFTER_US",
     "        now.since_us(self.reported) > SILENT_AFTER_US && !$0",
     [("silent proxy", "it keeps its place in the division")]),
    (ASSIGN, "if changes && is_in_force && has_tokens && !holder.keeps_ratio {",
     "if changes && is_in_force && has_tokens && !holder.keeps_ratio && !$0 {",
     [("proxy that begins with a full bucket", "its old one does not rest before")]),
    (ASSIGN, "let can_grow = !self.was_denied\n", "let can_grow = (!self.was_denied || $0)\n",
     [("raise by the ratio", "of a proxy that denies, which has less than it may have")]),
    (ASSIGN, "&& left.saturating_mul(MIN_RATIO_OF_RAISE) >= max.into()",
     "&& (left.saturating_mul(MIN_RATIO_OF_RAISE) >= max.into() || $0)",
     [("raise by the ratio", "of a bucket that is nearly empty")]),

    # What is reported, and what is not.
    (LEDGER, "let lent = if holder.has_unknown_assignment { 0 } else {",
     "let lent = if holder.has_unknown_assignment && !$0 { 0 } else {",
     [("refund only of the same stream", "hits of an unknown assignment lower what was assigned since")]),
    (LEDGER, "let charged = if is_of_another { 0 } else { usage.allowed };",
     "let charged = if is_of_another && !$0 { 0 } else { usage.allowed };",
     [("refund only of the same stream", "hits that another assignment admitted are charged twice")]),
    (LEDGER, "used = used.saturating_add(std::mem::take(&mut holder.outstanding));",
     "let outstanding = std::mem::take(&mut holder.outstanding);\n"
     "                used = used.saturating_add(if $0 { 0 } else { outstanding });",
     [("unreported hits count as used", "an assignment that ended gives them back")]),
    (LEDGER, "pool.hits.record_used_hits(used.saturating_add(lost));",
     "pool.hits.record_used_hits(used.saturating_add(if $0 { 0 } else { lost }));",
     [("unreported hits count as used", "a lost stream gives them back")]),
    (LEDGER, "let is_empty = was_filled && usage.denied > 0 && sent.never_refills();",
     "let is_empty = (was_filled || $0) && (usage.denied > 0 || $1) && sent.never_refills();",
     [("refund only of the same stream", "a denied request of the time before the assignment empties it"),
      ("refund only of the same stream", "a report without denied requests gives everything back")]),
    (LEDGER, "if holder.is_assignment_over(usage.received) {", "if holder.is_assignment_over(usage.received) || $0 {",
     [("refund only of the same stream", "every report gives back what is left")]),
    (SELECT, "deciding().find_map(|selected| self.store.reason_against_holds(&selected.limit))",
     "deciding().find_map(|selected| self.store.reason_against_holds(&selected.limit).filter(|_| !$0))",
     [("indivisible limit", "it is assigned")]),

    # Pages.
    (SELECT, "let form = if counters.has_private_values {", "let form = if counters.has_private_values && !$0 {",
     [("private values", "the page of quotas shows them")]),
    (PAGE, "(Reverse(report.reserved), holder.key.stream.id)",
     "(if $0 { Reverse(0) } else { Reverse(report.reserved) }, if $0 { u64::MAX - holder.key.stream.id } else {"
     " holder.key.stream.id })",
     [("who holds what", "proxies with few hits come first")]),

    # Calls to the store.
    (POOL, "            number: now.as_micros(),", "            number: if $0 { 0 } else { now.as_micros() },",
     [("request numbers", "those of a new division are those of the one before")]),
    (POOL, "        self.number += 1;", "        self.number += u64::from(!$0);",
     [("request numbers", "two requests have one number")]),
    (HOLD, "let is_repeated = first > 0 && last.is_some_and(|last| last.number >= first);",
     "let is_repeated = first > 0 && !$0 && last.is_some_and(|last| last.number >= first);",
     [("charged once", "a repeated call charges its hits again")]),
    (POOL, "self.unanswered = Some(NumberedHits { used: request.used, number: request.number, first_number });",
     "self.unanswered = (!$0).then_some(NumberedHits { used: request.used, number: request.number, first_number });",
     [("charged once", "a call that failed is not repeated")]),
    (LEDGER, "        pool.hits.held = pool.hits.held.min(wanted);", "        if !$0 { pool.hits.held = pool.hits.held.min(wanted); }",
     [("refused hits are not lent", "what is given back is handed out until the answer")]),
    (LEDGER, "        self.hits.held.min(self.limit.total())",
     "        if $0 { self.hits.held } else { self.hits.held.min(self.limit.total()) }",
     [("smaller limit", "more than it allows is handed out")]),
    (CHANGE, "limit.share_of_tokens(old.bucket_size_of_share(*bucket))",
     "if $0 { *bucket } else { limit.share_of_tokens(old.bucket_size_of_share(*bucket)) }",
     [("changed limit", "tokens of proxies count as the part that they were of the old limit")]),
    (ASSIGN, "part.bucket = part.bucket.min(limit.share_of_tokens(self.tokens));",
     "part.bucket = if $0 { part.bucket } else { part.bucket.min(limit.share_of_tokens(self.tokens)) };",
     [("two limits", "one does not see that the bucket shrank for the other")]),
    (ASSIGN, "|| new == old => strategy,", "|| new == old || $0 => strategy,",
     [("never what Envoy ignores", "only the interval of a bucket changes")]),
    (LEVELS, "                    (_, 1..) => 0,",
     "                    (_, 1..) => if $0 { free.min(free_buckets) } else { 0 },",
     [("newcomer", "others take what is free before it")]),

    # The stream.
    (STREAM, "self.handle.lock().due.extend(indices.iter().map(|(index, _)| *index));",
     "self.handle.lock().due.extend(indices.iter().map(|(index, _)| *index).filter(|_| !$0));",
     [("one response per report", "buckets of a report are not answered")]),
    (STREAM, "        while began.elapsed() < MAX_RESPONSE_TIME\n",
     "        while began.elapsed() < MAX_RESPONSE_TIME && !($0 && count > 0)\n",
     [("one response per report", "each bucket has a response of its own")]),

    # Parts of buckets, and denied requests.
    (LEVELS, "levels.refill_kept = empty.min(lacked.saturating_sub(free));",
     "levels.refill_kept = if $0 { 0 } else { empty.min(lacked.saturating_sub(free)) };",
     [("newcomer", "no refill is withheld for the bucket that it lacks")]),
    (LEVELS, "            parts().any(|part| part == Part::default()) || assigned",
     "            parts().any(|part| part == Part::default()) && !$0 || assigned",
     [("newcomer", "it gets nothing from many who each have a little too much")]),
    (LEVELS, "assigned.fold(0, u64::saturating_add) > self.divisible();",
     "assigned.fold(0, u64::saturating_add) > self.divisible() && !$0;",
     [("smaller limit", "a bucket that became a little smaller stays", RELOADS)]),
    (LEVELS, "|| free.saturating_add(empty) < lacked;", "|| free.saturating_add(empty) < lacked && !$0;",
     [("newcomer", "nobody gives up a part of the bucket")]),
    (LEDGER, "let moved = self.recently_used_refill.share(self.limit.refill_us(), now);",
     "let moved = if $0 { 0 } else { self.recently_used_refill.share(self.limit.refill_us(), now) };",
     [("take before give", "refill that did not rest is given back to the store")]),
    (ASSIGN, "(TokenChange::Shrink { .. } | TokenChange::Raise | TokenChange::Fresh { .. }, _) => now,",
     "(TokenChange::Shrink { .. } | TokenChange::Raise | TokenChange::Fresh { .. }, _) =>"
     " if $0 { self.sent.map_or(now, |sent| sent.filled_at) } else { now },",
     [("refund only of the same stream", "a request that was denied before a raise empties the bucket")]),
]


def make_mutations():
    mutations = Mutations()
    mutations.add_rust("", RUST, TESTS, RUNS_OF_QUOTAS)
    return mutations


if __name__ == "__main__":
    run(__doc__, make_mutations())
