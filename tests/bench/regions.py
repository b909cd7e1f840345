#!/usr/bin/env python3
"""Global limits over three regions in real processes: what they admit of the limit, and what that costs.

Usage: tests/bench/regions.py PATH-OF-TOLLKEEPER [PERIODS]

Each region has a redis-server and two replicas. The links to the global redis-server are delayed by a proxy, and broken
for a while in the last scenario. Prints one row for each algorithm, demand and delay: hits admitted in each period
and the most in any span of one, in percent of the limit. Asserts nothing.
"""

import asyncio
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from delayed_link import Link, free_port

BINARY = sys.argv[1]
PERIODS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
REGIONS = ["eu", "us", "ap"]
LIMIT = int(os.environ.get("LIMIT", "1200"))
PERIOD_S = int(os.environ.get("PERIOD_S", "60"))
ALGORITHMS = os.environ.get("ALGORITHMS", "fixed_window sliding_window_counter token_bucket").split()
DELAYS = [int(delay) for delay in os.environ.get("DELAYS_MS", "50 150 300").split()]
CONSISTENCY = os.environ.get("CONSISTENCY", "strict")
DEMANDS = os.environ.get("DEMANDS", "one even uneven moving cut").split()


class Replica:
    def __init__(self, region, redis_port, link, rules, http_port):
        env = {
            "PATH": os.environ["PATH"], "BACKEND_TYPE": "redis", "REDIS_URL": f"127.0.0.1:{redis_port}",
            "TOLLKEEPER_REGION": region, "TOLLKEEPER_REGIONS": ",".join(REGIONS),
            "TOLLKEEPER_GLOBAL_REDIS_URL": f"127.0.0.1:{link.port}", "TOLLKEEPER_STORE_TIMEOUT": "100ms", "LOG_LEVEL": "warn", "USE_STATSD": "false",
            "GRPC_PORT": str(free_port()), "PORT": str(http_port), "DEBUG_PORT": str(free_port()),
        }
        self.debug = env["DEBUG_PORT"]
        self.http = http_port
        self.process = subprocess.Popen([BINARY, "serve", "--config", rules], env=env, stdout=subprocess.DEVNULL,
                                        stderr=open(os.environ.get("LOG", os.devnull), "a"))

    def store(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.debug}/store") as answer:
            return json.load(answer)


def redis(args=()):
    port = free_port()
    process = subprocess.Popen(["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", *args],
                               stdout=subprocess.DEVNULL)
    return process, port


class Fleet:
    def __init__(self, directory):
        self.processes = []
        process, self.global_port = redis()
        self.processes.append(process)
        rules = pathlib.Path(directory, "rules.yaml")
        lines = ["domain: shop", "descriptors:"]
        for algorithm in ALGORITHMS:
            lines.append(f"- {{key: {algorithm}, rate_limit: {{unit: second, unit_multiplier: {PERIOD_S}, "
                         f"requests_per_unit: {LIMIT}, algorithm: {algorithm}, scope: global, "
                         f"consistency: {CONSISTENCY}, on_store_error: deny}}}}")
        rules.write_text("\n".join(lines) + "\n")
        self.links, self.replicas = {}, {}
        for region in REGIONS:
            process, port = redis()
            self.processes.append(process)
            self.links[region] = Link(self.global_port)
            self.replicas[region] = [Replica(region, port, self.links[region], str(rules), free_port())
                                     for _ in range(2)]
            self.processes += [replica.process for replica in self.replicas[region]]
        time.sleep(4)

    def requests(self):
        stores = [replica.store() for replicas in self.replicas.values() for replica in replicas]
        return sum(store["regions"]["grants"]["requested"] for store in stores)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait()


async def ask(connection, key, value):
    reader, writer = connection
    body = json.dumps({"domain": "shop", "descriptors": [{"entries": [{"key": key, "value": value}]}]}).encode()
    writer.write(b"POST /json HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
                 + str(len(body)).encode() + b"\r\n\r\n" + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                   if line.startswith(b"content-length")), 0)
    await reader.readexactly(length)
    status = int(head.split()[1])
    if status not in (200, 429):
        raise SystemExit(f"status {status}: {head}")
    return status == 200


