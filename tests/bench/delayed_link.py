"""Proxy to a port that delays, holds back or cuts what passes; shared by the benches of regions."""

import asyncio
import socket
import threading


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Link:
    """Proxy to a port that adds a delay in each direction.

    While it is cut, connections are closed. While a direction is held, its bytes wait, and arrive late, as those of a
    network that loses packets for a while.
    """

    def __init__(self, target, port=None):
        self.target, self.port = target, port or free_port()
        self.delay, self.cut, self.held = 0.0, False, frozenset()
        self.loop = asyncio.new_event_loop()
        self.connections = set()
        self.tasks = set()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", self.port))
        self.loop.run_forever()

    async def _accept(self, reader, writer):
        if self.cut:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        pair = {writer, far_writer}
        self.connections |= pair
        await asyncio.gather(self._pump(reader, far_writer, "calls"), self._pump(far_reader, writer, "answers"))
        self.connections -= pair

    async def _pump(self, reader, writer, direction):
        waiting = asyncio.Queue()
        delivering = self.loop.create_task(self._deliver(waiting, writer, direction))
        self.tasks.add(delivering)
        delivering.add_done_callback(self.tasks.discard)
        data = b"-"
        while data:
            try:
                data = await reader.read(65536)
            except OSError:
                data = b""
            waiting.put_nowait((self.loop.time() + self.delay, data))
        await delivering

    async def _deliver(self, waiting, writer, direction):
        while True:
            at, data = await waiting.get()
            await asyncio.sleep(max(0, at - self.loop.time()))
            while direction in self.held:
                await asyncio.sleep(0.02)
            if not data:
                writer.close()
                return
            if not self.cut and not writer.is_closing():
                writer.write(data)

    def set_cut(self, cut):
        self.cut = cut
        if cut:
            for writer in list(self.connections):
                self.loop.call_soon_threadsafe(writer.close)

    def set_held(self, *directions):
        """Holds back `calls`, `answers`, both or neither."""
        self.held = frozenset(directions)
