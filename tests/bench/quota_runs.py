"""Runs of the bench of quotas: demand, faults and what is measured of them."""

import collections
import dataclasses
import typing

from quota_judge import Limit, judge, share, time_until_share
from quota_load import Burst, Source

DEMAND = 1.4
ALGORITHMS = ["fixed_window", "token_bucket", "sliding_window_counter"]
LIMITS = {"second": (50, 1), "minute": (600, 60)}
BURSTS = {"second": Burst(int(50 * DEMAND * 4), 1, 3 * 4), "minute": Burst(int(10 * DEMAND * 20), 2, 3 * 20)}

Key = collections.namedtuple("Key", "name limit source")


def rules(scale=1.0):
    """A rule for each unit and algorithm; the name of a user begins with both."""
    lines = ["domain: quota", "descriptors:"]
    for unit, (hits, _) in LIMITS.items():
        for algorithm in ALGORITHMS:
            lines.append(f"- {{key: user, value: {unit}-{algorithm}-*, rate_limit: {{unit: {unit}, "
                         f"requests_per_unit: {int(hits * scale)}, algorithm: {algorithm}}}}}")
    return "\n".join(lines) + "\n"


def key(unit, algorithm, pattern, demand=DEMAND, source=Source):
    hits, period = LIMITS[unit]
    # Fresh counters for each run.
    name = f"{unit}-{algorithm}-{pattern}"
    burst = BURSTS[unit] if pattern == "bursty" else None
    if unit == "minute" and algorithm == "token_bucket":
        # The bucket starts with the hits of a minute more.
        demand *= 2
        burst = burst and burst._replace(every_s=burst.every_s / 2)
    return Key(name, Limit(hits, period, algorithm), source(name, demand * hits / period, pattern, burst))


def pattern_keys():
    return [key(unit, algorithm, pattern) for unit in LIMITS for algorithm in ("fixed_window", "token_bucket")
            for pattern in ("skewed", "even", "moving", "bursty")]


def even_keys():
    return [key("second", "fixed_window", "even"), key("second", "token_bucket", "even"),
            key("minute", "fixed_window", "even"), key("minute", "token_bucket", "even")]


async def nothing(_run):
    pass


@dataclasses.dataclass
class Scenario:
    name: str
    fleet: dict
    keys: typing.Callable = even_keys
    seconds: int = 0
    events: typing.Callable = nothing
    facts: typing.Callable = None
    judge: typing.Callable = None
    needs_grpc: bool = False


FAULT_AT_S = 45


def window_share(run, text, first, last, keys=None, proxies=None):
    """States the share of the limit between two times of a run."""
    begin = run.load.began
    for one in keys or run.keys:
        value = share(run.answers(one, proxies), one.limit, begin + first, begin + last)
        run.add_fact(one, text, value, "%")


def takeover(run, text, proxies, begin_s, percent=90):
    """States how long the other proxies need to use what they can; for rates, as lent hits have no steady flow."""
    for one in run.keys:
        if one.limit.period_s == 1:
            value = time_until_share(run.answers(one, proxies), one.limit, run.load.began + begin_s, percent)
            run.add_fact(one, text, value, "s")


# The server is killed, and back after 3 s.

async def kill_server(run):
    await run.at(FAULT_AT_S)
    run.fleet.servers[0].kill()
    await run.at(FAULT_AT_S + 3)
    run.fleet.servers[0].start(wait=False)


def killed_facts(run):
    window_share(run, "share of the 30 s from the kill", FAULT_AT_S, FAULT_AT_S + 30)
    window_share(run, "share of the 30 s from the return", FAULT_AT_S + 3, FAULT_AT_S + 33)


# The server is stopped for longer than an assignment lives.

async def freeze_server(run):
    await run.at(FAULT_AT_S)
    run.fleet.servers[0].pause()
    await run.at(FAULT_AT_S + 20)
    run.fleet.servers[0].resume()


