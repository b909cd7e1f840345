#!/usr/bin/env python3
"""Rate limit quotas through real Envoys: is a limit's bound kept, and how much of the limit is used.

Usage: tests/bench/quota.py BINARY [MODE] [--only NAME] [--seconds N] [--jobs N] [--json]

BINARY is a tollkeeper. Modes:
  patterns  (default) three Envoys, four patterns of demand, with counters in memory and in Redis, for --seconds (130)
  faults    servers, Envoys and links that end, freeze and return; rules that change; RLS beside RLQS
  cost      CPU of Envoy and tollkeeper for 100 000 requests with RLS and with RLQS (needs h2load of nghttp2)
  scale     1000 streams, 20 000 buckets on one stream, hostile streams (needs a release build to be meaningful)
  list      prints the names of the runs

Prints a row for each key and run. `use` is what was admitted, in percent of what one limiter with the rule's algorithm
admits of the same requests. Ends with status 1 if a bound broke, for a limit of N in a period P:
  any algorithm   2 N in any span of P; 2 N + N t / P in any span of t
  token_bucket    N + N t / P in any span of t
  fixed_window    N in each aligned window, where hits are lent (periods of 20 s or more); rates may admit 2 N
Before its first assignment a bucket is denied, so nothing is subtracted; the run `first` allows such requests instead,
and subtracts what each proxy admits in the first 250 ms of a bucket.

A BINARY named *.py is run by Python. A server that assigns the whole limit to every proxy must be reported as broken:
in `patterns`, every row. That is the test of this bench.

Needs Envoy (envoy/install.sh), redis-server, and for `scale` and the run `together` grpcio, which it installs into a
virtual environment below ${XDG_CACHE_HOME:-~/.cache}/tollkeeper. Uses loopback only and ends only its own processes.
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from quota_fleet import Fleet, ROOT, envoy_binary
from quota_judge import judge
from quota_load import Load
from quota_runs import FAULTS, PATTERN_RUNS, rules


class Run:
    """A run of a scenario, while it goes on."""

    def __init__(self, scenario, options, directory):
        self.scenario, self.options = scenario, options
        self.seconds = scenario.seconds or options.seconds
        self.keys = scenario.keys()
        self.fleet = Fleet(options, directory, rules(), **scenario.fleet)
        self.load = Load(self.fleet, [key.source for key in self.keys])
        self.facts = []

    async def at(self, elapsed):
        """Waits until this many seconds of the run are over; returns the time."""
        await asyncio.sleep(max(0, elapsed - self.load.elapsed()))
        return self.load.began + elapsed

    def answers(self, key, proxies=None):
        return [answer for answer in self.load.answers
                if answer.key == key.name and (proxies is None or answer.proxy in proxies)]

    def add_fact(self, key, text, value, unit):
        self.facts.append({"run": self.scenario.name, "key": key.name, "fact": text, "value": value, "unit": unit})

    async def drive(self):
        self.load.began = time.time()
        events = asyncio.get_running_loop().create_task(self.scenario.events(self))
        # Opens what the load needs.
        await asyncio.sleep(0)
        await self.load.run(self.seconds)
        # By now all events are over, unless they failed.
        await asyncio.wait_for(events, 10)

    def rows(self):
        if self.scenario.judge:
            rows = self.scenario.judge(self)
        else:
            rows = [judge(key.name, self.answers(key), key.limit) for key in self.keys]
        for row in rows:
            row["run"] = self.scenario.name
        return rows


def run_scenario(scenario, options):
    with tempfile.TemporaryDirectory(prefix="tollkeeper-quota.") as directory:
        directory = options.keep or directory
        run = Run(scenario, options, directory)
        try:
            asyncio.run(run.drive())
            streams = run.fleet.streams()
            if scenario.facts:
                scenario.facts(run)
            rows = run.rows()
        finally:
            run.fleet.stop()
        if options.keep:
            with open(pathlib.Path(directory, f"{scenario.name}.csv"), "w") as file:
                file.writelines(",".join(map(str, answer)) + "\n" for answer in run.load.answers)
        lost = sum(answer.admitted is None for answer in run.load.answers)
        return {"rows": rows, "facts": run.facts, "left_out": run.load.left_out, "lost": lost,
                "streams": streams}


HEADINGS = ["run", "key", "limit", "requests", "admitted", "ideal", "use %", "in window", "in span", "bound"]
WIDTHS = [-16, -34, 9, 9, 9, 8, 7, 10, 8, -5]


def line(cells):
    return " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS))


def print_result(result):
    for row in result["rows"]:
        limit = f"{row['limit']}/{row['period_s']}s"
        bound = f"BROKEN: {row['broken']}" if row["broken"] else "held"
        print(line([row["run"], row["key"], limit, row["requests"], row["admitted"], row["ideal"], row["use"] or "-",
                    row["most_in_window"], row["most_in_span"], bound]))
    for fact in result["facts"]:
        print(f"  {fact['run']} {fact['key']}: {fact['fact']}: {fact['value']} {fact['unit']}")
    for number, counts in enumerate(result["streams"]):
        print(f"  Envoy {number}:", ", ".join(f"{name} {count}" for name, count in counts.items()))
    if result["left_out"] or result["lost"]:
        print(f"  requests not sent, because this machine was late: {result['left_out']}; "
              f"without an answer: {result['lost']}")
    sys.stdout.flush()


def run_child(scenario, options):
    """The result of a scenario in a process of its own."""
    arguments = [sys.executable, __file__, options.binary, "run", "--only", scenario.name, "--json", "--seconds",
                 str(options.seconds)]
    child = subprocess.run(arguments, stdout=subprocess.PIPE, text=True)
    if not child.stdout:
        raise SystemExit(f"{scenario.name} failed")
    return json.loads(child.stdout)[0]


def run_all(scenarios, options):
    if options.jobs > 1:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            yield from pool.map(lambda scenario: run_child(scenario, options), scenarios)
    else:
        for scenario in scenarios:
            yield run_scenario(scenario, options)


def with_grpc(options):
    """Runs this program again with a Python that has grpcio, if this one has not."""
    # Processes are started by fork, before which gRPC would stop its threads: a second run failed for that.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        import grpc  # noqa: F401
    except ImportError:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        venv = pathlib.Path(cache, "tollkeeper", "grpcio")
        python = venv / "bin/python"
        requirements = ROOT / "tests/clients/python/requirements.txt"
        if subprocess.run([python, "-c", "import grpc"], capture_output=True).returncode if python.exists() else True:
            subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
        os.execv(python, [str(python), __file__, *sys.argv[1:]])


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("mode", nargs="?", default="patterns",
                        choices=["patterns", "faults", "all", "run", "cost", "scale", "list"])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--seconds", type=int, default=130, help="length of a run of patterns, cost and scale")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more need more cores")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", help="directory for configurations, logs and all answers (NAME.csv)")
    options = parser.parse_args()
    options.envoy = ""
    return options


def main():
    options = read_options()
    scenarios = {"patterns": PATTERN_RUNS, "faults": FAULTS}.get(options.mode, PATTERN_RUNS + FAULTS)
    exact = options.mode == "run"
    scenarios = [one for one in scenarios if (one.name == options.only if exact else options.only in one.name)]
    if options.mode == "list":
        print("\n".join(scenario.name for scenario in PATTERN_RUNS + FAULTS))
        return
    if options.mode == "scale" or any(scenario.needs_grpc for scenario in scenarios):
        with_grpc(options)
    options.envoy = envoy_binary()
    if options.mode in ("cost", "scale"):
        import quota_cost
        import quota_scale
        raise SystemExit({"cost": quota_cost, "scale": quota_scale}[options.mode].measure(options))
    if not scenarios:
        raise SystemExit(f"no run is named {options.only}")
    if not options.json:
        print(line(HEADINGS))
    results = []
    for result in run_all(scenarios, options):
        results.append(result)
        if not options.json:
            print_result(result)
    if options.json:
        print(json.dumps(results))
    raise SystemExit(any(row["broken"] for result in results for row in result["rows"]))


if __name__ == "__main__":
    main()
