"""The checks of run.sh: tollkeeper in a real cluster, installed and disturbed as a platform engineer would.

    checks.py PROGRAMS SCRATCH CGROUP [CHECK...]

Each check prints rows of a table: what was done, how many calls there were, how many passed without a decision or failed, and
how many may. Calls are made through Envoys with a headless Service and with a cluster address, under DNS answers that are
cached for 30 s.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request

import workloads
from cluster import NODES, Cluster, run, wait_for

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(HERE))
CHART = os.path.join(REPOSITORY, "deploy/chart")
HELM = os.environ.get("TOLLKEEPER_TEST_HELM", "helm")
KUSTOMIZE = os.environ.get("TOLLKEEPER_TEST_KUSTOMIZE", "kustomize")
NAMESPACE = "limits"
SELECTOR = "app.kubernetes.io/name=tollkeeper,app.kubernetes.io/instance=tollkeeper"
SERVICE = f"tollkeeper.{NAMESPACE}.svc.cluster.local"
ADDRESS = f"tollkeeper-address.{NAMESPACE}.svc.cluster.local"
CALLS_PER_SECOND = int(os.environ.get("CALLS_PER_SECOND", "200"))
EXACT_LIMIT = 500
# Calls that are made later than this say more about the machine than about the cluster.
BUSY_MILLISECONDS = 500

RULES = f"""domain: edge
descriptors:
- key: user
  rate_limit: {{ unit: hour, requests_per_unit: 100000000 }}
- key: exact
  rate_limit: {{ unit: hour, requests_per_unit: {EXACT_LIMIT} }}
