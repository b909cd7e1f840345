"""CPU of Envoy and tollkeeper for the same load, decided by RLS, by RLQS and not at all."""

import json
import os
import shutil
import subprocess
import tempfile

from quota_fleet import Fleet, cpu_seconds

# Requests a second: much less than a core of Envoy serves, so that all kinds get the same load.
RATES = (500, 2000)
CONNECTIONS = 10
KINDS = ("none", "ratelimit", "quota")
# A bucket is the value of :path. The limit is above the load: every request passes, as most do.
KEYS = (1, 100)
RULES = """domain: quota
descriptors:
- {key: user, rate_limit: {unit: second, requests_per_unit: 100000}}
- {key: caller, value: anonymous, rate_limit: {unit: second, requests_per_unit: 100000}}
"""


def load(envoy, directory, keys, rate, seconds):
    """Sends requests at a rate; returns their number."""
    uris = os.path.join(directory, "uris")
    with open(uris, "w") as file:
        file.write("".join(f"http://127.0.0.1:{envoy.port}/{key}\n" for key in range(keys)))
    arguments = ["h2load", "--h1", "-i", uris, "-c", str(CONNECTIONS), "-t", "1", "-D", str(seconds),
                 "--rps", str(rate // CONNECTIONS)]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    status = next(part for part in output.splitlines() if part.startswith("status codes:"))
    passed = int(status.split()[2])
    if not passed or " 0 4xx, 0 5xx" not in status:
        raise SystemExit(f"not every request passed: {status}")
    return passed


def measure_kind(options, kind, keys, rate):
    with tempfile.TemporaryDirectory(prefix="tollkeeper-quota.") as directory:
        # First requests pass: with DENY_ALL those before the assignment would be other work.
        fleet = Fleet(options, directory, RULES, envoys=1, filter_kind=kind, header=":path", no_assignment="ALLOW_ALL",
                      is_direct=False)
        try:
            envoy, server = fleet.envoys[0], fleet.servers[0]
            load(envoy, directory, keys, rate, 5)
            before = [cpu_seconds(one.process.pid) for one in (envoy, server)]
            requests = load(envoy, directory, keys, rate, options.seconds)
            if kind == "ratelimit" and envoy.stat("cluster.upstream.ratelimit.ok") < requests:
                raise SystemExit("Envoy did not ask for each request")
            after = [cpu_seconds(one.process.pid) for one in (envoy, server)]
        finally:
            fleet.stop()
    spent = [round((last - first) * 100_000 / requests, 2) for first, last in zip(before, after)]
    return {"filter": kind, "keys": keys, "rate": rate, "requests": requests, "envoy_s": spent[0],
            "tollkeeper_s": spent[1]}


def measure(options):
    if not shutil.which("h2load"):
        raise SystemExit("h2load is missing (Debian: apt-get install nghttp2-client)")
    rows = []
    if not options.json:
        print("CPU seconds for 100 000 requests")
        print(f"{'keys':>5} {'rate':>6} {'filter':10} {'requests':>9} {'Envoy':>7} {'tollkeeper':>11}")
    for keys in KEYS:
        for rate in RATES:
            for kind in KINDS:
                row = measure_kind(options, kind, keys, rate)
                rows.append(row)
                if not options.json:
                    print(f"{keys:5} {rate:6} {kind:10} {row['requests']:9} {row['envoy_s']:7} "
                          f"{row['tollkeeper_s']:11}", flush=True)
    if options.json:
        print(json.dumps(rows))
    return 0