def frozen_facts(run):
    window_share(run, "share of the frozen 20 s", FAULT_AT_S, FAULT_AT_S + 20)
    window_share(run, "share of the 30 s after", FAULT_AT_S + 20, FAULT_AT_S + 50)


# An Envoy is killed; its clients go to the others.

async def kill_envoy(run):
    await run.at(FAULT_AT_S)
    run.load.avoided.add(0)
    run.fleet.envoys[0].kill()


def envoy_killed_facts(run):
    takeover(run, "until its share is taken over", None, FAULT_AT_S)
    window_share(run, "share of the 30 s from the kill", FAULT_AT_S, FAULT_AT_S + 30)


# A third Envoy gets its first request.

async def join_envoy(run):
    run.load.avoided.add(2)
    await run.at(FAULT_AT_S)
    run.load.avoided.discard(2)


def joined_facts(run):
    for one in run.keys:
        if one.limit.period_s == 1:
            third = Limit(one.limit.hits / 3, 1, one.limit.algorithm)
            value = time_until_share(run.answers(one, {2}), third, run.load.began + FAULT_AT_S, 80)
            run.add_fact(one, "until the new Envoy has 80 % of a third", value, "s")
    window_share(run, "share of the 30 s from the first request", FAULT_AT_S, FAULT_AT_S + 30)


# An Envoy is stopped for 30 s; its clients go to the others, and return.

async def stop_envoy(run):
    await run.at(FAULT_AT_S)
    run.load.avoided.add(0)
    run.fleet.envoys[0].pause()
    await run.at(FAULT_AT_S + 30)
    run.fleet.envoys[0].resume()
    await run.at(FAULT_AT_S + 31)
    run.load.avoided.discard(0)


def stopped_facts(run):
    takeover(run, "until its share is taken over", None, FAULT_AT_S)
    window_share(run, "share of the 30 s after its return", FAULT_AT_S + 31, FAULT_AT_S + 61)


# The link between an Envoy and the server holds all bytes back for 30 s, then delivers them.

async def cut_link(run):
    await run.at(FAULT_AT_S)
    run.fleet.links[0].set_held("calls", "answers")
    await run.at(FAULT_AT_S + 30)
    run.fleet.links[0].set_held()


def cut_facts(run):
    takeover(run, "until the others have what they can use", {1, 2}, FAULT_AT_S)
    window_share(run, "share of the 30 s cut off", FAULT_AT_S, FAULT_AT_S + 30)
    window_share(run, "share of the 30 s after", FAULT_AT_S + 30, FAULT_AT_S + 60)


# The limit is halved and doubled while all run.

SMALLER_AT_S, LARGER_AT_S, ENDS_S = 45, 110, 180
# What is assigned runs on for its TTL.
SETTLED_S = 20


async def change_rules(run):
    await run.at(SMALLER_AT_S)
    run.fleet.change_rules(rules(0.5))
    await run.at(LARGER_AT_S)
    run.fleet.change_rules(rules(1.5))


def judge_reload(run):
    rows = []
    for one in run.keys:
        answers, began = run.answers(one), run.load.began
        for label, factor, first, last in [("x 1", 1, 0, SMALLER_AT_S),
                                           ("x 0.5", 0.5, SMALLER_AT_S + SETTLED_S, LARGER_AT_S),
                                           ("x 1.5", 1.5, LARGER_AT_S + SETTLED_S, ENDS_S)]:
            begin, end = began + first, began + last
            if first and one.limit.period_s > 1 and one.limit.algorithm == "fixed_window":
                # The window of the change holds hits of the former limit.
                begin += -begin % one.limit.period_s
            part = [answer for answer in answers if begin <= answer.sent < end]
            limit = one.limit._replace(hits=int(one.limit.hits * factor))
            if not part:
                # No window of the limit begins in this part.
                continue
            rows.append(judge(f"{one.name}: {label}", part, limit))
    return rows


def reload_facts(run):
    for one in run.keys:
        if one.limit.period_s == 1:
            larger = Limit(75, 1, one.limit.algorithm)
            value = time_until_share(run.answers(one), larger, run.load.began + LARGER_AT_S, 90)
            run.add_fact(one, "until the larger limit is used", value, "s")


