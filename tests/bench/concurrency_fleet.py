"""Real processes for the bench of concurrent limits: Envoys with envoy/concurrency.yaml, tollkeepers, a Redis."""

import collections
import json
import os
import pathlib
import re
import signal
import urllib.request

from quota_fleet import PORTS, ROOT, Redis, Tollkeeper, wait_for_port
from region_fleet import Process, start_process

DOMAIN = "concurrency"


def replaced(text, old, new):
    if old not in text:
        raise SystemExit(f"envoy/concurrency.yaml has changed, it has no {old!r}")
    return text.replace(old, new)


def bootstrap(ports, servers, heartbeat_s):
    """envoy/concurrency.yaml with other ports, a backend in place of its upstream, all replicas, retries and redirects.

    Streams may last an hour.
    """
    text = (ROOT / "envoy/concurrency.yaml").read_text()
    upstream = text.index("    - name: upstream\n      address")
    text = text[:upstream] + text[text.index("  clusters:"):]
    for shipped, own in ports.items():
        text = replaced(text, f"port_value: {shipped} ", f"port_value: {own} ")
    line = re.search(r"\n *- endpoint: .*port_value: 8081 .*", text).group(0)
    text = text.replace(line, "".join(line.replace("8081", str(port)) for port in servers))
    text = replaced(text, "interval: 5s\n          no_traffic_interval: 5s",
                    f"interval: {heartbeat_s}s\n          no_traffic_interval: {heartbeat_s}s")
    text = replaced(text, "timeout: 0.25s\n                      # What", "timeout: 1s\n                      # What")
    text = replaced(text, "590s", "3600s")
    # Apart from the 503 of an upstream that resets.
    text = replaced(text, "ServiceUnavailable", "GatewayTimeout")
    return replaced(text, "cluster: upstream, timeout: 0s", "cluster: upstream, timeout: 0s, "
                    "retry_policy: { retry_on: retriable-status-codes, retriable_status_codes: [502], "
                    "num_retries: 2 }, "
                    "internal_redirect_policy: { max_internal_redirects: 1, redirect_response_codes: [302] }")


class Envoy(Process):
    """An Envoy with ports of its own that calls all servers."""

    def __init__(self, binary, directory, name, servers, backend, heartbeat_s):
        self.binary, self.name, self.starts = binary, name, 0
        self.port, self.admin = next(PORTS), next(PORTS)
        ports = {10000: self.port, 10001: backend, 9901: self.admin}
        self.config = pathlib.Path(directory, f"{name}.yaml")
        self.config.write_text(bootstrap(ports, servers, heartbeat_s))
        self.log = open(pathlib.Path(directory, f"{name}.log"), "a")
        self.start()

    def start(self):
        self.starts += 1
        env = {"PATH": os.environ["PATH"], "BOOT": f"{self.name}-{self.starts}"}
        self.process = start_process([self.binary, "-c", str(self.config), "--use-dynamic-base-id", "--concurrency",
                                      "2", "--log-level", "error"], env, self.log)
        wait_for_port(self.port, self.process, self.name)

    def post(self, path):
        url = f"http://127.0.0.1:{self.admin}{path}"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5).read()


class Fleet:
    """Two Envoys that call all replicas."""

    def __init__(self, options, directory, backend, limit, *, replicas=2, redis=True, holder_timeout_s=5,
                 max_duration="10m"):
        self.options, self.directory, self.max_duration = options, directory, max_duration
        self.rules = pathlib.Path(directory, "rules.yaml")
        self.rules.write_text(self.rule_text(limit))
        self.redis = Redis(directory) if redis else None
        settings = {"TOLLKEEPER_HOLDER_TIMEOUT": f"{holder_timeout_s}s", "TOLLKEEPER_REPLICAS": str(replicas),
                    "TOLLKEEPER_RLQS": "false", "TOLLKEEPER_STORE_TIMEOUT": "0.5s"}
        if not redis:
            settings.pop("TOLLKEEPER_REPLICAS")
        self.servers = [Tollkeeper(options.binary, directory, f"tollkeeper-{n}", self.rules, self.redis, settings)
                        for n in range(replicas)]
        ports = [server.grpc for server in self.servers]
        heartbeat_s = round(holder_timeout_s / 6, 3)
        self.envoys = [Envoy(options.envoy, directory, f"envoy-{n}", ports, backend, heartbeat_s) for n in range(2)]

    def restart_redis(self):
        """Kills Redis and starts an empty one at its port."""
        self.redis.kill()
        self.redis.start()

    def rule_text(self, limit):
        return (f"domain: {DOMAIN}\ndescriptors:\n- key: user\n  rate_limit: {{concurrent: {limit}, "
                f"max_duration: {self.max_duration}, on_store_error: error}}\n")

    def change_limit(self, limit):
        new = self.rules.with_suffix(".new")
        new.write_text(self.rule_text(limit))
        new.rename(self.rules)

    def explain(self, user, server=0):
        """The explanation of a user's descriptor; None while the server does not answer."""
        body = {"domain": DOMAIN, "descriptors": [{"entries": [{"key": "user", "value": user}]}]}
        url = f"http://127.0.0.1:{self.servers[server].debug}/explain"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                return json.load(answer)["descriptors"][0]
        except OSError:
            return None

    def slots(self, user, server=0):
        """Slots in use and tombstones of a user; None while the server does not answer."""
        explained = self.explain(user, server)
        return explained["slots"][0] if explained and explained.get("slots") else None

    def slot_counts(self):
        """Counts of slots since the start, over all servers."""
        total = collections.Counter()
        for server in self.servers:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.debug}/rules", timeout=3) as answer:
                for rule in json.load(answer)["rules"]:
                    total.update(rule["slots"])
        return total

    def stop(self):
        """Ends the processes of this fleet."""
        for one in [*self.envoys, *self.servers, self.redis]:
            if one and one.process:
                one.resume()
                one.kill(signal.SIGKILL)
