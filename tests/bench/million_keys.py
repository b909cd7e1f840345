#!/usr/bin/env python3
"""Cost of a million keys of global limits in one region: calls to the global Redis, CPU and memory of both Redis.

Usage: tests/bench/million_keys.py PATH-OF-TOLLKEEPER [SECONDS]

One region of three, with real processes. Each scenario has a line for each period of 60 s:

- `million`: each key has one charge in the period, of half of the region's reserve, so that each asks for a grant.
- `repeated`: a sixth of the keys, with 6 charges each at random times.
- `limit`: 100 keys of each algorithm at 1.3 times their limit.
- `saturated`: as `million`, while the global Redis runs for a tenth of the time.

Asserts nothing.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from load_program import load_program

BINARY = sys.argv[1]
LOAD = load_program()
SECONDS = int(sys.argv[2]) if len(sys.argv) > 2 else 60
RATE = int(os.environ.get("RATE", "17000"))
LIMIT, HITS, LIMITED_KEYS = 1200, 20, 100
ALGORITHMS = os.environ.get("ALGORITHMS", "fixed_window sliding_window_counter token_bucket").split()
SCENARIOS = os.environ.get("SCENARIOS", "million repeated limit saturated").split()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_s(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Redis:
    def __init__(self):
        self.port = free_port()
        self.process = subprocess.Popen(["redis-server", "--port", str(self.port), "--save", "", "--appendonly", "no"],
                                        stdout=subprocess.DEVNULL)

    def command(self, *words):
        return subprocess.run(["redis-cli", "-p", str(self.port), *words], capture_output=True, text=True,
                              check=True).stdout

    def memory(self):
        used = next(line for line in self.command("info", "memory").splitlines() if line.startswith("used_memory:"))
        return f"{int(used.split(':')[1]) / 2**20:.0f} MiB in {int(self.command('dbsize'))} keys"


class Region:
    """A replica of the region eu, its Redis and the global Redis."""

    def __init__(self, directory):
        self.local, self.distant = Redis(), Redis()
        rules = pathlib.Path(directory, "rules.yaml")
        rules.write_text("domain: shop\ndescriptors:\n" + "".join(
            f"- {{key: {algorithm}, rate_limit: {{unit: minute, requests_per_unit: {LIMIT}, algorithm: {algorithm}, "
            "scope: global, on_store_error: deny}}\n" for algorithm in ALGORITHMS))
        self.grpc, self.debug = free_port(), free_port()
        env = {
            "PATH": os.environ["PATH"], "BACKEND_TYPE": "redis", "REDIS_URL": f"127.0.0.1:{self.local.port}",
            "TOLLKEEPER_REGION": "eu", "TOLLKEEPER_REGIONS": "eu,us,ap",
            "TOLLKEEPER_GLOBAL_REDIS_URL": f"127.0.0.1:{self.distant.port}", "TOLLKEEPER_STORE_TIMEOUT": "100ms",
            "LOG_LEVEL": "error", "USE_STATSD": "false",
            "GRPC_PORT": str(self.grpc), "PORT": str(free_port()), "DEBUG_PORT": str(self.debug),
        }
        self.server = subprocess.Popen([BINARY, "serve", "--config", str(rules)], env=env, stdout=subprocess.DEVNULL)
        time.sleep(4)

    def stop(self):
        for process in (self.server, self.local.process, self.distant.process):
            process.terminate()
            process.wait()

    def grants(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.debug}/store") as answer:
            return json.load(answer)["regions"]["grants"]

    def cpu(self):
        return {"global Redis": cpu_s(self.distant.process), "region's Redis": cpu_s(self.local.process),
                "tollkeeper": cpu_s(self.server)}

    def load(self, algorithm, *arguments, rate=RATE):
        command = [LOAD, "--addr", f"127.0.0.1:{self.grpc}", "--domain", "shop", "--rate", str(rate),
                   "--duration", f"{SECONDS}s", "--warm-up", "0", "--json", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def measure(self, label, loads, keys):
        """Prints what the loads cost; `keys` is the number of keys that they charge."""
        grants, cpu, began = self.grants(), self.cpu(), time.time()
        runs = [self.load(*arguments, **options) for arguments, options in loads]
        results = [json.loads(run.communicate()[0]) for run in runs]
        elapsed, after = time.time() - began, self.grants()
        used = ", ".join(f"{name} {100 * (seconds - cpu[name]) / elapsed:.0f} %" for name, seconds in self.cpu().items())
        counts = {name: after[name] - grants[name] for name in ("requested", "failed", "dropped", "granted_hits",
                                                                "wasted_hits", "returned_hits")}
        verdicts = {name: sum(result["verdicts"][name] for result in results) for name in results[0]["verdicts"]}
        p99 = max(result["latency_us"]["p99"] for result in results)
        errors = [result["errors"] for result in results if result["errors"]]
        print(f"{label}: {counts['requested'] / keys:.2f} requests a key in {elapsed:.0f} s; {json.dumps(counts)}; "
              f"CPU {used}; global {self.distant.memory()}, region {self.local.memory()}; p99 {p99 / 1000:.1f} ms; "
              f"{json.dumps(verdicts)} {errors or ''}", flush=True)

    def measure_million(self, algorithm, label, periods):
        loads = [((algorithm, "--descriptor", algorithm + "={n}", "--hits", str(HITS)), {})]
        for period in range(periods):
            self.measure(f"{label} {algorithm} {period}", loads, RATE * SECONDS)

    def measure_repeated(self, algorithm):
        keys = RATE * SECONDS // 6
        loads = [((algorithm, "--descriptor", algorithm + "=r{key}", "--keys", f"uniform:{keys}", "--hits", str(HITS)),
                  {})]
        for period in range(2):
            self.measure(f"repeated {algorithm} {period}", loads, keys)

    def measure_limit(self, algorithm):
        loads = [((algorithm, "--descriptor", algorithm + "=l{key}", "--keys", f"uniform:{LIMITED_KEYS}"),
                  {"rate": LIMITED_KEYS * LIMIT * 13 // 600})]
        self.measure(f"limit {algorithm}", loads, LIMITED_KEYS)


class Saturation:
    """Lets a process run for a tenth of the time, until it is closed."""

    def __init__(self, process):
        self.process, self.ends = process, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.ends.is_set():
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(0.045)
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.005)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()


def run(region, scenario, algorithm):
    if scenario == "million":
        region.measure_million(algorithm, "million", 2)
    elif scenario == "repeated":
        region.measure_repeated(algorithm)
    elif scenario == "limit":
        region.measure_limit(algorithm)
    else:
        with Saturation(region.distant.process):
            region.measure_million(algorithm, "saturated", 1)


def main():
    for scenario in SCENARIOS:
        for algorithm in ALGORITHMS:
            with tempfile.TemporaryDirectory() as directory:
                region = Region(directory)
                try:
                    run(region, scenario, algorithm)
                finally:
                    region.stop()


main()
