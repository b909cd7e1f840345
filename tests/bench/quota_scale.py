"""Many streams, many buckets and hostile streams at one tollkeeper: memory, CPU, and what RLS calls wait meanwhile."""

import asyncio
import json
import subprocess
import tempfile
import time

import grpc

import quota_wire as wire
from load_program import load_program
from quota_fleet import Tollkeeper, cpu_seconds, resident_bytes

RULES = """domain: quota
descriptors:
- {key: user, rate_limit: {unit: minute, requests_per_unit: 600}}
- {key: rls, rate_limit: {unit: second, requests_per_unit: 1000}}
"""
REPORT_S = 5
RLS_RATE = 500
# Seconds of RLS calls before there is a stream.
QUIET_S = 10
# Seconds of RLS calls while streams come: their first reports are answered within.
OPENING_S = 8
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
           ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]


def open_channel(server):
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}", options=CHANNEL)


def user(name):
    return wire.bucket_id({b"user": name if isinstance(name, bytes) else name.encode()})


class Stream:
    """A proxy with buckets that reports each 5 s; `waited` has the seconds from a report to its response."""

    def __init__(self, channel, buckets):
        self.buckets, self.waited, self.assigned = buckets, [], 0
        self.call = channel.stream_stream(wire.QUOTA_METHOD)()

    async def report(self, allowed, elapsed_s):
        usages = [wire.usage(bucket, allowed, 0, elapsed_s) for bucket in self.buckets]
        began = time.monotonic()
        await self.call.write(wire.report("quota", usages))
        return began

    async def first(self):
        """Reports first requests until every bucket has an assignment."""
        began = await self.report(1, 0)
        known = set()
        while len(known) < len(self.buckets):
            response = await asyncio.wait_for(self.call.read(), 60)
            known |= {wire.bucket_id(bucket) for bucket, _ in wire.read_actions(response)}
        self.assigned = len(known)
        self.waited.append(time.monotonic() - began)

    async def run(self, end, offset_s):
        """Reports until the end; reads responses meanwhile, as they need not come after each report."""
        reader = asyncio.ensure_future(self.read_all())
        await asyncio.sleep(offset_s)
        while time.monotonic() < end:
            await self.report(1, REPORT_S)
            await asyncio.sleep(REPORT_S)
        self.call.cancel()
        await reader

    async def read_all(self):
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            pass


class RlsLoad:
    """`tollkeeper-bench` beside the streams: latencies of ShouldRateLimit at a constant rate."""

    def __init__(self, server, seconds):
        self.process = subprocess.Popen(
            [load_program(), "--addr", f"127.0.0.1:{server.grpc}", "--domain", "quota",
             "--descriptor", "rls={key}", "--keys", "uniform:1000", "--rate", str(RLS_RATE),
             "--duration", f"{seconds}s", "--warm-up", "1s", "--json"], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True)

    async def row(self, when):
        """Median and 99th percentile in milliseconds, from the time a call was due; failed calls if there are any."""
        answer, _ = await asyncio.to_thread(self.process.communicate, timeout=120)
        results = json.loads(answer)
        latency = [round(results["latency_us"][part] / 1000, 2) for part in ("p50", "p99")]
        row = {f"RLS p50 and p99 {when}, ms": latency}
        return row | {f"RLS calls that failed {when}": results["errors"]} if results["errors"] else row


async def measure_before(server):
    """RLS calls before there is a stream: what the others are compared with."""
    return await RlsLoad(server, QUIET_S).row("before")


class Meter:
    """Memory and CPU of a server between two moments."""

    def __init__(self, server):
        self.pid = server.process.pid
        self.rss, self.cpu = resident_bytes(self.pid), cpu_seconds(self.pid)

    def rss_growth(self):
        return resident_bytes(self.pid) - self.rss

    def cpu_spent(self):
        return cpu_seconds(self.pid) - self.cpu


