#!/usr/bin/env python3
"""Cost of open consoles: CPU of a replica with ten of them against none, at 10 000 decisions a second.

Usage: tests/bench/consoles.py PATH-OF-A-RELEASE-BUILD [ROUNDS]

Windows with and without consoles alternate within one run, and the medians are compared, so that the load of the
machine hits both alike. A console listens to /live and reads /rules, /top, /fleet, /history and /alarms every 5
seconds, somewhat more than the page does. Asserts nothing.
"""

import http.client
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from load_program import load_program

CONSOLES = 10
WINDOW_S = 12
RATE = 10_000
POLLED = ["/rules?order=rejected&most=100", "/top?minutes=10&most=50", "/fleet?minutes=10&most=20", "/history", "/alarms"]
RULES = """\
domain: bench
descriptors:
- {key: user, rate_limit: {unit: minute, requests_per_unit: 100, algorithm: token_bucket}}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Console:
    """Listens and polls until it is closed."""

    def __init__(self, port):
        self.port = port
        self.closed = threading.Event()
        self.stream = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        self.stream.request("GET", "/live")
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self.listen, self.poll)]
        for thread in self.threads:
            thread.start()

    def listen(self):
        response = self.stream.getresponse()
        assert response.status == 200, response.status
        while not self.closed.is_set() and response.readline():
            pass

    def poll(self):
        while not self.closed.is_set():
            for page in POLLED:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", page)
                connection.getresponse().read()
                connection.close()
            self.closed.wait(5)

    def close(self):
        self.closed.set()
        for thread in self.threads:
            thread.join()
        self.stream.close()


def window(server, port, consoles):
    opened = [Console(port) for _ in range(consoles)]
    time.sleep(1)
    before, began = cpu_seconds(server.pid), time.monotonic()
    time.sleep(WINDOW_S)
    used = (cpu_seconds(server.pid) - before) / (time.monotonic() - began)
    for console in opened:
        console.close()
    return used


def main():
    program, load_generator = sys.argv[1], load_program()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory() as directory:
        rules = pathlib.Path(directory, "rules.yaml")
        rules.write_text(RULES)
        ports = {name: free_port() for name in ("GRPC_PORT", "PORT", "DEBUG_PORT")}
        environment = {**os.environ, **{name: str(port) for name, port in ports.items()}}
        environment.update(GRPC_HOST="127.0.0.1", HOST="127.0.0.1", DEBUG_HOST="127.0.0.1", LOG_LEVEL="error")
        server = subprocess.Popen([program, "serve", "--config", rules], env=environment)
        load = None
        try:
            time.sleep(2)
            seconds = rounds * 2 * (WINDOW_S + 3) + 30
            command = [load_generator, "--addr", f"127.0.0.1:{ports['GRPC_PORT']}", "--domain", "bench"]
            command += ["--descriptor", "user={key}", "--keys", "zipf:10000:1.1", "--rate", str(RATE)]
            load = subprocess.Popen([*command, "--duration", f"{seconds}s"], stdout=subprocess.DEVNULL)
            time.sleep(5)
            figures = {0: [], CONSOLES: []}
            for _ in range(rounds):
                for consoles, of in figures.items():
                    of.append(window(server, ports["DEBUG_PORT"], consoles))
            without, opened = (statistics.median(of) for of in figures.values())
            ratios = [b / a for a, b in zip(*figures.values())]
            print(f"CPU at {RATE} decisions/s: {without:.3f} cores without, {opened:.3f} with {CONSOLES} consoles")
            print(f"ratio of the medians {opened / without:.3f}; of pairs {min(ratios):.3f} to {max(ratios):.3f}")
        finally:
            for process in (load, server):
                if process:
                    process.terminate()
                    process.wait()


main()