def reload_keys():
    return [key("second", "fixed_window", "even", 2.1), key("second", "token_bucket", "even", 2.1),
            key("minute", "fixed_window", "even", 2.1)]


# Two servers on one Redis, of which one is killed.

async def kill_replica(run):
    await run.at(FAULT_AT_S)
    run.fleet.servers[1].kill()
    # As an address of a service that leads to the other.
    run.fleet.links[2].target = run.fleet.servers[0].grpc


def replica_facts(run):
    window_share(run, "share of the 40 s before the kill", 5, FAULT_AT_S)
    window_share(run, "share of the 30 s from the kill", FAULT_AT_S, FAULT_AT_S + 30)


# Half of the demand is decided by RLS.

class MixedSource(Source):
    """Calls ShouldRateLimit for the requests of the share `rls`."""

    call = None

    async def decide(self):
        import grpc

        import quota_wire
        request = quota_wire.decide_request("quota", {b"user": self.key.encode()})
        try:
            return quota_wire.is_admitted(await self.call(request, timeout=2))
        except grpc.aio.AioRpcError:
            return None


def mixed_keys():
    return [key(unit, algorithm, "rls", source=MixedSource)
            for unit in LIMITS for algorithm in ("fixed_window", "token_bucket")]


async def open_rls(run):
    import grpc

    import quota_wire
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{run.fleet.servers[0].grpc}")
    MixedSource.call = channel.unary_unary(quota_wire.DECIDE_METHOD)


def mixed_facts(run):
    for one in run.keys:
        answers = run.answers(one)
        by_rls = sum(bool(answer.admitted) for answer in answers if answer.proxy == "rls")
        admitted = sum(bool(answer.admitted) for answer in answers)
        run.add_fact(one, "part of the hits that RLS admitted", round(100 * by_rls / max(1, admitted), 1), "%")


# The first requests of a bucket are allowed.

def first_keys():
    return [key("second", "fixed_window", f"first{number}", 4) for number in range(3)]


def judge_first(run):
    rows = []
    for one in run.keys:
        answers = run.answers(one)
        allowance = 0
        for proxy in range(3):
            own = [answer for answer in answers if answer.proxy == proxy]
            start = min((answer.sent for answer in own), default=0)
            allowance += sum(bool(answer.admitted) for answer in own if answer.sent < start + 0.25)
        rows.append(judge(one.name, answers, one.limit, allowance))
    return rows


PATTERN_RUNS = [
    Scenario("patterns-memory", {}, pattern_keys),
    Scenario("patterns-redis", {"redis": True}, pattern_keys),
    Scenario("patterns-2-redis", {"redis": True, "replicas": 2}, pattern_keys),
]

FAULTS = [
    Scenario("server-killed", {"redis": True}, seconds=100, events=kill_server, facts=killed_facts),
    Scenario("server-frozen", {"redis": True}, seconds=120, events=freeze_server, facts=frozen_facts),
    Scenario("envoy-killed", {}, seconds=100, events=kill_envoy, facts=envoy_killed_facts),
    Scenario("envoy-joined", {}, seconds=90, events=join_envoy, facts=joined_facts),
    Scenario("envoy-stopped", {}, seconds=120, events=stop_envoy, facts=stopped_facts),
    Scenario("link-held", {"links": True}, seconds=120, events=cut_link, facts=cut_facts),
    Scenario("rules-changed", {}, reload_keys, ENDS_S, change_rules, reload_facts, judge_reload),
    Scenario("replica-killed", {"redis": True, "replicas": 2, "links": True}, seconds=100, events=kill_replica,
             facts=replica_facts),
    Scenario("together", {}, mixed_keys, 130, open_rls, mixed_facts, needs_grpc=True),
    Scenario("together-redis", {"redis": True}, mixed_keys, 130, open_rls, mixed_facts, needs_grpc=True),
    Scenario("first", {"no_assignment": "ALLOW_ALL"}, first_keys, 30, judge=judge_first),
]
