"""Real processes for the benches of quotas: Envoys with envoy/quota.yaml, tollkeepers, a Redis, and links between."""

import fcntl
import itertools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from delayed_link import Link
from region_fleet import Process, start_process

ROOT = pathlib.Path(__file__).resolve().parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def reserved_ports():
    """Yields free ports that no test of this machine takes, by the locks of tests/kit/port.rs.

    They are below those of outgoing connections, so that a server can be restarted at its port. Without a lock, two
    servers that set SO_REUSEPORT, as Envoy does, would share a port without notice.
    """
    locks = pathlib.Path(tempfile.gettempdir(), f"tollkeeper-test-ports-{os.environ.get('USER', '')}")
    locks.mkdir(exist_ok=True)
    kept = []
    for offset in itertools.count(os.getpid() * 97):
        port = 20_000 + offset % 12_000
        lock = open(locks / str(port), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        kept.append(lock)
        yield port


PORTS = reserved_ports()


def envoy_binary():
    return subprocess.run([ROOT / "envoy/install.sh"], check=True, capture_output=True, text=True).stdout.strip()


def wait_for_port(port, process, what):
    deadline = time.time() + 30
    while time.time() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{what} ended with status {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{what} does not listen on port {port}")


def cpu_seconds(pid):
    """CPU time of a process, user and system."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status).group(1))


class Redis(Process):
    def __init__(self, directory):
        self.port = next(PORTS)
        self.log = open(pathlib.Path(directory, "redis.log"), "a")
        self.start()

    def start(self):
        self.process = start_process(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                                      "--appendonly", "no"], {"PATH": os.environ["PATH"]}, self.log)
        wait_for_port(self.port, self.process, "redis-server")


class Tollkeeper(Process):
    """A server; a binary that ends with .py is run by this Python, for tests of the bench itself."""

    def __init__(self, binary, directory, name, rules, redis=None, settings=()):
        self.binary, self.rules = binary, rules
        self.grpc, self.http, self.debug = next(PORTS), next(PORTS), next(PORTS)
        self.log_path = pathlib.Path(directory, f"{name}.log")
        self.log = open(self.log_path, "a")
        self.env = {
            "PATH": os.environ["PATH"], "HOST": "127.0.0.1", "GRPC_HOST": "127.0.0.1", "DEBUG_HOST": "127.0.0.1",
            "GRPC_PORT": str(self.grpc), "PORT": str(self.http), "DEBUG_PORT": str(self.debug), "USE_STATSD": "false",
            "LOG_LEVEL": os.environ.get("LOG_LEVEL", "warn"), "TOLLKEEPER_RLQS": "true", **dict(settings),
        }
        if redis:
            self.env |= {"BACKEND_TYPE": "redis", "REDIS_URL": f"127.0.0.1:{redis.port}"}
        self.start()

    def start(self, wait=True):
        program = [sys.executable] if self.binary.endswith(".py") else []
        self.process = start_process([*program, self.binary, "serve", "--config", str(self.rules)], self.env, self.log)
        if wait:
            wait_for_port(self.grpc, self.process, self.binary)


def replaced(text, old, new):
    if old not in text:
        raise SystemExit(f"envoy/quota.yaml has changed, it has no {old!r}")
    return text.replace(old, new)


RATE_LIMIT_FILTER = """- name: envoy.filters.http.ratelimit
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
                      domain: quota
                      timeout: 1s
                      rate_limit_service:
                        transport_api_version: V3
                        grpc_service: { envoy_grpc: { cluster_name: tollkeeper } }
"""
RATE_LIMIT_ACTIONS = """domains: ["*"]
                      rate_limits: [{ actions: [{ request_headers: { header_name: HEADER, descriptor_key: user } }] }]
"""


def bootstrap(ports, no_assignment="DENY_ALL", expired="none", filter_kind="quota", header="x-user",
              is_direct=True):
    """envoy/quota.yaml with other ports, and with these changes.

    `no_assignment` replaces that of users, ALLOW_ALL. `expired` is `none` or `fallback`: without a fallback the bound
    is exact at all times. The filter is `quota`, `ratelimit` or `none`. By default routes answer directly, so that a
    request is one hop; the filter `ratelimit` ignores such routes.
    """
    text = (ROOT / "envoy/quota.yaml").read_text()
    for shipped, own in ports.items():
        text = replaced(text, f"port_value: {shipped} ", f"port_value: {own} ")
    text = replaced(text, "blanket_rule: ALLOW_ALL", f"blanket_rule: {no_assignment}")
    if is_direct:
        text = replaced(text, "route: { cluster: upstream }", "direct_response: { status: 200 }")
    text = replaced(text, "header_name: x-user", f"header_name: \"{header}\"")
    if expired == "none":
        text = re.sub(r"( +)expired_assignment_behavior:\n(\1 +.*\n)+", "", text)
    if filter_kind != "quota":
        first = text.index("- name: envoy.filters.http.rate_limit_quota")
        last = text.index("- name: envoy.filters.http.router")
        text = text[:first] + (RATE_LIMIT_FILTER + " " * 18 if filter_kind == "ratelimit" else "") + text[last:]
        first = text.index("- match: { path: /health }")
        text = text[:first] + text[text.index("- match: { prefix: / }"):]
        if filter_kind == "ratelimit":
            actions = RATE_LIMIT_ACTIONS.replace("HEADER", f'"{header}"')
            text = text.replace('domains: ["*"]\n', actions, 1)
    return text


class Envoy(Process):
    """An Envoy with ports of its own; `target` is the port of the tollkeeper, or of a link to it."""

    def __init__(self, binary, directory, name, target, **changes):
        self.binary, self.name = binary, name
        self.port, self.admin = next(PORTS), next(PORTS)
        ports = {10000: self.port, 10001: next(PORTS), 9901: self.admin, 8081: target}
        self.config = pathlib.Path(directory, f"{name}.yaml")
        self.config.write_text(bootstrap(ports, **changes))
        self.log = open(pathlib.Path(directory, f"{name}.log"), "a")
        self.start()

    def start(self):
        self.process = start_process([self.binary, "-c", str(self.config), "--use-dynamic-base-id", "--concurrency",
                                      "1", "--log-level", "error"], {"PATH": os.environ["PATH"]}, self.log)
        wait_for_port(self.port, self.process, self.name)

    def stat(self, name):
        """A counter; 0 if it does not exist, or Envoy does not run."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/stats?filter=^{name}$", timeout=2) as answer:
                return int(answer.read().decode().rpartition(": ")[2] or 0)
        except OSError:
            return 0


class Fleet:
    """Tollkeepers and Envoys; each Envoy calls one tollkeeper, through a link of its own if `links`."""

    def __init__(self, options, directory, rules, redis=False, replicas=1, envoys=3, links=False, **changes):
        self.options, self.directory, self.changes = options, directory, changes
        self.rules = pathlib.Path(directory, "rules.yaml")
        self.rules.write_text(rules)
        self.redis = Redis(directory) if redis else None
        settings = {"TOLLKEEPER_REPLICAS": str(replicas)} if redis else {}
        self.servers = [Tollkeeper(options.binary, directory, f"tollkeeper-{n}", self.rules, self.redis, settings)
                        for n in range(replicas)]
        # The first two Envoys call the first replica.
        self.targets = [self.servers[min(len(self.servers) - 1, n // 2)].grpc for n in range(3)]
        self.links = [Link(target, next(PORTS)) for target in self.targets] if links else []
        if links:
            time.sleep(0.2)
        self.envoys = [None] * 3
        for n in range(envoys):
            self.start_envoy(n)

    def start_envoy(self, number):
        target = self.links[number].port if self.links else self.targets[number]
        self.envoys[number] = Envoy(self.options.envoy, self.directory, f"envoy-{number}", target, **self.changes)

    def change_rules(self, rules):
        new = self.rules.with_suffix(".new")
        new.write_text(rules)
        new.rename(self.rules)

    def streams(self):
        """Streams and failed connections of each Envoy. More than one stream means that reports were lost."""
        running = [envoy for envoy in self.envoys if envoy and envoy.is_running()]
        return [{"streams": envoy.stat("cluster.tollkeeper.upstream_rq_total"),
                 "lost by keepalive": envoy.stat("cluster.tollkeeper.http2.keepalive_timeout"),
                 "not connected": envoy.stat("cluster.tollkeeper.upstream_cx_connect_fail")} for envoy in running]

    def stop(self):
        """Ends the processes of this fleet."""
        processes = [one for one in [*self.envoys, *self.servers, self.redis] if one and one.process]
        for one in processes:
            one.resume()
            one.kill(signal.SIGKILL)
