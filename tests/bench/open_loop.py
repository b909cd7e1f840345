#!/usr/bin/env python3
"""Latency under a load that does not wait: percentiles at fixed rates, and an hour of it.

Usage: tests/bench/open_loop.py BINARY [--peer PATH] [--rates 20000,60000] [--rules 1,16] [--seconds N] [--only NAME]
       tests/bench/open_loop.py BINARY --soak 3600 [--rates 2000]

BINARY is a tollkeeper in a release build; `tollkeeper-bench --rate` makes the load (load/README.md). PATH is a build of
envoyproxy/ratelimit (`go install github.com/envoyproxy/ratelimit/src/service_cmd@latest`), which gets the same load in
the same run. Calls are sent when they are due, on 4 connections; a call is late from its due time on. Keys are
zipf:1000000:1.1, with a prefix of the run, so all counters are new; a soak has limits per minute and no prefix, so that
counters come and go. With N rules a call has one descriptor, of N keys at random, so each rule gets its part.

Stores: memory, strict and eventual (both with one Redis on this machine), peer (strict). Load, server and Redis share
the cores, so the figures say what one machine does with all of them; `cores` are those of the server alone.

With --soak every store runs for so many seconds, all at once; a row for each tenth has resident memory and errors. Ends
with 1 if calls got no answer in a soak, or if memory of the last half still grows by more than a tenth.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from load_program import load_program
from quota_fleet import PORTS, wait_for_port
from region_fleet import start_process

STORES = ["memory", "strict", "eventual", "peer"]


def rule_file(options, rules, store):
    """Rules on keys k0, k1, ...; the file works with both programs unless it is eventual."""
    eventual = ", algorithm: token_bucket, consistency: eventual" if store == "eventual" else ""
    unit = "minute" if options.soak else "hour"
    lines = ["domain: bench", "descriptors:"]
    for rule in range(rules):
        lines += [f"  - key: k{rule}", f"    rate_limit: {{unit: {unit}, requests_per_unit: 100000{eventual}}}"]
    return "\n".join(lines) + "\n"


class Server:
    """A server of one store, with a Redis if the store needs one."""

    def __init__(self, options, directory, store, rules):
        self.store, self.grpc_port = store, next(PORTS)
        place = pathlib.Path(directory, f"{store}-{rules}-{self.grpc_port}")
        config = place / "ratelimit/config"
        config.mkdir(parents=True)
        (config / "rules.yaml").write_text(rule_file(options, rules, store))
        log = open(place / "log", "w")
        env = {"GRPC_PORT": str(self.grpc_port), "PORT": str(next(PORTS)), "DEBUG_PORT": str(next(PORTS)),
               "GRPC_HOST": "127.0.0.1", "HOST": "127.0.0.1", "DEBUG_HOST": "127.0.0.1", "LOG_LEVEL": "error"}
        self.redis = None
        if store != "memory":
            port = next(PORTS)
            self.redis = start_process(["redis-server", "--port", str(port), "--save", "", "--dir", str(place)],
                                       os.environ, log)
            wait_for_port(port, self.redis, "redis-server")
            env |= {"REDIS_SOCKET_TYPE": "tcp", "REDIS_URL": f"127.0.0.1:{port}"}
        if store == "peer":
            env |= {"RUNTIME_ROOT": str(place), "RUNTIME_SUBDIRECTORY": "ratelimit", "RUNTIME_WATCH_ROOT": "false",
                    "USE_STATSD": "false", "RUNTIME_IGNOREDOTFILES": "true"}
            command = [options.peer]
        else:
            command = [options.binary, "serve", "--config", str(config)]
        self.process = start_process(command, env, log)
        wait_for_port(self.grpc_port, self.process, store)

    def start_load(self, options, rules, rate, seconds, output):
        """Starts a load of one descriptor a call, spread over the rules."""
        value = "{key}" if options.soak else "{run}{key}"
        mix = [{"weight": 1, "request": {"domain": "bench", "descriptors": [
            {"entries": [{"key": f"k{rule}", "value": value}]}]}} for rule in range(rules)]
        requests = pathlib.Path(output.name + ".request.json")
        requests.write_text(json.dumps(mix))
        command = [load_program(), "--addr", f"127.0.0.1:{self.grpc_port}", "--request", str(requests),
                   "--keys", "zipf:1000000:1.1", "--rate", str(rate), "--duration", f"{seconds}s", "--json",
                   "--pid", str(self.process.pid)]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)

    def measure(self, options, rules, rate, seconds):
        with tempfile.NamedTemporaryFile("w+") as output:
            self.start_load(options, rules, rate, seconds, output).wait()
            text = pathlib.Path(output.name).read_text()
            return json.loads(text) if text.startswith("{") else None

    def resident_mib(self):
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self):
        for process in filter(None, [self.process, self.redis]):
            process.kill()
            process.wait()


def table(options, directory):
    print("| store | rules | calls a second | answered | p50 ms | p99 ms | p99.9 ms | later than 20 ms | errors | "
          "us a call | cores | MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for rules in options.rules:
        for rate in options.rates:
            for store in options.stores:
                server = Server(options, directory, store, rules)
                result = server.measure(options, rules, rate, options.seconds)
                if result is None:
                    print(f"| {store} | {rules} | {rate} | no result: the machine cannot serve that rate |", flush=True)
                    server.stop()
                    continue
                latency, process = result["latency_us"], result["server"]
                times = [f"{latency[name] / 1000:.2f}" for name in ["p50", "p99", "p99_9"]]
                print("|", " | ".join([
                    store, str(rules), str(rate), f"{result['answers_per_second']:.0f}", *times,
                    str(result["later_than_20_ms"]), str(sum(result["errors"].values())),
                    f"{process['cpu_us_per_answer']:.1f}", f"{process['cores']:.2f}",
                    f"{process['resident_bytes'] / 2**20:.0f}"]), "|", flush=True)
                server.stop()


def soak(options, directory):
    """Runs all stores at once; true if memory stays and every call got an answer."""
    parts, is_good = 10, True
    servers = [Server(options, directory, store, 16) for store in options.stores]
    rate, grown = options.rates[0], {server.store: [] for server in servers}
    print("| part | store | calls | errors | p99 ms | later than 20 ms | MiB |\n|---|---|---|---|---|---|---|")
    for part in range(parts):
        running = []
        for server in servers:
            output = open(pathlib.Path(directory, f"{server.store}-{part}.json"), "w+")
            running.append((server, output, server.start_load(options, 16, rate, options.soak // parts, output)))
        for server, output, load in running:
            load.wait()
            result = json.loads(pathlib.Path(output.name).read_text())
            errors = sum(result["errors"].values())
            grown[server.store].append(server.resident_mib())
            is_good &= errors == 0 or server.store == "peer"
            print("|", " | ".join([
                str(part + 1), server.store, str(result["answers"]), str(errors),
                f"{result['latency_us']['p99'] / 1000:.2f}", str(result["later_than_20_ms"]),
                f"{grown[server.store][-1]:.1f}"]), "|", flush=True)
    for store, sizes in grown.items():
        is_steady = sizes[-1] <= 1.1 * sizes[parts // 2]
        is_good &= is_steady or store == "peer"
        print(f"{store}: {sizes[0]:.1f} MiB after the first part, {sizes[-1]:.1f} at the end")
    return is_good


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--peer")
    parser.add_argument("--rates", type=numbers, default=[20_000, 60_000])
    parser.add_argument("--rules", type=numbers, default=[1, 16])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--soak", type=int, help="seconds")
    parser.add_argument("--only", choices=STORES)
    options = parser.parse_args()
    options.stores = [store for store in STORES if (store != "peer" or options.peer) and options.only in (None, store)]
    if not options.stores:
        parser.error("--only peer needs --peer PATH")
    with tempfile.TemporaryDirectory() as directory:
        if options.soak:
            return 0 if soak(options, directory) else 1
        table(options, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
