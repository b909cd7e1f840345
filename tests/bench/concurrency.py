#!/usr/bin/env python3
"""Concurrent limits through real Envoys: are there ever more streams than a limit has slots, and does a slot come back?

Usage: tests/bench/concurrency.py BINARY [--only NAME] [--seconds N] [--keep DIRECTORY]

BINARY is a tollkeeper. Two Envoys with envoy/concurrency.yaml call two replicas with one Redis; the backend counts the
streams that are open (tests/bench/concurrency_load.py says how). `--only list` prints the names of the runs.

Prints a row for each run and ends with status 1 if one is broken:
  mixed, memory     requests of all kinds, cancels at random times, forged ids: never more than the limit, none is left
  replica, redis-frozen, lowered   the same while a replica dies, Redis stands still, the limit changes
  redis-empty       Redis loses its data: at most the limit again until the old streams are over, exact afterwards
  freed             a slot is usable within 100 ms of its stream's end
  killed, killed-default   Envoy dies by SIGKILL with 50 open: all slots are back within the holder timeout + 5 s
  terminated        the same by SIGTERM
  drained           /drain_listeners?graceful and the end of all streams before the end of Envoy: no slot expires
  long              streams without traffic, for many holder timeouts; `long-default` (ten minutes) only if asked for
  websocket         upgraded connections hold their slot until they are closed

`--only million` measures, without Envoys, and judges nothing: memory of a million slots in tollkeeper and in Redis, on
1, 1000 and 100 000 counters, and how long calls take meanwhile.

Needs Envoy (envoy/install.sh) and redis-server. Uses loopback only and ends only its own processes.
"""

import argparse
import asyncio
import collections
import pathlib
import signal
import sys
import tempfile
import time

from concurrency_fleet import Fleet
from concurrency_load import Backend, Client, MixedLoad, Streams
from concurrency_million import measure_million
from quota_fleet import PORTS, envoy_binary, wait_for_port

LIMIT = 10
USERS = ["ann", "bob", "eve"]
# Releases that Envoy repeats, and tombstones.
IDLE_WITHIN_S = 20


class Run:
    """A fleet with a backend, and what was found wrong."""

    def __init__(self, options, directory, limit=LIMIT, **fleet):
        self.options, self.limit = options, limit
        self.streams = Streams(limit)
        self.backend_port = next(PORTS)
        self.fleet = Fleet(options, directory, self.backend_port, limit, **fleet)
        self.client = Client(self.streams)
        self.facts, self.broken = [], []

    async def start(self):
        self.backend = Backend(self.streams)
        await self.backend.start(self.backend_port)
        for envoy in self.fleet.envoys:
            await self.admitted(envoy, "warm-up")

    def check(self, is_right, text):
        if not is_right:
            self.broken.append(text)

    async def admitted(self, envoy, user, timeout_s=60):
        """Sends requests until one is admitted; returns the seconds until that one was sent."""
        began = time.time()
        while time.time() < began + timeout_s:
            sent = time.time()
            if await self.client.request(envoy, user) == 200:
                return sent - began
            await asyncio.sleep(0.002)
        self.check(False, f"no request of {user} was admitted in {timeout_s} s")
        return timeout_s

    async def opened(self, envoy, user, count, kind="events"):
        """Opens streams that stay open, and reads the heads of their responses."""
        streams = [await Client(self.streams).open(envoy, user, kind, 3_600_000) for _ in range(count)]
        statuses = [await stream.head() for stream in streams]
        expected = 101 if kind == "websocket" else 200
        self.check(statuses == [expected] * count, f"statuses {collections.Counter(statuses)} of {count} streams")
        return streams

    async def all_back(self, envoy, user, timeout_s):
        """Opens streams until as many as the limit are open; returns the seconds until the last rejection, and the
        streams: a slow machine takes long to open them, but none is rejected once all slots are back.
        """
        began, rejected, streams = time.time(), 0, []
        while len(streams) < self.limit and time.time() < began + timeout_s:
            stream = await Client(self.streams).open(envoy, user, "events", 3_600_000)
            if await stream.head() == 200:
                streams.append(stream)
            else:
                rejected = time.time() - began
                stream.leave()
                await asyncio.sleep(0.05)
        self.check(len(streams) == self.limit, f"only {len(streams)} of {self.limit} slots were back in {timeout_s} s")
        return rejected, streams

    async def idle(self, users=USERS):
        """Waits until no slot is in use; states how long that took."""
        began = time.time()
        while time.time() < began + IDLE_WITHIN_S:
            found = [await asyncio.to_thread(self.fleet.slots, user) for user in users]
            if all(slots and slots["slots"] == 0 for slots in found):
                break
            await asyncio.sleep(0.05)
        else:
            self.check(False, f"slots are left: {found}")
        self.facts.append(f"idle after {time.time() - began:.1f} s")

    async def mixed(self, seconds, events=None, clients=60):
        load = MixedLoad(self.fleet, self.streams, USERS, clients)
        await load.run(seconds, events)
        counts = load.statuses
        named = {200: "ok", 429: "rejected", -1: "cancelled", 503: "reset", 502: "not retried", 504: "denied",
                 0: "lost"}
        self.facts.append(", ".join(f"{name} {counts[status]}" for status, name in named.items()))
        others = {status: count for status, count in counts.items() if status not in named}
        self.check(not others, f"statuses {others}")
        self.facts.append(f"most at once {max(self.streams.most[user] for user in USERS)} of {self.limit}")
        self.check(counts[200] > 100 and counts[429] > 100, "too little load")

    def exact(self):
        self.check(not self.streams.broken, f"more than the limit {len(self.streams.broken)} times, first "
                                            f"{self.streams.broken[:3]}")
        counts = self.fleet.slot_counts()
        named = {"taken": "taken", "freed": "freed", "expired_seats": "expired", "early_releases": "released early"}
        self.facts.append("slots " + ", ".join(f"{text} {counts[name]}" for name, text in named.items()))

    def none_expired(self):
        expired = self.fleet.slot_counts()["expired_seats"]
        self.check(expired == 0, f"{expired} seats expired")

    async def full_afterwards(self):
        """As many streams as the limit can be open, and no more."""
        for user in USERS:
            streams = await self.opened(self.fleet.envoys[0], user, self.limit)
            status = await self.client.request(self.fleet.envoys[1], user)
            self.check(status == 429, f"status {status} with all slots in use")
            for stream in streams:
                stream.leave()


