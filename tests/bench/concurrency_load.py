"""A backend that counts the streams that are open, and clients that open, end and cancel them.

Both run in one thread, so the order of events is known. A stream counts as open from its arrival at the backend until
the backend ends it or its client leaves, whichever is first: within that time Envoy cannot have released its slot.
"""

import asyncio
import collections
import random
import time
import urllib.parse


class Streams:
    """Streams that are open, by user."""

    def __init__(self, limit):
        self.limit = limit
        self.open = collections.defaultdict(dict)
        self.most = collections.Counter()
        self.known, self.gone = set(), set()
        self.broken = []

    def begin(self, user, stream):
        if stream in self.gone:
            return
        is_new = stream not in self.known
        self.known.add(stream)
        self.open[user][stream] = time.time()
        count = len(self.open[user])
        self.most[user] = max(self.most[user], count)
        if self.limit is not None and is_new and count > self.limit:
            self.broken.append((time.time(), user, count, self.limit))

    def end(self, user, stream):
        self.open[user].pop(stream, None)

    def leave(self, user, stream):
        """The client is about to close the stream."""
        self.gone.add(stream)
        self.end(user, stream)

    def forget_all(self):
        for streams in self.open.values():
            streams.clear()


class Backend:
    """An HTTP/1.1 server. The path says what it does: /KIND?stream=ID&ms=N."""

    def __init__(self, streams):
        self.streams = streams
        self.failed = set()

    async def start(self, port):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", port)

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self.answer(head, reader, writer)
                if "upgrade: websocket" in head.lower():
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head, reader, writer):
        headers = {name.lower(): value for name, _, value in
                   (line.partition(": ") for line in head.split("\r\n")[1:] if line)}
        url = urllib.parse.urlsplit(head.split(" ")[1])
        query = dict(urllib.parse.parse_qsl(url.query))
        user, stream, seconds = headers.get("x-user"), query["stream"], int(query["ms"]) / 1000
        kind = url.path.strip("/")
        self.streams.begin(user, stream)
        gone = asyncio.ensure_future(wait_for_close(reader)) if kind != "websocket" else None
        try:
            if kind == "websocket":
                await serve_websocket(reader, writer)
            elif kind == "redirect":
                location = f"http://{headers['host']}/plain?{url.query}"
                writer.write(f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode())
            elif kind == "retry" and stream not in self.failed:
                self.failed.add(stream)
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
            elif kind == "reset":
                await asyncio.wait([gone], timeout=seconds)
                writer.transport.abort()
            elif kind == "events":
                await send_events(writer, gone, seconds)
            else:
                await asyncio.wait([gone], timeout=seconds)
                if not gone.done():
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        finally:
            # What is written is on its way: the stream may be over for Envoy from now on.
            self.streams.end(user, stream)
            if gone and not gone.done():
                gone.cancel()
                await asyncio.wait([gone])
        await writer.drain()
        if gone and gone.done() and not gone.cancelled():
            raise ConnectionError


async def wait_for_close(reader):
    try:
        await reader.read(1)
    except OSError:
        pass


async def send_events(writer, gone, seconds):
    """Sends server-sent events for some seconds."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    end = time.time() + seconds
    while time.time() < end and not gone.done():
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await asyncio.wait([gone], timeout=min(0.05, max(0, end - time.time())))
    if not gone.done():
        writer.write(b"0\r\n\r\n")


async def serve_websocket(reader, writer):
    """Switches protocols and returns what it reads, until the client leaves."""
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    while data := await reader.read(1000):
        writer.write(data)


class Client:
    """Opens streams one after the other, through a connection for each Envoy while that stays open."""

    numbers = iter(range(1 << 60))

    def __init__(self, streams):
        self.streams = streams
        self.connections = {}

    async def open(self, envoy, user, kind, ms, request_id=None):
        """Sends a request; returns the number of its stream and a task that reads the response's head."""
        stream = str(next(self.numbers))
        reader, writer = self.connections.pop(envoy.port, (None, None))
        if writer is None or writer.is_closing():
            reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        more = f"x-request-id: {request_id}\r\n" if request_id else ""
        if kind == "websocket":
            more += "connection: upgrade\r\nupgrade: websocket\r\n"
        writer.write(f"GET /{kind}?stream={stream}&ms={ms} HTTP/1.1\r\nhost: bench\r\nx-user: {user}\r\n{more}\r\n"
                     .encode())
        return Stream(self, envoy, user, stream, reader, writer)

    async def request(self, envoy, user, kind="plain", ms=0, cancel_s=None, request_id=None):
        """Opens a stream and waits for its end; cancels it after `cancel_s`. Returns its status, 0 if it was lost, or
        -1 if it was cancelled.
        """
        try:
            stream = await self.open(envoy, user, kind, ms, request_id)
        except OSError:
            return 0
        try:
            return await asyncio.wait_for(stream.finish(), cancel_s)
        except asyncio.TimeoutError:
            stream.leave()
            return -1
        except (OSError, asyncio.IncompleteReadError):
            self.streams.leave(user, stream.number)
            stream.writer.close()
            return 0


class Stream:
    """A request and its response."""

    def __init__(self, client, envoy, user, number, reader, writer):
        self.client, self.envoy, self.user, self.number = client, envoy, user, number
        self.reader, self.writer = reader, writer

    async def head(self):
        """Status of the response."""
        self.head_text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        return int(self.head_text.split(" ")[1])

    async def finish(self):
        """Status of the response, once it is complete."""
        status = await self.head()
        if "transfer-encoding: chunked" in self.head_text:
            while int((await self.reader.readuntil(b"\r\n")), 16):
                await self.reader.readuntil(b"\r\n")
            await self.reader.readexactly(2)
        else:
            length = self.head_text.partition("content-length: ")[2].partition("\r\n")[0]
            await self.reader.readexactly(int(length or 0))
        self.client.connections[self.envoy.port] = (self.reader, self.writer)
        return status

    def leave(self):
        """Closes the connection, as a client that goes away."""
        self.client.streams.leave(self.user, self.number)
        self.writer.transport.abort()


KINDS = ["plain", "plain", "events", "redirect", "retry", "reset"]


class MixedLoad:
    """Clients with requests of all kinds, cancels at random times and forged ids."""

    def __init__(self, fleet, streams, users, clients, seed=1):
        self.fleet, self.streams, self.users, self.clients = fleet, streams, users, clients
        self.random = random.Random(seed)
        self.statuses = collections.Counter()
        self.is_stopped = False

    async def run_client(self):
        client, source = Client(self.streams), self.random
        while not self.is_stopped:
            envoy, user = source.choice(self.fleet.envoys), source.choice(self.users)
            cancel_s = source.uniform(0, 0.06) if source.random() < 0.35 else None
            forged = "forged" if source.random() < 0.25 else None
            status = await client.request(envoy, user, source.choice(KINDS), source.randrange(5, 250), cancel_s, forged)
            self.statuses[status] += 1
            if status in (0, 429, 503):
                await asyncio.sleep(source.uniform(0.01, 0.05))

    async def run(self, seconds, events=None):
        tasks = [asyncio.ensure_future(self.run_client()) for _ in range(self.clients)]
        if events:
            await events
        await asyncio.sleep(seconds)
        self.is_stopped = True
        await asyncio.gather(*tasks)
