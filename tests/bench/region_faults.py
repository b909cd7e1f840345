#!/usr/bin/env python3
"""Global limits over three regions of real processes, while faults happen: whether their promise is ever broken.

Usage: tests/bench/region_faults.py BINARY [--runs N] [--seed S] [--jobs J] [--schedule NAME ...]

Runs random schedules of faults from seeds S to S + N - 1, or the named ones (`all`: each; `list` shows them). Prints a
row for each run and algorithm: the most admitted in any span of a period, and in any window of global time (windows) or
beyond the bucket in any span (token_bucket), each of what is promised; the notices that /store showed; the faults with
their seconds. The promise is in docs/regions.md; each time that a Redis loses its data or its clock jumps adds one limit.
Exits with 1 if a run broke it. Needs redis-server and libfaketime.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from region_fleet import ALGORITHMS, REGIONS, Fleet, end_with_parent
from region_promise import Admitted, Hit
from region_schedules import AIMED, random_schedule

START_S = 60
# Requests that wait for a replica at once; more are not sent.
MAX_BUSY = 32


class Connections:
    """Connections to one replica."""

    def __init__(self, port):
        self.port, self.idle, self.busy = port, [], 0

    async def ask(self, body):
        """Returns the status of the answer; raises OSError or EOFError if there is none."""
        if self.busy >= MAX_BUSY:
            raise OSError("the replica is too slow")
        self.busy += 1
        try:
            async with asyncio.timeout(5):
                return await self._ask(body)
        except (OSError, EOFError):
            while self.idle:
                self.idle.pop()[1].close()
            raise
        finally:
            self.busy -= 1

    async def _ask(self, body):
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"POST /json HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
                         + str(len(body)).encode() + b"\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                           if line.startswith(b"content-length")), 0)
            await reader.readexactly(length)
        except BaseException:
            writer.close()
            raise
        self.idle.append((reader, writer))
        return int(head.split()[1])


class Run:
    def __init__(self, options, schedule, rng, directory):
        self.schedule, self.rng, self.directory, self.limit = schedule, rng, directory, options.limit
        self.losses, self.offsets = [], [(0.0, 0.0)]
        self.link_faults = {region: [] for region in REGIONS}
        self.hits = {algorithm: [] for algorithm in ALGORITHMS}
        self.asked, self.failed, self.notices, self.tasks, self.connections = 0, 0, {}, set(), {}
        self.fleet = Fleet(options.binary, directory, options.limit, {}, schedule)
        for link in self.fleet.links.values():
            link.delay = rng.uniform(0.005, 0.1)

    def elapsed(self):
        return time.time() - self.began

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self):
        end_on_signals()
        await self.start()
        works = [self.drive(algorithm) for algorithm in ALGORITHMS] + [self.act(), self.watch()]
        await asyncio.gather(*works)
        await asyncio.sleep(0.5)

    async def start(self):
        """Waits until all regions are connected, and then for the start of a window."""
        until = time.time() + START_S
        self.began = time.time()
        while time.time() < until:
            await asyncio.sleep(0.5)
            pages = await asyncio.gather(*(self.page(replica) for replica in self.fleet.all_replicas()))
            if all(page and page["connected"] and page["unanswered_s"] is not None for page in pages):
                break
        else:
            raise SystemExit(f"the replicas do not connect: see {self.directory}")
        await asyncio.sleep(2)
        wait = self.schedule.period - time.time() % self.schedule.period
        self.began = time.time() + wait
        await asyncio.sleep(wait)

    async def page(self, replica):
        try:
            return await asyncio.get_running_loop().run_in_executor(None, replica.regions)
        except (OSError, ValueError):
            return None

    async def act(self):
        for at, text, action in sorted(self.schedule.faults, key=lambda fault: fault[0]):
            await asyncio.sleep(max(0, at - self.elapsed()))
            try:
                action(self)
            except OSError as error:
                print(f"{text}: {error}", file=sys.stderr)

    async def watch(self):
        while self.elapsed() < self.schedule.length:
            for replica in self.fleet.all_replicas():
                page = await self.page(replica) if replica.is_running() else None
                for notice in (page or {}).get("notices", []):
                    self.notices.setdefault(notice["notice"], {}).setdefault(replica.region, round(self.elapsed()))
            await asyncio.sleep(2)

    async def drive(self, algorithm):
        descriptor = {"entries": [{"key": algorithm, "value": "one"}]}
        body = json.dumps({"domain": "shop", "descriptors": [descriptor]}).encode()
        next_at = 0.0
        highest = 8.0 * self.limit / self.schedule.period
        while (now := self.elapsed()) < self.schedule.length:
            while next_at <= now:
                rate = self.schedule.factor * self.schedule.shape(next_at) * self.limit / self.schedule.period
                # Arrivals of the highest rate, thinned to that of the time.
                if self.rng.random() < rate / highest:
                    region = self.rng.choices(REGIONS, self.schedule.parts(next_at))[0]
                    replica = self.rng.choice(self.fleet.replicas[region])
                    self.spawn(self.ask(replica, algorithm, body))
                next_at += self.rng.expovariate(highest)
            await asyncio.sleep(0.004)

    async def ask(self, replica, algorithm, body):
        connections = self.connections.setdefault(replica.http, Connections(replica.http))
        sent = self.elapsed()
        self.asked += 1
        try:
            status = await connections.ask(body)
        except (OSError, EOFError):
            self.failed += 1
            return
        if status == 200:
            self.hits[algorithm].append(Hit(sent, self.elapsed(), replica.region))
        elif status != 429:
            self.failed += 1

    def rows(self, seed):
        """One row for each algorithm, as values for JSON."""
        for algorithm, hits in self.hits.items():
            admitted = Admitted(algorithm, self.limit, self.schedule.period, hits, self.losses, self.offsets,
                                self.schedule.length)
            figures = admitted.figures()
            broken = [figure.place() for figure in figures if figure.excess() > 0]
            weighted = f"weighted {admitted.weighted():.0f}" if algorithm == "sliding_window_counter" else ""
            use = 100 * len(hits) / self.limit * self.schedule.period / self.schedule.length
            yield {
                "seed": seed, "schedule": self.schedule.name, "algorithm": algorithm, "broken": broken,
                "figures": ", ".join(filter(None, [*map(str, figures), weighted])), "use": round(use),
                "asked": self.asked, "failed": self.failed, "reserve": self.schedule.reserve,
                "notices": " ".join(f"{name}@{','.join(f'{region}:{at}' for region, at in regions.items())}"
                                    for name, regions in sorted(self.notices.items())),
                "faults": "; ".join(filter(None, [
                    *[f"{at:.1f} {text}" for at, text, _ in sorted(self.schedule.faults, key=lambda f: f[0]) if text]])),
            }


def end_on_signals():
    """Lets the current task end, and so all processes, as Ctrl-C does."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)