"""
WRONG_RULES = RULES.replace("unit: hour", "unit: huor")

# Calls without a decision when a process is killed: those of a second, until health checks tell; retries leave few.
KILL_ALLOWED = {"headless": CALLS_PER_SECOND, "address": 3 * CALLS_PER_SECOND, "ejecting": CALLS_PER_SECOND, "retrying": 5}

# What the checks share: three replicas, counters in a Redis with a password and TLS.
VALUES = {
    "image": {"repository": workloads.TOLLKEEPER, "tag": "1", "pullPolicy": "Never"},
    "rules": {"edge.yaml": RULES},
    "replicaCount": 3,
    "redis": {"url": "redis.stores.svc.cluster.local:6379", "tls": {"enabled": True, "existingSecret": "redis-tls"}},
    "existingSecret": "limits",
    "existingSecretKeys": {"redisAuth": "redis"},
    "networkPolicy": {"enabled": True},
    "ruleCheck": {"ttlSecondsAfterFinished": 20},
    "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
    # The same replicas behind a cluster address.
    "extraObjects": [{
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "tollkeeper-address"},
        "spec": {"selector": {"app.kubernetes.io/name": "tollkeeper", "app.kubernetes.io/instance": "tollkeeper"},
                 "ports": [{"name": "grpc", "port": 8081, "targetPort": "grpc", "appProtocol": "grpc"}]}}],
}
# What an Envoy may have beside its health checks against replicas that die. The longest pause is also the time limit of a try.
RETRIES = {"retry_policy": {
    "num_retries": 2, "retry_on": "connect-failure,refused-stream,reset,unavailable",
    "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.3s"}}}
MORE_RETRIES = {"circuit_breakers": {"thresholds": [{"max_retries": 100}]}}
OUTLIERS = {"outlier_detection": {
    "consecutive_5xx": 3, "consecutive_gateway_failure": 3, "split_external_local_origin_errors": True,
    "consecutive_local_origin_failure": 2, "interval": "0.5s", "base_ejection_time": "5s", "max_ejection_percent": 67}}
ENVOYS = {
    "headless": {"address": SERVICE},
    "address": {"address": ADDRESS},
    "retrying": {"address": SERVICE, "grpc_service": RETRIES, "tollkeeper": MORE_RETRIES},
    "ejecting": {"address": SERVICE, "tollkeeper": OUTLIERS},
    "default20ms": {"address": SERVICE, "timeout": "0.02s"},
    "retrying20ms": {"address": SERVICE, "timeout": "0.02s", "grpc_service": RETRIES, "tollkeeper": MORE_RETRIES},
}


class Table:
    """Rows of results, printed as they come."""

    WIDTHS = (46, 13, 8, 10, 7, 8)

    def __init__(self):
        self.failures = 0
        self.line("WHAT", "THROUGH", "CALLS", "UNLIMITED", "FAILED", "ALLOWED", "")

    def line(self, *cells):
        padded = [str(cell).ljust(width) for cell, width in zip(cells, self.WIDTHS)]
        print(" ".join([*padded, *map(str, cells[len(padded):])]), flush=True)

    def calls(self, what, envoy, counts, allowed):
        """A row of counted calls; `allowed` is the greatest number that may go wrong, or None if it is only told."""
        wrong = counts["unlimited"] + counts["failed"]
        fails = counts["calls"] == 0 or (allowed is not None and wrong > allowed)
        self.failures += fails
        note = f"FAILED at {counts['wrong_at'][:5]} s" if fails else "ok"
        if counts["late_ms"] > BUSY_MILLISECONDS:
            note += f"; this machine was too busy: calls were made {counts['late_ms']} ms late"
        limit = "told" if allowed is None else allowed
        self.line(what, envoy, counts["calls"], counts["unlimited"], counts["failed"], limit, note)

    def fact(self, what, is_so, detail=""):
        """A row of something that must be so."""
        self.failures += not is_so
        self.line(what, "", "", "", "", "", ("ok" if is_so else "FAILED") + (f": {detail}" if detail else ""))


class Load:
    """Calls through Envoys, from `with` to its end."""

    def __init__(self, checks, what, allowed=0, envoys=("headless", "address"), settle_seconds=3):
        self.checks, self.what, self.allowed = checks, what, allowed
        self.envoys, self.settle_seconds = envoys, settle_seconds

    def __enter__(self):
        self.before = {envoy: self.checks.envoy_counts(envoy) for envoy in self.envoys}
        self.processes = {}
        for envoy in self.envoys:
            address = f"{self.checks.envoy_address(envoy)}:{workloads.LISTENERS['clients']}"
            command = [sys.executable, os.path.join(HERE, "load.py"), address, str(CALLS_PER_SECOND)]
            self.processes[envoy] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        time.sleep(3)
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            time.sleep(self.settle_seconds)
        for envoy, process in self.processes.items():
            counts = json.loads(process.communicate()[0])
            if kind is None:
                allowed = self.allowed if not isinstance(self.allowed, dict) else self.allowed.get(envoy)
                self.checks.table.calls(self.what, envoy, counts, allowed)
                self.compare(envoy, counts)

    def compare(self, envoy, counts):
        """Envoy's own counters must say the same."""
        after = self.checks.envoy_counts(envoy)
        let_through = after["failure_mode_allowed"] - self.before[envoy]["failure_mode_allowed"]
        if let_through != counts["unlimited"] and not counts["failed"]:
            self.checks.table.fact(f"{self.what}: Envoy counts the same", False,
                                   f"failure_mode_allowed {let_through}, calls {counts['unlimited']}")