async def drive(fleet, key, value, shares, seconds, outcomes):
    """Sends 1.3 times the limit, divided by `shares(elapsed)`, for some seconds, at random times."""
    rate = 1.3 * LIMIT / PERIOD_S
    connections = {replica: await asyncio.open_connection("127.0.0.1", replica.http)
                   for replicas in fleet.replicas.values() for replica in replicas}
    began, debt, turn = time.time(), {region: 0.0 for region in REGIONS}, 0
    due = {region: random.expovariate(1) for region in REGIONS}
    last = began
    while (now := time.time()) - began < seconds:
        parts = shares(now - began)
        for region, part in zip(REGIONS, parts):
            debt[region] += rate * part * (now - last)
            while debt[region] >= due[region]:
                debt[region] -= due[region]
                due[region] = random.expovariate(1)
                turn += 1
                replica = fleet.replicas[region][turn % 2]
                try:
                    admitted = await ask(connections[replica], key, value)
                except (asyncio.IncompleteReadError, ConnectionError):
                    # An idle connection is closed after a minute.
                    connections[replica] = await asyncio.open_connection("127.0.0.1", replica.http)
                    admitted = await ask(connections[replica], key, value)
                outcomes.append((time.time(), region, admitted))
        last = now
        await asyncio.sleep(0.005)


DEMAND = {
    "one": lambda elapsed: (1, 0, 0),
    "even": lambda elapsed: (1 / 3, 1 / 3, 1 / 3),
    "uneven": lambda elapsed: (0.8, 0.15, 0.05),
    "moving": lambda elapsed: [(0.9, 0.05, 0.05), (0.05, 0.9, 0.05), (0.05, 0.05, 0.9)][int(elapsed / 20) % 3],
    "cut": lambda elapsed: (0.6, 0.4, 0),
}


def report(label, outcomes, began):
    periods = []
    for period in range(PERIODS):
        start = began + period * PERIOD_S
        admitted = sum(1 for at, _, ok in outcomes if ok and start <= at < start + PERIOD_S)
        periods.append(100 * admitted / LIMIT)
    times = sorted(at for at, _, ok in outcomes if ok)
    first, most = 0, 0
    for last, at in enumerate(times):
        while times[first] < at - PERIOD_S:
            first += 1
        most = max(most, last - first + 1)
    figures = " ".join(f"{part:6.1f}" for part in periods)
    print(f"{label} {figures}  most in a span {100 * most / LIMIT:6.1f}", flush=True)


async def drive_all(fleet, runs):
    await asyncio.gather(*(drive(fleet, *run) for run in runs))


def measure(fleet, demands, delay):
    for link in fleet.links.values():
        link.delay = delay / 2000
    time.sleep(3)
    # Whole periods, from the start of one on.
    time.sleep(PERIOD_S - time.time() % PERIOD_S)
    before, began = fleet.requests(), time.time()
    if demands == ["cut"]:
        threading.Timer(PERIOD_S, fleet.links["eu"].set_cut, [True]).start()
        threading.Timer(2 * PERIOD_S, fleet.links["eu"].set_cut, [False]).start()
    runs = [(algorithm, f"{demand}-{delay}-{began:.0f}", DEMAND[demand], PERIODS * PERIOD_S - 0.05, [])
            for algorithm in ALGORITHMS for demand in demands]
    asyncio.run(drive_all(fleet, runs))
    labels = [f"{algorithm:24} {demand:8} {delay:4} ms" for algorithm in ALGORITHMS for demand in demands]
    for label, run in zip(labels, runs):
        report(label, run[-1], began)
    decisions = sum(len(run[-1]) for run in runs)
    print(f"{'':24} all {delay:9} ms {1000 * (fleet.requests() - before) / decisions:6.1f} grant requests "
          "for each 1000 decisions", flush=True)


def main():
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(directory)
        try:
            if os.environ.get("SHOW_STORE"):
                print(json.dumps(fleet.replicas["eu"][0].store(), indent=1))
            print("admitted in percent of the limit, period by period, at 1.3 times the limit")
            for delay in DELAYS:
                measure(fleet, [demand for demand in DEMANDS if demand != "cut"], delay)
            if "cut" in DEMANDS:
                measure(fleet, ["cut"], DELAYS[0])
        finally:
            fleet.stop()


main()
