"""Requests at random times, by the demand of keys at proxies: an open loop over HTTP/1.1 that records every answer."""

import asyncio
import collections
import random
import time

ANSWER_TIMEOUT_S = 5
MAX_LATE_S = 0.5
MAX_IN_FLIGHT = 300

# A request: times in seconds since the epoch; admitted is None if there was no answer.
Answer = collections.namedtuple("Answer", "sent received proxy key admitted")


class Connections:
    """Idle connections to a proxy."""

    def __init__(self):
        self.idle = []

    async def get(self, port, key):
        """Status of one GET, or None."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", port)
        done = False
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: bench\r\nx-user: " + key.encode() + b"\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            at = head.find(b"content-length: ")
            length = int(head[at + 16:head.index(b"\r", at)]) if at >= 0 else 0
            if length:
                await reader.readexactly(length)
            done = True
            return int(head[9:12])
        finally:
            if done:
                self.idle.append((reader, writer))
            else:
                writer.close()


class Load:
    """Sends the requests of sources to the proxies of a fleet.

    Proxies in `avoided` get no new requests; others take over their part.
    """

    def __init__(self, fleet, sources, seed=1):
        self.fleet, self.sources = fleet, sources
        self.random = random.Random(seed)
        self.connections = [Connections() for _ in fleet.envoys]
        self.avoided = {number for number, envoy in enumerate(fleet.envoys) if envoy is None}
        self.answers, self.left_out = [], 0
        self.began = 0.0

    def elapsed(self):
        return time.time() - self.began

    async def send(self, proxy, source):
        sent = time.time()
        admitted = None
        try:
            if proxy == "rls":
                admitted = await source.decide()
            else:
                connections = self.connections[proxy]
                status = await asyncio.wait_for(connections.get(self.fleet.envoys[proxy].port, source.key),
                                                ANSWER_TIMEOUT_S)
                admitted = {200: True, 429: False}.get(status)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass
        self.answers.append(Answer(sent, time.time(), proxy, source.key, admitted))

    async def run(self, seconds):
        self.began = time.time()
        due = [(at, weights, source) for source in self.sources
               for at, weights in source.requests(seconds, self.random) if at < seconds]
        due.sort(key=lambda one: one[0])
        tasks = set()
        for at, weights, source in due:
            wait = at - self.elapsed()
            if wait > 0:
                await asyncio.sleep(wait)
            elif wait < -MAX_LATE_S or len(tasks) >= MAX_IN_FLIGHT:
                # After a pause of this machine, a herd of late requests would only prolong it.
                self.left_out += 1
                continue
            proxies = [proxy for proxy in weights if proxy not in self.avoided and weights[proxy] > 0]
            if not proxies:
                proxies = [proxy for proxy in range(len(self.fleet.envoys)) if proxy not in self.avoided]
            proxy = self.random.choices(proxies, [weights.get(one) or 1 for one in proxies])[0]
            task = asyncio.get_running_loop().create_task(self.send(proxy, source))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)


class Source:
    """Demand for one key, at random times: `rate` requests a second, divided by the pattern, or bursts.

    With bursts each proxy has bursts of its own, at times that no other knows.
    """

    def __init__(self, key, rate, pattern, burst=None):
        self.key, self.rate, self.pattern, self.burst = key, rate, pattern, burst

    def requests(self, seconds, source):
        """Yields the times of requests, each with the weights of the proxies."""
        if not self.burst:
            shares = PATTERNS.get(self.pattern, PATTERNS["even"])
            at = source.expovariate(self.rate)
            while at < seconds:
                yield at, shares(at)
                at += source.expovariate(self.rate)
            return
        for proxy in range(3):
            start = source.expovariate(1 / self.burst.every_s)
            while start < seconds:
                for _ in range(self.burst.requests):
                    yield start + source.random() * self.burst.length_s, {proxy: 1}
                start += source.expovariate(1 / self.burst.every_s)


# Requests of a burst, how long it lasts, and the mean time between bursts of one proxy.
Burst = collections.namedtuple("Burst", "requests length_s every_s")


def moving(elapsed):
    first = int(elapsed / 20) % 3
    return {first: 0.9, (first + 1) % 3: 0.05, (first + 2) % 3: 0.05}


PATTERNS = {
    "skewed": lambda elapsed: {0: 0.8, 1: 0.15, 2: 0.05},
    "even": lambda elapsed: {0: 1, 1: 1, 2: 1},
    "moving": moving,
    "rls": lambda elapsed: {0: 1, 1: 1, "rls": 2},
}