async def run_streams(options, server, streams, buckets):
    """Proxies with buckets of their own; returns the measured row."""
    channels = [open_channel(server) for _ in range(max(1, streams // 50))]
    before = await measure_before(server)
    meter = Meter(server)
    opened = [Stream(channels[number % len(channels)], [user(f"{streams}-{number}-{one}") for one in range(buckets)])
              for number in range(streams)]
    rls = RlsLoad(server, OPENING_S)
    # Its warm-up.
    await asyncio.sleep(1.5)
    began = time.monotonic()
    await asyncio.gather(*(stream.first() for stream in opened))
    ready_s = time.monotonic() - began
    growth = meter.rss_growth()
    opening = await rls.row("while they come")
    seconds = max(15, min(60, options.seconds))
    rls = RlsLoad(server, seconds)
    # Then the same reports without RLS calls, to tell what a report costs.
    alone = asyncio.ensure_future(measure_alone(server, rls, seconds))
    end = time.monotonic() + 2 * seconds + REPORT_S
    await asyncio.gather(*(stream.run(end, REPORT_S * number / streams) for number, stream in enumerate(opened)))
    steady_rls, cpu, cpu_alone = await alone
    for channel in channels:
        await channel.close()
    all_buckets = streams * buckets
    return {
        "run": f"{streams} streams x {buckets} buckets", "first answer, all buckets, s": round(ready_s, 2),
        "RSS per bucket, bytes": growth // all_buckets, "CPU per second, s": round(cpu, 3),
        "CPU per report, us": round(1e6 * cpu_alone * REPORT_S / streams),
        **before, **opening, **steady_rls,
        "peak RSS growth, MiB": round(meter.rss_growth() / 2**20, 1),
    }


async def measure_alone(server, rls, seconds):
    """Waits for the RLS calls beside the reports, then measures as long without them. Returns the row of the calls, and
    the CPU per second with and without them."""
    meter, began = Meter(server), time.monotonic()
    row = await rls.row("meanwhile")
    cpu = meter.cpu_spent() / (time.monotonic() - began)
    meter, began = Meter(server), time.monotonic()
    await asyncio.sleep(seconds)
    return row, cpu, meter.cpu_spent() / (time.monotonic() - began)


async def hostile_ids(channel, count=1_000_000):
    """A client that reports a new id in each usage, 10 000 in a message."""
    call = channel.stream_stream(wire.QUOTA_METHOD)()
    reader = asyncio.ensure_future(drain(call))
    sent = 0
    try:
        for first in range(0, count, 10_000):
            usages = [wire.usage(user(f"invented-{number}"), 1, 0, 0) for number in range(first, first + 10_000)]
            await asyncio.wait_for(call.write(wire.report("quota", usages)), 30)
            sent += 10_000
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
        pass
    await asyncio.sleep(2)
    call.cancel()
    await reader
    return f"{sent} ids sent"


async def drain(call):
    responses = 0
    try:
        while await call.read() is not grpc.aio.EOF:
            responses += 1
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        pass
    return responses


async def reported(channel, messages):
    """Sends messages, then an honest one; says whether that got an assignment."""
    call = channel.stream_stream(wire.QUOTA_METHOD)()
    honest = {b"user": b"honest-%d" % time.monotonic_ns()}
    try:
        for message in [*messages, wire.report("quota", [wire.usage(wire.bucket_id(honest), 1, 0, 0)])]:
            await call.write(message)
        while True:
            response = await asyncio.wait_for(call.read(), 10)
            if response is grpc.aio.EOF:
                return f"stream ended: {await call.code()}"
            # An id that is not UTF-8 in a response makes Envoy reset the stream.
            response.decode("utf-8", "surrogateescape")
            for bucket, action in wire.read_actions(response):
                for text in [*bucket, *bucket.values()]:
                    text.decode()
                if bucket == honest:
                    return f"assigned {action}"
    except UnicodeDecodeError:
        return "FAILED: an id that is not UTF-8 in a response"
    except asyncio.TimeoutError:
        return "FAILED: no assignment within 10 s"
    except grpc.aio.AioRpcError as error:
        return f"stream ended: {error.code().name}"
    finally:
        call.cancel()


async def never_reading(channel, seconds):
    """A client that reports 2000 buckets without a pause and reads nothing; says how much the server took."""
    call = channel.stream_stream(wire.QUOTA_METHOD)()
    sent, end = 0, time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            usages = [wire.usage(user(f"unread-{number}-{sent % 7}"), 1, 0, 5) for number in range(2000)]
            await asyncio.wait_for(call.write(wire.report("quota", usages)), left)
            sent += 1
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
        pass
    call.cancel()
    return f"{sent} messages taken"


HUGE = 2**64 - 1
HOSTILE_MESSAGES = {
    "ids that are not UTF-8": lambda: [wire.report("quota", [wire.usage(user(b"caf\xe9"), 1, 0, 0)])],
    "keys that are not UTF-8": lambda: [wire.report("quota", [wire.usage(wire.bucket_id({b"\xff": b"x"}), 1, 0, 0)])],
    "2^64-1 allowed and denied": lambda: [wire.report("quota", [wire.usage(user("huge"), HUGE, HUGE, 5)])] * 20,
    "negative and huge times": lambda: [wire.report("quota", [
        wire.usage(user("times"), 1, 1, -5), wire.usage(user("times"), 1, 1, 2**62, 2**31 - 1)])] * 5,
    "an empty id, an empty message": lambda: [wire.report("quota", [wire.usage(b"", 1, 0, 0)]), b""],
    "an id of 1000 entries": lambda: [wire.report("quota", [wire.usage(
        wire.bucket_id({b"k%d" % number: b"v" for number in range(1000)}), 1, 0, 0)])],
    "an id of 1 MB": lambda: [wire.report("quota", [wire.usage(user(b"x" * 1_000_000), 1, 0, 0)])],
    "the same id 1000 times": lambda: [wire.report("quota", [wire.usage(user("same"), 1, 0, 0)] * 1000)],
    "a change of domain": lambda: [wire.report("another", [wire.usage(user("domain"), 1, 0, 0)])],
}


async def run_hostile(options, server):
    """Each hostile client beside an honest stream and RLS calls."""
    rows = []
    kinds = {
        "10^6 invented ids": lambda: hostile_ids(open_channel(server)),
        "a stream that never reads": lambda: never_reading(open_channel(server), 15),
        **{name: lambda messages=messages: reported(open_channel(server), messages())
           for name, messages in HOSTILE_MESSAGES.items()},
    }
    honest_channel = open_channel(server)
    rows.append({"run": "hostile: none yet", **await measure_before(server)})
    print_row(options, rows[-1])
    for name, attack in kinds.items():
        meter = Meter(server)
        long = name in ("10^6 invented ids", "a stream that never reads")
        rls = RlsLoad(server, 15 if long else 3)
        task = asyncio.ensure_future(attack())
        waited = []
        for turn in range(13 if long else 2):
            await asyncio.sleep(0.5)
            began = time.monotonic()
            result = await reported(honest_channel, [])
            waited.append(time.monotonic() - began)
            if not result.startswith("assigned"):
                waited.append(float("inf"))
        outcome = await task
        meanwhile = await rls.row("meanwhile")
        rows.append({"run": f"hostile: {name}", "outcome": outcome,
                     "RSS growth, MiB": round(meter.rss_growth() / 2**20, 1),
                     "CPU, s": round(meter.cpu_spent(), 2), **meanwhile,
                     "slowest first assignment of another stream, ms": round(1000 * max(waited), 1),
                     "alive": server.is_running()})
        print_row(options, rows[-1])
    return rows


def print_row(options, row):
    if not options.json:
        print("; ".join(f"{name}: {value}" if name != "run" else str(value) for name, value in row.items()), flush=True)


async def measure_all(options, directory):
    rows = []
    rules = f"{directory}/rules.yaml"
    with open(rules, "w") as file:
        file.write(RULES)
    for name, streams, buckets in [("streams", 1000, 20), ("buckets", 1, 20_000)]:
        if options.only not in name:
            continue
        server = Tollkeeper(options.binary, directory, name, rules)
        rows.append(await run_streams(options, server, streams, buckets))
        print_row(options, rows[-1])
        server.kill()
    if options.only in "hostile":
        server = Tollkeeper(options.binary, directory, "hostile", rules)
        rows += await run_hostile(options, server)
        server.kill()
    return rows


def measure(options):
    # A build would disturb what is measured.
    load_program()
    with tempfile.TemporaryDirectory(prefix="tollkeeper-quota.") as directory:
        rows = asyncio.run(measure_all(options, options.keep or directory))
    if options.json:
        print(json.dumps(rows))
    return int(any(not row.get("alive", True) or "FAILED" in str(row.get("outcome")) for row in rows))
