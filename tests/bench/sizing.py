#!/usr/bin/env python3
"""Latency of a fleet that is too large to run here, simulated from measured costs: what docs/sizing.md says.

Usage: tests/bench/sizing.py [--core-us N] [--redis-us N] [--burst N] [--seconds N]

A fleet of R cores and S shards is S and R times the same queue: each core of a replica serves its part of the calls in
turn, each shard (one thread of Redis) its part of the charges. So one core and one shard are simulated, with calls that
come in bursts, as Envoy's worker threads send them: Poisson arrivals of bursts of `--burst` calls on the average
(geometric). A strict call uses the core, waits for the network (`NETWORK_US`), uses the shard, waits again and uses the
core again. Costs are CPU time per call at that load (docs/performance.md); they do not vary in the model, so pauses of
the machine itself come on top.

Prints percentiles by utilisation, for memory and eventual (core alone) and strict (both). With --rate it also prints
what the model says of this machine, to be compared with tests/bench/open_loop.py.
"""

import argparse
import heapq
import random

NETWORK_US = 100
UTILISATIONS = [0.3, 0.5, 0.6, 0.7, 0.8, 0.9]


def arrivals(rng, per_us, burst, end_us):
    """Yields times of calls at `per_us` calls a microsecond."""
    at = 0.0
    while at < end_us:
        at += rng.expovariate(per_us / burst)
        yield at
        while rng.random() < 1 - 1 / burst:
            yield at


class Queue:
    """One thread that serves in the order of arrival; calls must come in that order."""

    def __init__(self):
        self.free_at = 0.0

    def serve(self, at, cost_us):
        self.free_at = max(self.free_at, at) + cost_us
        return self.free_at


def percentiles(times):
    times.sort()
    return [times[min(len(times) - 1, int(len(times) * part))] for part in (0.5, 0.99, 0.999)]


def core_alone(rng, options, utilisation):
    core = Queue()
    calls = arrivals(rng, utilisation / options.core_us, options.burst, options.seconds * 1e6)
    return percentiles([core.serve(at, options.core_us) - at for at in calls])


def with_shard(rng, options, utilisation):
    """Percentiles of strict calls; core and shard have the same utilisation.

    The shard serves as many calls of other cores as it takes for that; they wait there like those of this core.
    """
    core, shard, took = Queue(), Queue(), []
    end_us = options.seconds * 1e6
    own_per_us = utilisation / options.core_us
    others_per_us = max(utilisation / options.redis_us - own_per_us, 1e-9)
    events = [(at, 0, at) for at in arrivals(rng, own_per_us, options.burst, end_us)]
    events += [(at, 3, at) for at in arrivals(rng, others_per_us, options.burst, end_us)]
    heapq.heapify(events)
    half = options.core_us / 2
    while events:
        at, stage, began = heapq.heappop(events)
        if stage == 0:
            heapq.heappush(events, (core.serve(at, half) + NETWORK_US, 1, began))
        elif stage == 1:
            heapq.heappush(events, (shard.serve(at, options.redis_us) + NETWORK_US, 2, began))
        elif stage == 2:
            took.append(core.serve(at, half) - began)
        else:
            shard.serve(at, options.redis_us)
    return percentiles(took)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core-us", type=float, default=12, help="CPU of a core for a call")
    parser.add_argument("--redis-us", type=float, default=5, help="CPU of Redis for a charge")
    parser.add_argument("--burst", type=float, default=8, help="mean number of calls that come at once")
    parser.add_argument("--seconds", type=float, default=10, help="simulated time")
    parser.add_argument("--rate", type=float, help="calls a second of one core, in place of the utilisations")
    options = parser.parse_args()
    rng = random.Random(1)
    utilisations = UTILISATIONS if options.rate is None else [options.rate * options.core_us / 1e6]
    print("| utilisation | calls a second and core | core alone: p50, p99, p99.9 ms | strict: p50, p99, p99.9 ms |")
    print("|---|---|---|---|")
    for utilisation in utilisations:
        if not 0 < utilisation < 1:
            parser.error("the core is overloaded: --rate x --core-us must be below 1 000 000")
        columns = [", ".join(f"{us / 1000:.2f}" for us in simulate(rng, options, utilisation))
                   for simulate in (core_alone, with_shard)]
        rate = utilisation / options.core_us * 1e6
        print(f"| {100 * utilisation:.0f} % | {rate:.0f} | {columns[0]} | {columns[1]} |", flush=True)


if __name__ == "__main__":
    main()
