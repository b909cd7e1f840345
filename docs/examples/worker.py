#!/usr/bin/env python3
"""A worker that does rejected work later. Python 3.8 or newer and tollkeeper, nothing else.

    python3 worker.py decisions position.txt dead-letters.jsonl ./do-job

follows the stream `decisions`. Once `retry_after_us` of a rejected request has passed, it runs `./do-job` with the record
on standard input. Exit code 0: done. Any other: again, later. After TRIES the record goes to dead-letters.jsonl.

- position.txt has the id before the oldest record that is not done. A worker that is started again goes on there.
- So a job runs at least once, and sometimes twice. `./do-job` must recognize the second time by JOB_ID, which is
  `process-seq` of the record: pass it to a service as an idempotency key, or insert it with the result.
- Several workers share the stream with WORKERS=3 and WORKER=0, 1 or 2, each with a position of its own.
"""

import ctypes
import functools
import heapq
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import zlib

TRIES = 5  # Runs of one job since the worker was started.
FIRST_BACKOFF_S = 1.0  # After a run that failed; doubles with each one.
MAX_WAITING = 1000  # Records that wait for their time; the stream keeps the others.
JOB_TIMEOUT_S = 300


def follow(stream, position):
    """Prints {"id", "record"} per line; ends when this worker does (PR_SET_PDEATHSIG of Linux)."""
    command = ["tollkeeper", "events", "--stream", stream, "--ids", "--follow", "--after", position]
    end_with_worker = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_worker)


def job_id(record):
    return f"{record['process']}-{record['seq']}"


def is_own_job(record):
    """True for a rejected request that this worker is to do."""
    if record.get("type") != "decision" or record.get("verdict") != "over_limit":
        return False
    workers, worker = int(os.environ.get("WORKERS", 1)), int(os.environ.get("WORKER", 0))
    return zlib.crc32(job_id(record).encode()) % workers == worker


def run_job(command, record):
    """True if the job is done."""
    env = dict(os.environ, JOB_ID=job_id(record))
    try:
        job = subprocess.run(command, input=json.dumps(record), text=True, env=env, timeout=JOB_TIMEOUT_S)
        return job.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def append_durably(path, record):
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def due_time(record):
    """Unix time at which the request may pass; None if it never will."""
    if "retry_after_us" not in record:
        return None
    # Spread, so that not all workers call in the same moment.
    return (record["time_us"] + record["retry_after_us"]) / 1e6 + random.uniform(0, 0.1)


class Position:
    """Id before the oldest record that is not done, in a file."""

    def __init__(self, path):
        self.path = path
        self.ids = {}  # Ids that were read, the oldest first; True: done.
        try:
            with open(path) as file:
                self.id = file.read().strip() or "0-0"
        except FileNotFoundError:
            self.id = "0-0"

    def add(self, id, done):
        self.ids[id] = done
        self.advance()

    def set_done(self, id):
        self.ids[id] = True
        self.advance()

    def advance(self):
        before = self.id
        while self.ids and next(iter(self.ids.values())):
            self.id = next(iter(self.ids))
            del self.ids[self.id]
        if self.id != before:
            with open(self.path + ".new", "w") as file:
                file.write(self.id)
            os.replace(self.path + ".new", self.path)


def main():
    stream, position, dead_letters, *command = sys.argv[1:]
    position = Position(position)
    events = follow(stream, position.id)
    arrived = queue.Queue(maxsize=MAX_WAITING)

    def receive():
        for line in events.stdout:
            arrived.put(json.loads(line))
        arrived.put(None)

    threading.Thread(target=receive, daemon=True).start()
    waiting = []  # Heap of (due time, id, runs, record).
    while True:
        wait = max(0.0, waiting[0][0] - time.time()) if waiting else None
        try:
            if len(waiting) >= MAX_WAITING:
                time.sleep(wait)
                raise queue.Empty
            entry = arrived.get(timeout=wait)
        except queue.Empty:
            _, id, runs, record = heapq.heappop(waiting)
            if run_job(command, record):
                position.set_done(id)
            elif runs + 1 == TRIES:
                append_durably(dead_letters, record)
                position.set_done(id)
            else:
                heapq.heappush(waiting, (time.time() + FIRST_BACKOFF_S * 2**runs, id, runs + 1, record))
            continue
        if entry is None:
            sys.exit(f"tollkeeper events ended with {events.wait()}")
        id, record = entry["id"], entry["record"]
        is_own = is_own_job(record)
        due = due_time(record) if is_own else None
        if is_own and due is None:
            append_durably(dead_letters, record)
        if due is not None:
            heapq.heappush(waiting, (due, id, 0, record))
        position.add(id, due is None)


if __name__ == "__main__":
    main()
