#!/usr/bin/env python3
"""A worker that does rejected work later. Python 3.8 or newer and tollkeeper, nothing else.

    python3 worker.py decisions retry dead-letters.jsonl ./do-job

reads the stream `decisions` as one of the consumers of the group `retry`. Once `retry_after_us` of a rejected request has
passed, it runs `./do-job` with the record on standard input. Exit code 0: done. Any other: again, later. After TRIES the
record goes to dead-letters.jsonl.

- A record is acknowledged when its job is done, or is a dead letter. The record of a worker that dies in between goes to
  another one after CLAIM_AFTER (or to the same one, if it is started with the same WORKER_NAME: at once).
- So a job runs at least once, and sometimes twice. `./do-job` must recognize the second time by JOB_ID, which is
  `process-seq` of the record: pass it to a service as an idempotency key, or insert it with the result.
"""

import heapq
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time

TRIES = 5  # Runs of one job, those of workers that died included.
FIRST_BACKOFF_S = 1.0  # After a run that failed; doubles with each one.
CLAIM_AFTER = "60s"  # A worker that is gone for so long is dead.
JOB_TIMEOUT_S = 300


def start_consumer(stream, group):
    """Prints {"id", "deliveries", "record"} per line; acknowledges the ids that it reads; ends when this worker does."""
    command = ["tollkeeper", "events", "--stream", stream, "--group", group, "--follow"]
    command += ["--ack", "stdin", "--claim-after", CLAIM_AFTER]
    if "WORKER_NAME" in os.environ:
        command += ["--consumer", os.environ["WORKER_NAME"]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def run_job(command, record):
    """True if the job is done."""
    env = dict(os.environ, JOB_ID=f"{record['process']}-{record['seq']}")
    try:
        job = subprocess.run(command, input=json.dumps(record), text=True, env=env, timeout=JOB_TIMEOUT_S)
        return job.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def append_durably(path, record):
    """Writes a dead letter to the disk before it is acknowledged."""
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


def main():
    stream, group, dead_letters, *command = sys.argv[1:]
    consumer = start_consumer(stream, group)
    arrived = queue.SimpleQueue()

    def receive():
        for line in consumer.stdout:
            arrived.put(json.loads(line))
        arrived.put(None)

    def acknowledge(entry):
        consumer.stdin.write(entry["id"] + "\n")

    threading.Thread(target=receive, daemon=True).start()
    waiting = []  # Heap of (due time, id, entry); tollkeeper hands out at most 1000 that are not acknowledged.
    while True:
        wait = max(0.0, waiting[0][0] - time.time()) if waiting else None
        try:
            entry = arrived.get(timeout=wait)
        except queue.Empty:
            entry = heapq.heappop(waiting)[2]
            if run_job(command, entry["record"]):
                acknowledge(entry)
                continue
            entry["deliveries"] += 1
            due = time.time() + FIRST_BACKOFF_S * 2 ** (entry["deliveries"] - 2)
        else:
            if entry is None:
                sys.exit(f"tollkeeper events ended with {consumer.wait()}")
            record = entry["record"]
            if record.get("type") != "decision" or record.get("verdict") != "over_limit":
                acknowledge(entry)
                continue
            due = due_time(record)
        if due is None or entry["deliveries"] > TRIES:
            append_durably(dead_letters, entry["record"])
            acknowledge(entry)
        else:
            heapq.heappush(waiting, (due, entry["id"], entry))


if __name__ == "__main__":
    main()
