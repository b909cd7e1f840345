"""A million slots at once: memory of tollkeeper and of Redis for each, and how long charges take meanwhile.

`tollkeeper-bench` asks for slots that no entries name, so that each call takes one of its own, and nothing frees it.
Then the limit is lowered to 1: each request looks for slots that are over, which takes a walk over all of its counter.
Calls to a fixed window in the same process show what others notice of it.
"""

import json
import pathlib
import re
import subprocess
import tempfile
import time
import urllib.request

from load_program import load_program
from quota_fleet import Redis, Tollkeeper

# Tables of slots get a quarter of it in the memory store.
MEMORY_BYTES = 2 << 30
PROBE_RATE, PROBE_S, FILL_S = 200, 10, 5


class Holding:
    """A tollkeeper whose slots are in its memory or in a Redis, with a limit of slots and one of a fixed window."""

    def __init__(self, binary, directory, redis):
        self.program, self.rules = load_program(), pathlib.Path(directory, "rules.yaml")
        self.write_rules(10_000_000)
        self.redis = Redis(directory) if redis else None
        settings = {"TOLLKEEPER_MEMORY_BYTES": str(MEMORY_BYTES), "TOLLKEEPER_RLQS": "false", "LOG_LEVEL": "error",
                    "TOLLKEEPER_STORE_TIMEOUT": "10s"}
        self.server = Tollkeeper(binary, directory, "tollkeeper", self.rules, self.redis, settings)

    def write_rules(self, seats):
        new = self.rules.with_suffix(".new")
        new.write_text(f"domain: million\ndescriptors:\n- {{key: user, rate_limit: {{concurrent: {seats}, "
                       "max_duration: 1h, on_store_error: error}}\n"
                       "- {key: window, rate_limit: {unit: hour, requests_per_unit: 4000000000}}\n")
        new.rename(self.rules)

    def page(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.debug}{path}", timeout=10) as answer:
            return json.load(answer)

    def taken(self):
        return sum(rule["slots"]["taken"] for rule in self.page("/rules")["rules"] if rule.get("slots"))

    def memory(self):
        """Resident bytes of tollkeeper, and the bytes that Redis says it uses."""
        status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        resident = 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1))
        if not self.redis:
            return resident, 0
        info = subprocess.run(["redis-cli", "-p", str(self.redis.port), "info", "memory"], capture_output=True,
                              text=True, check=True).stdout
        return resident, int(re.search(r"used_memory:(\d+)", info).group(1))

    def load(self, key, counters, seconds, *rate):
        """Latencies of calls in microseconds; with a rate they are sent when they are due."""
        ran = subprocess.run(
            [self.program, "--addr", f"127.0.0.1:{self.server.grpc}", "--domain", "million", "--descriptor",
             key + "={key}", "--keys", f"uniform:{counters}", "--duration", f"{seconds}s", "--warm-up", "0", "--json",
             "--timeout", "20s", *rate], capture_output=True, text=True, check=False)
        # Some calls without an answer are no reason to stop: the machine may be slow.
        if ran.returncode and "latency_us" not in ran.stdout:
            raise SystemExit(f"bench: {ran.stderr} {ran.stdout}")
        return json.loads(ran.stdout)["latency_us"]

    def probe(self, counters):
        """Calls for slots and to the fixed window, one after the other."""
        rate = ("--rate", str(PROBE_RATE))
        return {key: self.load(key, counters, PROBE_S, *rate) for key in ("user", "window")}

    def fill(self, counters, slots):
        """Takes slots until so many are held; returns their number."""
        while (held := self.taken()) < slots:
            self.load("user", counters, FILL_S)
        return held

    @staticmethod
    def print_probe(when, latencies):
        for key, name in (("user", "slot"), ("window", "fixed window")):
            print(f"  {when}, {name}: {text_of(latencies[key])}", flush=True)

    def stop(self):
        for one in (self.server, self.redis):
            if one:
                one.kill(9)


def text_of(latency):
    return "p50 {:.2f}, p99 {:.2f}, max {:.1f} ms".format(*(latency[name] / 1000 for name in ("p50", "p99", "max")))


def measure_holding(binary, directory, redis, counters, slots):
    holding = Holding(binary, directory, redis)
    try:
        store = "Redis" if redis else "memory"
        label = f"{store}, {counters} counters"
        before = holding.probe(counters)
        resident, used = holding.memory()
        already, began = holding.taken(), time.time()
        held = holding.fill(counters, slots)
        resident_after, used_after = holding.memory()
        each = (resident_after - resident) / (held - already)
        print(f"{label}: {held} slots in {time.time() - began:.0f} s; tollkeeper {resident / 2**20:.0f} MiB before, "
              f"{resident_after / 2**20:.0f} MiB after, {each:.0f} bytes a slot", end="")
        if redis:
            print(f"; Redis {used / 2**20:.0f}, {used_after / 2**20:.0f} MiB, "
                  f"{(used_after - used) / (held - already):.0f} bytes a slot", end="")
        print()
        holding.print_probe("few slots", before)
        holding.print_probe("a million, with room", holding.probe(counters))
        holding.write_rules(1)
        # Until the rules are loaded.
        time.sleep(3)
        holding.print_probe("a million, full", holding.probe(counters))
    finally:
        holding.stop()


def measure_million(binary, slots=1_000_000):
    for redis in (False, True):
        for counters in (1, 1000, 100_000):
            with tempfile.TemporaryDirectory(prefix="tollkeeper-million.") as directory:
                measure_holding(binary, directory, redis, counters, slots)
