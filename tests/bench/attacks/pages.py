#!/usr/bin/env python3
"""Clients of the debug listener that ask for the worst page and read nothing, beside decisions.

Usage: tests/bench/attacks/pages.py PATH-OF-A-RELEASE-BUILD [CLIENTS] [SECONDS] [CALLS-PER-SECOND]

The server has 10 000 limits. 1000 calls a second, unless given, measure the latency of decisions, first alone, then beside 100 clients
per page. Each client asks for one page over and over, with a small receive buffer, and reads nothing; one that is refused
or disconnected comes back. Clients run with `nice 19`. The table shows p50, p99 and p99.9 of decisions, the growth of the
resident memory over that before, at its peak, and how many requests were refused. Asserts nothing.
"""

import json
import os
import pathlib
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from load_program import load_program  # noqa: E402

LIMITS = 10_000
PAGES = ["/rules?most=10000", "/stats", "/settings", "/rlconfig", "/top?most=1000", "/fleet?most=1000"]
RULE = "- {{key: path_of_a_shop_{:05}, rate_limit: {{unit: minute, requests_per_unit: 100}}}}\n"
USER = "- {key: user, rate_limit: {unit: minute, requests_per_unit: 100, algorithm: token_bucket}}\n"


def free_ports(count):
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def resident_mib(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def attack(port, page, clients, seconds):
    """Runs in a process of its own; prints the number of refused requests."""
    os.nice(19)
    selector = selectors.DefaultSelector()
    request = f"GET {page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    refused = 0

    def connect():
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            client.connect(("127.0.0.1", port))
            client.sendall(request)
        except OSError:
            return
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)

    for _ in range(clients):
        connect()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for key, _ in selector.select(timeout=0.2):
            client = key.fileobj
            try:
                start = client.recv(12, socket.MSG_PEEK)
            except OSError:
                start = b""
            selector.unregister(client)
            if start == b"HTTP/1.1 503" or start == b"":
                refused += 1
                client.close()
                time.sleep(0.001)
                connect()
            else:
                # Holds the page for ever.
                held.append(client)
    print(refused)


held = []


def measure(ports, pid, load, attackers):
    peak = resident_mib(pid)
    before = peak
    bench = subprocess.Popen(
        [load_program(), "--addr", f"127.0.0.1:{ports[0]}", "--domain", "bench", "--descriptor", "user={key}", "--rate",
         str(load[1]), "--duration", f"{load[0]}s", "--json"], stdout=subprocess.PIPE, text=True)
    attacks = [subprocess.Popen([sys.executable, __file__, "--attack", *map(str, attacker)], stdout=subprocess.PIPE, text=True)
               for attacker in attackers]
    while bench.poll() is None:
        peak = max(peak, resident_mib(pid))
        time.sleep(0.02)
    latency = json.loads(bench.stdout.read())["latency_us"]
    refused = sum(int(process.communicate()[0] or 0) for process in attacks)
    return latency, peak - before, refused


def main():
    if sys.argv[1] == "--attack":
        return attack(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    program = sys.argv[1]
    # A build would disturb what is measured.
    load_program()
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    seconds = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    rate = int(sys.argv[4]) if len(sys.argv) > 4 else 1000
    with tempfile.TemporaryDirectory() as directory:
        rules = pathlib.Path(directory, "bench.yaml")
        rules.write_text("domain: bench\ndescriptors:\n" + USER + "".join(RULE.format(index) for index in range(LIMITS)))
        print(f"{clients} clients of each page, {rate} calls a second for {seconds} s\n")
        print("| page | p50 us | p99 us | p99.9 us | MiB more | refused |\n|---|---|---|---|---|---|")
        for page in [None, *PAGES]:
            ports = free_ports(3)
            names = ["GRPC", "HTTP", "DEBUG"]
            env = {"PATH": os.environ["PATH"], "TOLLKEEPER_DRAIN_PERIOD": "0s", "GRPC_HOST": "127.0.0.1",
                   "HOST": "127.0.0.1", "DEBUG_HOST": "127.0.0.1", "GRPC_PORT": str(ports[0]), "PORT": str(ports[1]),
                   "DEBUG_PORT": str(ports[2])}
            server = subprocess.Popen([program, "serve", "--config", str(rules)], env=env, stderr=subprocess.DEVNULL)
            try:
                wait_until_ready(ports[2])
                if page is not None:
                    # What a page that is read leaves behind belongs to the memory before.
                    urllib.request.urlopen(f"http://127.0.0.1:{ports[2]}{page}").read()
                attackers = [(ports[2], page, clients, seconds + 3)] if page is not None else []
                latency, grown, refused = measure(ports, server.pid, (seconds, rate), attackers)
                row = [page or "none", latency["p50"], latency["p99"], latency["p99_9"], f"{grown:.0f}", refused]
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
            finally:
                server.terminate()
                server.wait()
    return None


def wait_until_ready(port):
    for _ in range(300):
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server does not start")


if __name__ == "__main__":
    main()