def run_one(options):
    """One run in a process of its own, which prints its rows as JSON."""
    seed, name = options.seed, options.schedule[0]
    rng = random.Random(f"{seed} {name}")
    schedule = random_schedule(rng) if name == "random" else AIMED[name](name)
    with Directory(options.directory, f"{name}-{seed}") as directory:
        run = Run(options, schedule, rng, directory)
        asyncio.run(run.run())
        for row in run.rows(seed):
            print(json.dumps(row), flush=True)
        if options.directory:
            with open(os.path.join(directory, "hits.json"), "w") as file:
                json.dump({algorithm: [[hit.sent, hit.received, hit.region] for hit in hits]
                           for algorithm, hits in run.hits.items()}, file)


class Directory:
    """Directory of a run: temporary, or kept in the given one, where it replaces that of an earlier run."""

    def __init__(self, kept_in, name):
        self.temporary = None if kept_in else tempfile.TemporaryDirectory()
        self.path = os.path.join(kept_in, name) if kept_in else self.temporary.name

    def __enter__(self):
        if not self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
            os.makedirs(self.path)
        return self.path

    def __exit__(self, *_):
        if self.temporary:
            self.temporary.cleanup()


def show(row):
    verdict = "BREACH " + ", ".join(row["broken"]) if row["broken"] else "holds"
    print(f"{row['schedule']:17} seed {row['seed']:<4} {row['algorithm']:22} {row['figures']:48} {verdict} | "
          f"use {row['use']} %, reserve {row['reserve']} %, {row['failed']} of {row['asked']} unanswered | "
          f"notices: {row['notices'] or 'none'} | {row['faults'] or 'no fault'}", flush=True)


async def run_all(options):
    """Runs schedules at once, each in a process; returns the rows, and those that failed."""
    end_on_signals()
    if options.schedule:
        names = list(AIMED) if options.schedule == ["all"] else options.schedule
        runs = [(name, options.seed + number) for name in names for number in range(options.runs or 1)]
    else:
        runs = [("random", options.seed + number) for number in range(options.runs or 10)]
    slots, rows, failed = asyncio.Semaphore(options.jobs), [], []

    async def one(name, seed):
        arguments = [options.binary, "--one", "--schedule", name, "--seed", str(seed), "--limit", str(options.limit)]
        if options.directory:
            arguments += ["--directory", options.directory]
        async with slots:
            process = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments, stdout=subprocess.PIPE,
                                                           preexec_fn=end_with_parent)
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
        if process.returncode:
            failed.append((name, seed))
            print(f"{name} seed {seed}: failed with {process.returncode}", flush=True)
        for line in output.splitlines():
            rows.append(json.loads(line))
            show(rows[-1])
    await asyncio.gather(*(one(*run) for run in runs))
    return rows, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("--runs", type=int, help="runs (default: 10 random ones, or one of each name)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="runs at once")
    parser.add_argument("--schedule", nargs="+", default=[], help="names, `all` or `list`")
    parser.add_argument("--limit", type=int, default=600, help="hits in a period, of 10 s mostly")
    parser.add_argument("--directory", default="", help="where logs and hits are kept (default: nowhere)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.schedule == ["list"]:
        print(*AIMED)
        return
    if options.one:
        run_one(options)
        return
    rows, failed = asyncio.run(run_all(options))
    runs = {(row["schedule"], row["seed"]) for row in rows}
    broken = {(row["schedule"], row["seed"]) for row in rows if row["broken"]}
    print(f"{len(broken)} of {len(runs)} runs broke the promise: {sorted(broken)}" if broken else
          f"0 of {len(runs)} runs broke the promise")
    if broken or failed or not runs:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