class Checks:
    """The cluster with what runs in it, and one method for each check."""

    def __init__(self, cluster, scratch):
        self.cluster, self.scratch, self.table = cluster, scratch, Table()

    # --- tools -------------------------------------------------------------------------------------------------------

    def helm(self, *arguments, values=None, check=True):
        """Runs Helm; returns its standard output, or with check=False output and error of the process."""
        if values is not None:
            arguments = (*arguments, "--values", self.cluster.write("values.json", values))
        done = subprocess.run([HELM, "--namespace", NAMESPACE, *arguments], capture_output=True, text=True)
        if not check:
            return done
        if done.returncode:
            raise RuntimeError(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def upgrade(self, changes=None, wait=True, check=True, *arguments):
        """Installs or upgrades the release to VALUES with changes."""
        waiting = ["--wait", "--timeout=5m"] if wait else []
        return self.helm("upgrade", "--install", "tollkeeper", CHART, *waiting, *arguments,
                         values=merged(VALUES, changes or {}), check=check)

    def pods(self, selector=SELECTOR, namespace=NAMESPACE):
        return self.cluster.get("pods", "--namespace", namespace, "--selector", selector)["items"]

    def ready_pods(self, selector=SELECTOR):
        return [pod for pod in self.pods(selector) if "deletionTimestamp" not in pod["metadata"] and is_ready(pod)]

    def settle(self, replicas=3):
        """Waits until that many replicas are there and all others gone."""
        def settled():
            pods = self.pods()
            return len(pods) == replicas and all(is_ready(pod) for pod in pods)
        wait_for(f"{replicas} replicas", settled, 180)

    def envoy_address(self, name):
        return self.pods(f"app=envoy-{name.lower()}", "gateways")[0]["status"]["podIP"]

    def envoy_counts(self, name):
        url = f"http://{self.envoy_address(name)}:{workloads.LISTENERS['admin']}/stats?filter=ratelimit&format=json"
        stats = json.load(urllib.request.urlopen(url, timeout=10))["stats"]
        values = {stat["name"].rsplit(".", 1)[-1]: stat["value"] for stat in stats if "name" in stat}
        return {name: values.get(name, 0) for name in ("ok", "error", "over_limit", "failure_mode_allowed")}

    def page(self, pod, port, path):
        """Status and text of a page of a pod."""
        try:
            with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, pod, name):
        text = self.page(pod, 9090, "/metrics")[1]
        found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    # --- the surroundings --------------------------------------------------------------------------------------------

    def prepare(self):
        """CoreDNS, Redis, the Envoys, and the release."""
        cluster = self.cluster
        cluster.apply(*workloads.coredns(), namespace="kube-system")
        cluster.apply(workloads.namespace(NAMESPACE, "restricted"), workloads.namespace("stores", "baseline"),
                      workloads.namespace("gateways", "baseline"))
        cluster.certificate("redis", "DNS:redis.stores.svc.cluster.local")
        files = {"ca.crt": "ca.crt", "tls.crt": "redis.crt", "tls.key": "redis.key"}
        files = {name: open(os.path.join(self.scratch, file), encoding="utf-8").read() for name, file in files.items()}
        cluster.apply(workloads.secret("redis-tls", files), *workloads.redis(), namespace="stores")
        cluster.apply(workloads.secret("redis-tls", {"ca.crt": files["ca.crt"]}),
                      workloads.secret("limits", {"redis": workloads.PASSWORD}), namespace=NAMESPACE)
        wait_for("CoreDNS", lambda: self.is_available("coredns", "kube-system"))
        self.upgrade()
        for name, options in ENVOYS.items():
            cluster.apply(*workloads.envoy(f"envoy-{name.lower()}", **options), namespace="gateways")
        for name in ENVOYS:
            wait_for(f"Envoy {name}", lambda: self.is_available(f"envoy-{name.lower()}", "gateways"))
        self.settle()

    def is_available(self, name, namespace):
        return self.cluster.get("deployment", name, "--namespace", namespace)["status"].get("availableReplicas")

    # --- checks without load -----------------------------------------------------------------------------------------

    def check_install(self):
        """The chart as people install it, each in the namespace with Pod Security restricted."""
        image = VALUES["image"]
        for what, values in {
            "chart, counters in memory": {"image": image},
            "chart, cluster address": merged(VALUES, {"service": {"headless": False}, "extraObjects": []}),
            "chart, strategy Recreate": {"image": image, "strategy": {"type": "Recreate"}},
            "chart, autoscaler": merged(VALUES, {"autoscaling": {"enabled": True}, "extraObjects": []}),
        }.items():
            done = self.helm("install", "other", CHART, "--wait", "--timeout=2m", values=values, check=False)
            self.table.fact(f"{what}: installed", done.returncode == 0, done.stderr.strip()[-300:])
            test = self.helm("test", "other", "--logs", check=False)
            told = "POD LOGS" in test.stdout and "source=helm" in test.stdout
            self.table.fact(f"{what}: helm test --logs", test.returncode == 0 and told, test.stderr.strip()[-300:])
            self.helm("uninstall", "other", "--wait")
        parent = os.path.join(self.scratch, "parent")
        os.makedirs(f"{parent}/charts", exist_ok=True)
        shutil.copytree(CHART, f"{parent}/charts/tollkeeper", dirs_exist_ok=True)
        self.cluster.write("parent/Chart.yaml", {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [
            {"name": "tollkeeper", "version": "*", "condition": "tollkeeper.enabled"}]})
        done = self.helm("install", "parent", parent, "--wait", "--timeout=2m", values={"tollkeeper": {"image": image}}, check=False)
        self.table.fact("chart, part of another: installed", done.returncode == 0, done.stderr.strip()[-300:])
        self.helm("uninstall", "parent", "--wait")

    def check_manifests(self):
        """The plain manifests, with the image's name replaced as their readers do."""
        for folder, replicas in (("kubernetes", 1), ("kubernetes-redis", 3)):
            overlay = os.path.join(self.scratch, f"overlay-{folder}")
            os.makedirs(overlay, exist_ok=True)
            base = os.path.relpath(os.path.join(REPOSITORY, "deploy", folder), overlay)
            self.cluster.write(f"overlay-{folder}/kustomization.yaml", {
                "resources": [base], "images": [{"name": "tollkeeper", "newName": workloads.TOLLKEEPER, "newTag": "1"}]})
            self.cluster.apply(workloads.namespace("plain", "restricted"))
            manifests = run(KUSTOMIZE, "build", overlay)
            self.cluster.kubectl("apply", "--namespace", "plain", "--filename=-", input=manifests)
            def served(replicas=replicas):
                status = self.cluster.get("deployment", "tollkeeper", "--namespace", "plain")["status"]
                return status.get("readyReplicas", 0) == replicas
            try:
                wait_for("replicas", served, 120)
                self.table.fact(f"deploy/{folder}: {replicas} ready", True)
            except RuntimeError as error:
                self.table.fact(f"deploy/{folder}: {replicas} ready", False, error)
            self.cluster.kubectl("delete", "namespace", "plain", "--wait")

    def check_rules(self):
        """Changed and wrong rules: past the hook and through it."""
        def change(text):
            patch = json.dumps({"data": {"edge.yaml": text}})
            self.cluster.kubectl("patch", "configmap", "tollkeeper-rules", f"--namespace={NAMESPACE}", f"--patch={patch}")
        start = time.monotonic()
        with Load(self, "ConfigMap changed"):
            change(RULES.replace("100000000", "99999999"))
            wait_for("new rules", lambda: self.verdict_limits() == {99999999}, 150)
        self.table.fact("ConfigMap changed: applied by all", True, f"{time.monotonic() - start:.0f} s")
        before = [self.config_errors(pod) for pod in self.ready_pods()]
        with Load(self, "ConfigMap with wrong rules"):
            change(WRONG_RULES)
            wait_for("errors of all replicas", lambda: all(
                self.config_errors(pod) > old for pod, old in zip(self.ready_pods(), before)), 150)
        self.table.fact("wrong rules: old ones stay", self.verdict_limits() == {99999999}, "and the metric of errors counts")
        self.table.fact("wrong rules: replicas stay ready", len(self.ready_pods()) == 3)
        refused = self.upgrade({"rules": {"edge.yaml": WRONG_RULES}}, True, False)
        told = "huor" in refused.stdout + refused.stderr
        self.table.fact("helm upgrade with wrong rules: refused", refused.returncode != 0)
        self.table.fact("helm upgrade with wrong rules: says why", told, "" if told else refused.stderr.strip()[-400:])
        job = ["get", "job,pod", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/name=tollkeeper-rule-check", "--output=name"]
        wait_for("the job to be deleted", lambda: not self.cluster.kubectl(*job).strip(), 90)
        self.table.fact("helm upgrade with wrong rules: job goes", True, "after ttlSecondsAfterFinished")
        self.upgrade()

    def config_errors(self, pod):
        return self.metric(pod, "ratelimit_service_config_load_error") or 0

    def verdict_limits(self, calls=12):
        """Limits that answers to some calls name."""
        url = f"http://{self.envoy_address('headless')}:{workloads.LISTENERS['clients']}/"
        found = set()
        for _ in range(calls):
            with urllib.request.urlopen(urllib.request.Request(url, headers={"x-user": "ann"}), timeout=5) as answer:
                named = re.match(r"\d+", answer.headers.get("x-ratelimit-limit", ""))
                found.add(int(named[0]) if named else None)
        return found

    def check_exact(self):
        """A limit is exact over three replicas."""
        url = f"http://{self.envoy_address('headless')}:{workloads.LISTENERS['clients']}/"
        admitted = 0
        user = f"user-{time.time()}"
        for _ in range(EXACT_LIMIT * 2):
            try:
                urllib.request.urlopen(urllib.request.Request(url, headers={"x-exact": user}), timeout=5).close()
                admitted += 1
            except urllib.error.HTTPError:
                pass
        self.table.fact(f"limit of {EXACT_LIMIT} over three replicas", admitted == EXACT_LIMIT, f"{admitted} of {2 * EXACT_LIMIT} admitted")

    # --- checks under load -------------------------------------------------------------------------------------------

    def check_quiet(self):
        with Load(self, "nothing happens"):
            time.sleep(15)

    def check_upgrade(self):
        with Load(self, "helm upgrade to another image"):
            self.upgrade({"image": {"tag": "2"}})
            self.settle()
        with Load(self, "helm rollback"):
            self.helm("rollback", "tollkeeper", "--wait", "--timeout=5m")
            self.settle()
        with Load(self, "image that does not exist, and rollback"):
            self.upgrade({"image": {"tag": "3"}, "ruleCheck": {"enabled": False}}, wait=False)
            time.sleep(15)
            self.helm("rollback", "tollkeeper", "--wait", "--timeout=5m")
            self.settle()

    def check_restart(self):
        for time_of in ("first", "second"):
            with Load(self, f"rollout restart, {time_of}"):
                self.cluster.kubectl("rollout", "restart", "deployment/tollkeeper", f"--namespace={NAMESPACE}")
                self.cluster.kubectl("rollout", "status", "deployment/tollkeeper", f"--namespace={NAMESPACE}")
                self.settle()
        with Load(self, "rollout restart, Envoy waits 20 ms", None, ["default20ms", "retrying20ms"]):
            self.cluster.kubectl("rollout", "restart", "deployment/tollkeeper", f"--namespace={NAMESPACE}")
            self.cluster.kubectl("rollout", "status", "deployment/tollkeeper", f"--namespace={NAMESPACE}")
            self.settle()

    def check_delete(self):
        pod = self.ready_pods()[0]["metadata"]["name"]
        with Load(self, "pod deleted"):
            start = time.monotonic()
            self.cluster.kubectl("delete", "pod", pod, f"--namespace={NAMESPACE}", "--wait")
            seconds = time.monotonic() - start
            self.settle()
        self.table.fact("pod deleted: ends by itself after the drain", 45 <= seconds < 62, f"{seconds:.0f} s of at most 65")
        with Load(self, "all pods deleted at once"):
            self.cluster.kubectl("delete", "pod", "--selector", SELECTOR, f"--namespace={NAMESPACE}", "--wait")
            self.settle()

    def evict(self, pod):
        name = pod["metadata"]["name"]
        body = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}})
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        command = ["kubectl", "create", f"--raw={path}", "--filename=-"]
        return subprocess.run(command, input=body, capture_output=True, text=True)

    def check_evict(self):
        with Load(self, "pod evicted"):
            first, second = self.ready_pods()[:2]
            taken, refused = self.evict(first), self.evict(second)
            self.settle()
        self.table.fact("pod evicted: a second at once is refused", taken.returncode == 0 and "disruption budget" in refused.stderr,
                        refused.stderr.strip()[-120:])

    def check_drain(self):
        nodes = [pod["spec"]["nodeName"] for pod in self.ready_pods()]
        node = max(NODES, key=nodes.count)
        with Load(self, f"node with {nodes.count(node)} of 3 drained"):
            self.cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={SELECTOR}", "--timeout=300s")
            self.settle()
        self.cluster.kubectl("uncordon", node)

    def check_scale(self):
        with Load(self, "helm upgrade to 5, 2 and 3 replicas"):
            for replicas in (5, 2, 3):
                self.upgrade({"replicaCount": replicas})
            self.settle()

    def check_autoscale(self):
        least = [99]
        with Load(self, "autoscaler turned on, of three replicas"):
            self.upgrade({"autoscaling": {"enabled": True, "minReplicas": 2}}, wait=False)
            end = time.monotonic() + 40
            while time.monotonic() < end:
                least[0] = min(least[0], len(self.ready_pods()))
                time.sleep(0.5)
        self.table.fact("autoscaler turned on: replicas stay", least[0] >= 3, f"at least {least[0]} ready")
        self.upgrade()
        self.settle()

    def check_recreate(self):
        done = self.upgrade({"strategy": {"type": "Recreate"}}, True, False)
        self.table.fact("upgrade to strategy Recreate: accepted", done.returncode == 0, done.stderr.strip()[-300:])
        self.upgrade()

    def check_redis(self):
        with Load(self, "Redis gone for 30 s"):
            self.cluster.kubectl("scale", "deployment/redis", "--namespace=stores", "--replicas=0")
            time.sleep(30)
            ready = len(self.ready_pods())
            self.cluster.kubectl("scale", "deployment/redis", "--namespace=stores", "--replicas=1")
            wait_for("Redis", lambda: self.is_available("redis", "stores"))
        self.table.fact("Redis gone: replicas stay ready", ready == 3, f"{ready} of 3")

    def check_readiness(self):
        """A rule with `on_store_error: error` makes /readyz fail without Redis, and /healthcheck not."""
        rules = RULES.replace("requests_per_unit: 100000000", "requests_per_unit: 100000000, on_store_error: error")
        selector = "app.kubernetes.io/name=tollkeeper,app.kubernetes.io/instance=other"
        for path, stays in (("/readyz", False), ("/healthcheck", True)):
            changes = {"rules": {"edge.yaml": rules}, "replicaCount": 1, "extraObjects": [],
                       "probes": {"readiness": {"path": path, "periodSeconds": 1}}}
            self.helm("install", "other", CHART, "--wait", "--timeout=2m", values=merged(VALUES, changes))
            self.cluster.kubectl("scale", "deployment/redis", "--namespace=stores", "--replicas=0")
            time.sleep(20)
            status, text = self.page(self.pods(selector)[0], 8080, "/readyz")
            ready = len(self.ready_pods(selector))
            self.table.fact(f"on_store_error: error, probe {path}, Redis gone", ready == int(stays) and status == 503,
                            f"{ready} of 1 ready; /readyz {status}: {text.strip()}")
            self.cluster.kubectl("scale", "deployment/redis", "--namespace=stores", "--replicas=1")
            wait_for("Redis", lambda: self.is_available("redis", "stores"))
            wait_for("readiness", lambda: len(self.ready_pods(selector)) == 1)
            self.helm("uninstall", "other", "--wait")

    def check_kill(self):
        """SIGKILL, as the kernel sends it: the replica's calls in flight fail, and those until Envoy knows."""
        envoys = ["headless", "address", "ejecting", "retrying"]
        for _ in range(3):
            # Envoy must have an address of each replica: DNS answers may be 30 s old.
            time.sleep(40)
            with Load(self, "process killed (SIGKILL)", KILL_ALLOWED, envoys, 20):
                kill_process(self.ready_pods()[0])
                self.settle()

    def check_limits(self):
        """Limits of the container: a store full of counters stays below the memory limit; what a throttled processor costs."""
        selector = "app.kubernetes.io/name=tollkeeper,app.kubernetes.io/instance=other"
        self.helm("install", "other", CHART, "--wait", "--timeout=2m", values={
            "image": VALUES["image"], "rules": {"edge.yaml": RULES}, "memoryBytes": "32MiB",
            "resources": {"requests": {"cpu": "100m", "memory": "120Mi"}, "limits": {"memory": "120Mi"}}})
        address = f"{self.pods(selector)[0]['status']['podIP']}:8081"
        run(os.environ["TOLLKEEPER_BENCH"], "--addr", address, "--domain", "edge", "--descriptor", "user={key}",
            "--keys", "uniform:100000000", "--duration", "60s")
        pod = self.pods(selector)[0]
        restarts = pod["status"]["containerStatuses"][0]["restartCount"]
        evicted, used = self.metric(pod, "tollkeeper_keys_evicted_total"), self.metric(pod, "process_resident_memory_bytes")
        self.table.fact("memory limit of 120Mi, memoryBytes 32MiB, full", restarts == 0 and evicted > 0,
                        f"{evicted:.0f} counters evicted, {used / (1 << 20):.0f} MiB, {restarts} restarts")
        self.helm("uninstall", "other", "--wait")
        for cpu in ("100m", "20m"):
            self.upgrade({"resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}})
            self.settle()
            with Load(self, f"processor limited to {cpu}", None, ["headless", "default20ms"]):
                time.sleep(30)
            late = max(self.metric(pod, "tollkeeper_scheduler_lag_seconds") or 0 for pod in self.ready_pods())
            self.table.fact(f"processor limited to {cpu}: scheduler lag", True, f"at most {1000 * late:.0f} ms")
        self.upgrade()
        self.settle()

    def check_memory(self):
        for pod in self.ready_pods():
            used = self.metric(pod, "process_resident_memory_bytes")
            self.table.fact("memory of a replica", used is not None and used < 64 << 20, f"{(used or 0) / (1 << 20):.1f} MiB")


def merged(values, changes):
    """Values with changes laid over them, maps within maps."""
    both = dict(values)
    for key, value in changes.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def is_ready(pod):
    conditions = {it["type"]: it["status"] for it in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def kill_process(pod):
    """Kills the process of a pod's first container, which is in a process namespace below this one."""
    uid = pod["metadata"]["uid"]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = open(f"/proc/{entry}/cgroup", encoding="utf-8").read()
            program = os.readlink(f"/proc/{entry}/exe")
        except OSError:
            continue
        if uid in groups and program.endswith("/tollkeeper"):
            os.kill(int(entry), signal.SIGKILL)
            return
    raise RuntimeError(f"no process of pod {pod['metadata']['name']}")


def main():
    programs, scratch, cgroup, *names = sys.argv[1:]
    cluster = Cluster(programs, scratch, cgroup)
    images = workloads.write_images(scratch, programs, os.environ["TOLLKEEPER_TEST_PROGRAM"])
    start = time.monotonic()
    cluster.start(images)
    version = json.loads(cluster.kubectl("version", "--output=json"))["serverVersion"]["gitVersion"]
    print(f"Kubernetes {version}, {len(NODES)} nodes, after {time.monotonic() - start:.0f} s", flush=True)
    checks = Checks(cluster, scratch)
    checks.prepare()
    known = [name.removeprefix("check_") for name in vars(Checks) if name.startswith("check_")]
    for name in names or known:
        try:
            getattr(checks, f"check_{name}")()
        except Exception as error:
            traceback.print_exc()
            checks.table.fact(f"check {name} ran to its end", False, str(error)[-500:])
    print(f"{checks.table.failures} failures, after {time.monotonic() - start:.0f} s")
    sys.exit(min(checks.table.failures, 1))


if __name__ == "__main__":
    main()
