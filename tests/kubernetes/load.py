"""Calls an Envoy at a constant rate, whatever the answers take, until its input ends; then prints what came of the calls.

    load.py ADDRESS CALLS_PER_SECOND

A call is `limited` if tollkeeper decided it (Envoy then names the limit in a header), `unlimited` if Envoy let it through
without a decision, `failed` otherwise.
"""

import asyncio
import json
import sys
import time

PATIENCE_SECONDS = 5
REQUEST = b"GET / HTTP/1.1\r\nhost: tests\r\nx-user: ann\r\n\r\n"


class Load:
    """Counts of the calls, the idle connections, and when calls went wrong."""

    def __init__(self, address, rate):
        self.host, port = address.split(":")
        self.port, self.rate = int(port), rate
        self.idle = []
        self.counts = {"calls": 0, "limited": 0, "unlimited": 0, "failed": 0}
        self.wrong_at = []
        self.late = 0.0
        self.start = time.monotonic()

    async def call(self):
        self.counts["calls"] += 1
        try:
            outcome = await asyncio.wait_for(self.exchange(), PATIENCE_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError):
            outcome = "failed"
        self.counts[outcome] += 1
        if outcome != "limited":
            self.wrong_at.append(round(time.monotonic() - self.start, 1))

    async def exchange(self):
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(REQUEST)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except BaseException:
            writer.close()
            raise
        self.idle.append((reader, writer))
        if not head.startswith(b"http/1.1 200"):
            return "failed"
        return "limited" if b"\r\nx-ratelimit-limit:" in head else "unlimited"

    async def run(self):
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        ended = asyncio.create_task(reader.read())
        calls, due = set(), time.monotonic()
        while not ended.done():
            self.late = max(self.late, time.monotonic() - due)
            while due <= time.monotonic():
                task = asyncio.create_task(self.call())
                calls.add(task)
                task.add_done_callback(calls.discard)
                due += 1 / self.rate
            await asyncio.sleep(max(0, due - time.monotonic()))
        await asyncio.gather(*calls)
        print(json.dumps({**self.counts, "wrong_at": self.wrong_at[:20], "late_ms": round(self.late * 1000)}))


if __name__ == "__main__":
    asyncio.run(Load(sys.argv[1], float(sys.argv[2])).run())