async def mixed(run):
    await run.mixed(run.options.seconds)
    await run.idle()
    run.exact()
    await run.full_afterwards()


async def replica_killed(run):
    async def events():
        for server in run.fleet.servers:
            await asyncio.sleep(5)
            server.kill(signal.SIGKILL)
            await asyncio.sleep(5)
            server.start(wait=False)
            await asyncio.to_thread(wait_for_port, server.grpc, server.process, "tollkeeper")
    await run.mixed(5, events())
    await run.idle()
    run.exact()
    await run.full_afterwards()


async def redis_frozen(run):
    async def events():
        for seconds in (0.3, 3):
            await asyncio.sleep(3)
            run.fleet.redis.pause()
            await asyncio.sleep(seconds)
            run.fleet.redis.resume()
    await run.mixed(6, events())
    await run.idle()
    run.exact()
    await run.full_afterwards()


async def redis_empty(run):
    async def events():
        await asyncio.sleep(5)
        # Until the streams of before are over, as many may be open again.
        run.streams.limit = 2 * run.limit
        await asyncio.to_thread(run.fleet.restart_redis)
        await asyncio.sleep(3)
        run.streams.limit = run.limit
    await run.mixed(10, events())
    await run.idle()
    run.exact()
    await run.full_afterwards()


async def limit_changed(run):
    async def is_loaded(limit):
        run.fleet.change_limit(limit)
        for server in range(2):
            while f"{limit} " not in str(await asyncio.to_thread(run.fleet.explain, "ann", server)):
                await asyncio.sleep(0.02)

    async def events():
        await asyncio.sleep(5)
        await is_loaded(4)
        # Streams that were admitted before may still be on their way.
        await asyncio.sleep(0.5)
        run.streams.limit = 4
        await asyncio.sleep(5)
        run.streams.limit = 15
        await is_loaded(15)
        run.limit = 15
    await run.mixed(5, events())
    await run.idle()
    run.exact()
    await run.full_afterwards()


