#!/usr/bin/env python3
"""Breaks limits over RLS in Redis (strict and eventual), row by row, and tells after how many simulated runs that shows.

Usage: tests/mutations/world.py COPY [--only NUMBER,NUMBER-NUMBER] [--list] [--seeds N] [--seconds N]

COPY is a directory for a changed copy of the repository. A row that stays green is a hole in tests/world
(mutated_copy.py). Ends with 1 if there is one.
"""

from mutated_copy import RUNS_OF_CALLS, Mutations, run

REPLICAS, TABLE, LOCAL = "src/store/redis/replicas.rs", "src/store/redis/eventual/table.rs", "src/limit.rs"
BUDGET, FALLBACK, CALLS = "src/store/redis/eventual/budget.rs", "src/store/fallback.rs", "src/store/redis/calls.rs"
DEADLINE, SERVER, REDIS = "src/store/client/deadline.rs", "src/store/client/supervised_server.rs", "src/store/redis.rs"
DEPLOYMENT, FAILURES = "src/store/client/redis/deployment.rs", "src/decide/store_failures.rs"
PREPARED, POOL = "src/store/redis/prepared_call.rs", "src/limit/algorithm/region_pool.rs"
REQUESTS, JOINT = "src/limit/region_requests.rs", "src/limit/algorithm/joint_charge.rs"

RUST = [
    (REPLICAS, "let is_held = held.received <= at && at < held.until;",
     "let is_held = held.received <= at && (at < held.until || $0);",
     [("share", "it is used after the claim on the slot has ended")]),
    (REPLICAS, "is_held && held.free_us.saturating_add(to_micros(at - held.received)) >= period_us",
     "is_held && (held.free_us.saturating_add(to_micros(at - held.received)) >= period_us || $0)",
     [("share", "a new holder uses it within a period of the one before")]),
    (TABLE, "if used + hits > budget.share {", "if used + hits > budget.share && !$0 {",
     [("share", "it has no end")]),
    (TABLE, "        lease.left -= hits;\n", "        if !$0 { lease.left -= hits; }\n",
     [("lease", "its hits are used again and again")]),
    (TABLE, "find(|lease| context.at < lease.end && lease.left >= hits)?;",
     "find(|lease| (context.at < lease.end || $0) && lease.left >= hits)?;",
     [("lease", "it is used after its end")]),
    (TABLE, "        self.leases.remove(index).left\n",
     "        let lease = self.leases.remove(index);\n        if $0 { lease.granted } else { lease.left }\n",
     [("lease", "used hits are returned")]),
    (FALLBACK, "        limit.fallback_share(replicas)\n", "        if $0 { *limit } else { limit.fallback_share(replicas) }\n",
     [("policy local", "each replica admits the whole limit")]),
    (FAILURES, "Some(policy) if matches!(hits, Hits::Charge(_)) => policy,",
     "Some(policy) if matches!(hits, Hits::Charge(_)) && !$0 => policy,",
     [("policy deny or error", "it admits while Redis fails")]),
    (DEADLINE, "        if self.yields_left.is_none() && self.sleep.as_mut().poll(context).is_ready() {",
     "        if self.yields_left.is_none() && !$0 && self.sleep.as_mut().poll(context).is_ready() {",
     [("deadline", "a call without an answer waits on")]),
    (SERVER, "            && self.failures.swap(0, Ordering::Relaxed) >= MAX_CONSECUTIVE_FAILURES\n",
     "            && !$0 && self.failures.swap(0, Ordering::Relaxed) >= MAX_CONSECUTIVE_FAILURES\n",
     [("recovery", "the breaker stays open")]),
    (CALLS, "        while self.armed && self.take_followers().is_some() {}",
     "        while self.armed && !$0 && self.take_followers().is_some() {}",
     [("recovery", "calls that wait for one that was given up are left")]),
    (REQUESTS, "max(self.left).saturating_add(self.unreported);", "max(self.left).saturating_add(if $0 { 0 } else { self.unreported });",
     [("pool", "hits that were used and are in no request are not held any more")]),
    (POOL, "let left = held.saturating_sub(self.unreported);", "let left = if $0 { held } else { held.saturating_sub(self.unreported) };",
     [("pool", "hits that were used since a request are handed out again")]),
    (REQUESTS, "used: self.reported,", "used: if $0 { 0 } else { self.reported },", [("pool", "no used hits are told")]),
    (JOINT, "if rest == 0 { parts } else {", "if rest == 0 || $0 { parts } else {",
     [("overflow", "hits pass that neither limit has room for")]),
    (REDIS, "            self.heartbeat.start();\n", "            if !$0 { self.heartbeat.start(); }\n",
     [("share", "no slot is ever claimed")]),
]

LUA = {
    "overflow": [
        ("overflow: a part of the hits is charged, and the request rejected", "if rest > 0 then", "if rest > hits then"),
        ("overflow: a limit that takes a part of the hits is not charged", "admitted = fitting > 0 and fits(fitting)", "admitted = false"),
        ("overflow: the next limit takes all hits again", "do rest = rest - counters[place].admit_up_to(rest) end",
         "do rest = rest - counters[place].admit_up_to(hits) end"),
    ],
    "fixed_window": [
        ("fixed window: one more passes", "admitted = hits < 0 or count + hits <= limit",
         "admitted = hits < 0 or count + hits <= limit + 1"),
        ("fixed window: its key ends after 10 ms", "local ttl_ms = period_ms\nif window then",
         "local ttl_ms = 10\nif window then"),
        ("fixed window: a charge in the same window begins it anew", "is_new = is_new or floor(at / period) > floor(last / period)",
         "is_new = is_new or at > last"),
    ],
    "sliding_window_log": [
        ("log: hits end a tenth of a period early", "expired = seek(log, 0, at - period, 4503599627370496)",
         "expired = seek(log, 0, at - period * 0.9, 4503599627370496)"),
        ("log: one more passes", "admitted = hits < 0 or kept - dropped + new + hits <= limit",
         "admitted = hits < 0 or kept - dropped + new + hits <= limit + 1"),
    ],
    "sliding_window_counter": [
        ("sliding counter: the window before counts for nothing and two more pass",
         "current + divide(left_us, min(previous, capacity), period) + hits <= limit",
         "current + hits <= 2 * limit + 1"),
    ],
    "token_bucket": [
        ("token bucket: a token too many", "local excess = level_whole + hits - capacity", "local excess = level_whole + hits - capacity - 1"),
    ],
    "leaky_level": [
        ("buckets: they drain a tenth too fast", "local drained, drained_part = divide(at - last, limit, period)",
         "local drained, drained_part = divide(floor((at - last) * 1.1), limit, period)"),
    ],
    "pool": [
        ("pool: hits are handed out after their end", "if last >= ends then left = 0 end", ""),
        ("pool: hits are handed out again and again", "left, unreported = left - of_pool, min(unreported + of_pool, 9007199254740992)",
         "unreported = min(unreported + of_pool, 9007199254740992)"),
    ],
    "leaky_bucket": [
        ("leaky bucket: one more waits", "local room = capacity - level_whole - hits",
         "local room = capacity - level_whole - hits + 1"),
    ],
}


def make_mutations():
    mutations = Mutations()
    mutations.add_rust("", RUST, {}, RUNS_OF_CALLS)
    arms = "".join(mutations.add_lua([name], "", rows, [], RUNS_OF_CALLS) for name, rows in LUA.items())
    mutations.mutate_scripts(arms)
    return mutations


if __name__ == "__main__":
    run(__doc__, make_mutations())