async def freed(run):
    """The limit is 1: the next stream needs the slot of the one before."""
    waits, source = collections.defaultdict(list), iter(range(1000))
    for _ in range(100):
        for end in ("plain", "events", "reset", "cancelled"):
            user, (first, second) = f"freed-{next(source)}", run.fleet.envoys
            if end == "cancelled":
                stream = (await run.opened(first, user, 1))[0]
                stream.leave()
            else:
                await run.client.request(first, user, end, 5)
            waits[end].append(await run.admitted(second, user))
    for end, times in waits.items():
        times.sort()
        median, last = times[len(times) // 2], times[-1]
        run.facts.append(f"{end}: median {1000 * median:.1f} ms, most {1000 * last:.1f} ms")
        run.check(last < 0.1, f"a slot of a stream that was {end} was usable after {1000 * last:.0f} ms only")


def envoy_ends(how, timeout_s):
    async def scenario(run):
        doomed, other = run.fleet.envoys
        streams = await run.opened(doomed, "ann", run.limit)
        # Two health checks, each a sixth of the timeout: before the second one, slots stay until max_duration.
        await asyncio.sleep(timeout_s / 3 + 1)
        run.check(await run.client.request(other, "ann") == 429, "not all slots are in use")
        doomed.kill(how)
        for stream in streams:
            run.streams.leave("ann", stream.number)
        took, streams = await run.all_back(other, "ann", timeout_s + 30)
        run.facts.append(f"all {run.limit} slots back after {took:.1f} s, holder timeout {timeout_s} s")
        run.check(took < timeout_s + 5, f"they were back after {took:.1f} s")
        run.check(await run.client.request(other, "ann") == 429, "more than the limit")
        for stream in streams:
            stream.leave()
        await run.idle(["ann"])
        run.exact()
        # The next Envoy at this place is another holder.
        doomed.kill(signal.SIGKILL)
        doomed.start()
        await run.admitted(doomed, "ann")
    return scenario


async def drained(run):
    doomed, other = run.fleet.envoys
    streams = [await Client(run.streams).open(doomed, "ann", "events", 4000) for _ in range(run.limit)]
    run.check([await stream.head() for stream in streams] == [200] * run.limit, "not all were admitted")
    await asyncio.to_thread(doomed.post, "/drain_listeners?graceful")
    statuses = []
    for stream in streams:
        try:
            statuses.append(await read_to_end(stream))
        except (OSError, asyncio.IncompleteReadError):
            statuses.append(0)
    run.check(all(statuses), f"{statuses.count(0)} of {run.limit} streams were cut off")
    await asyncio.sleep(0.2)
    doomed.kill(signal.SIGTERM)
    took, streams = await run.all_back(other, "ann", 30)
    run.facts.append(f"all {run.limit} slots back after {took:.1f} s")
    for stream in streams:
        stream.leave()
    await run.idle(["ann"])
    run.exact()
    run.none_expired()


async def read_to_end(stream):
    """Reads the chunks of a response whose head was read; returns 1."""
    while int((await stream.reader.readuntil(b"\r\n")), 16):
        await stream.reader.readuntil(b"\r\n")
    return 1


def long_streams(seconds, kind):
    async def scenario(run):
        first, second = run.fleet.envoys
        half = run.limit // 2
        streams = await run.opened(first, "ann", half, kind) + await run.opened(second, "ann", half, kind)
        began, tried = time.time(), 0
        while time.time() < began + seconds:
            status = await run.client.request(first, "ann")
            run.check(status == 429, f"status {status} after {time.time() - began:.0f} s")
            tried += 1
            await asyncio.sleep(min(1, seconds / 20))
        run.check(all(not stream.reader.at_eof() for stream in streams), "a stream ended")
        run.facts.append(f"{len(streams)} streams of {seconds} s; {tried} others were rejected")
        for stream in streams:
            stream.leave()
        await run.idle(["ann"])
        run.exact()
        run.none_expired()
    return scenario


RUNS = {
    "mixed": (mixed, {}),
    "memory": (mixed, {"redis": False, "replicas": 1}),
    "replica": (replica_killed, {}),
    "redis-frozen": (redis_frozen, {}),
    "redis-empty": (redis_empty, {}),
    "lowered": (limit_changed, {}),
    "freed": (freed, {"limit": 1}),
    "killed": (envoy_ends(signal.SIGKILL, 5), {"limit": 50}),
    "killed-memory": (envoy_ends(signal.SIGKILL, 5), {"limit": 50, "redis": False, "replicas": 1}),
    "terminated": (envoy_ends(signal.SIGTERM, 5), {"limit": 50}),
    "drained": (drained, {"limit": 50}),
    "long": (long_streams(40, "events"), {"holder_timeout_s": 2}),
    "websocket": (long_streams(10, "websocket"), {"holder_timeout_s": 2}),
    "killed-default": (envoy_ends(signal.SIGKILL, 30), {"limit": 50, "holder_timeout_s": 30}),
    "long-default": (long_streams(600, "websocket"), {"limit": 20, "holder_timeout_s": 30, "max_duration": "1h"}),
}
ONLY_IF_ASKED_FOR = {"long-default"}


async def run_scenario(name, options, directory):
    scenario, changes = RUNS[name]
    run = Run(options, directory, **changes)
    began = time.time()
    try:
        await run.start()
        await scenario(run)
    finally:
        run.fleet.stop()
    print(f"{name:<16} {'BROKEN' if run.broken else 'held':<7} {time.time() - began:4.0f} s  {'; '.join(run.facts)}")
    for broken in run.broken:
        print(f"  broken: {broken}")
    sys.stdout.flush()
    return not run.broken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--only", default="", help="runs with this name; without it, all but the longest one")
    parser.add_argument("--seconds", type=int, default=30, help="length of the mixed load")
    parser.add_argument("--keep", help="directory for configurations and logs")
    options = parser.parse_args()
    if options.only == "list":
        print("\n".join([*RUNS, "million"]))
        return
    if options.only == "million":
        return measure_million(options.binary)
    names = options.only.split(",") if options.only else [name for name in RUNS if name not in ONLY_IF_ASKED_FOR]
    options.envoy = envoy_binary()
    held = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tollkeeper-concurrency.") as directory:
            if options.keep:
                directory = pathlib.Path(options.keep, name)
                directory.mkdir(parents=True, exist_ok=True)
            held &= asyncio.run(run_scenario(name, options, str(directory)))
    raise SystemExit(not held)


if __name__ == "__main__":
    main()
