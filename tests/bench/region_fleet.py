"""Real processes of three regions for fault schedules: redis-servers with clocks that can be set, links, replicas."""

import atexit
import ctypes
import glob
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import urllib.request

from delayed_link import Link

REGIONS = ["eu", "us", "ap"]
ALGORITHMS = ["fixed_window", "sliding_window_counter", "token_bucket"]
PERIOD_S = 10
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
STARTED = []


def unused_ports():
    """Yields ports below those of outgoing connections, so that a process can be restarted at its port."""
    source = random.SystemRandom()
    while True:
        port = source.randrange(10_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


PORTS = unused_ports()


def end_with_parent():
    """Lets a new process end with the thread that started it, whatever ends that."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_process(arguments, env, log):
    process = subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               preexec_fn=end_with_parent)
    STARTED.append(process)
    return process


@atexit.register
def end_processes():
    for process in STARTED:
        if process.poll() is None:
            process.kill()
    for process in STARTED:
        process.wait()
        for left in glob.glob(f"/dev/shm/*faketime_s[eh]m_{process.pid}"):
            os.unlink(left)


def libfaketime():
    found = sorted(glob.glob("/usr/lib/*/faketime/libfaketime.so.1") + glob.glob("/usr/lib/faketime/libfaketime.so.1"))
    if not found:
        raise SystemExit("libfaketime.so.1 is missing (Debian: apt-get install faketime)")
    return found[0]


class Process:
    """A process that can be killed, paused and started again."""

    process = None

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def kill(self, how=signal.SIGKILL):
        if self.is_running():
            self.process.send_signal(how)
            if how == signal.SIGKILL:
                self.process.wait()

    def pause(self):
        self.kill(signal.SIGSTOP)

    def resume(self):
        self.kill(signal.SIGCONT)


class Redis(Process):
    """A redis-server that writes each command down before it answers, so that it loses nothing when it is killed."""

    def __init__(self, directory, name):
        self.directory = pathlib.Path(directory, name)
        self.directory.mkdir()
        self.clock = pathlib.Path(directory, f"{name}.clock")
        self.log = open(pathlib.Path(directory, f"{name}.log"), "a")
        self.port = next(PORTS)
        self.set_clock(0)
        self.start()

    def start(self, empty=False):
        if self.is_running():
            return
        if empty:
            shutil.rmtree(self.directory)
            self.directory.mkdir()
        # libc before jemalloc, which reads the clock while libfaketime starts.
        env = {"PATH": os.environ["PATH"], "LD_PRELOAD": f"{libfaketime()} libc.so.6", "FAKETIME_CACHE_DURATION": "1",
               "FAKETIME_TIMESTAMP_FILE": str(self.clock), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        self.process = start_process(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory),
             "--save", "", "--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0",
             "--repl-diskless-sync-delay", "0"], env, self.log)

    def restart_empty(self):
        self.kill()
        self.start(empty=True)

    def set_clock(self, offset_s):
        """Sets the clock within a second."""
        new = self.clock.with_suffix(".new")
        new.write_text(f"{offset_s:+}\n")
        new.rename(self.clock)

    def command(self, *words):
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            parts = [f"${len(word)}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            answer = connection.recv(65536).decode()
            if answer.startswith("-"):
                raise OSError(answer)
            return answer


class Replica(Process):
    def __init__(self, fleet, region, name, redis, settings=()):
        self.fleet, self.region, self.redis = fleet, region, redis
        self.http, self.debug, self.grpc = next(PORTS), next(PORTS), next(PORTS)
        self.settings = dict(settings)
        self.log = open(pathlib.Path(fleet.directory, f"{name}.log"), "a")
        self.start()

    def start(self):
        if self.is_running():
            return
        env = {
            "PATH": os.environ["PATH"], "BACKEND_TYPE": "redis", "REDIS_URL": f"127.0.0.1:{self.redis.port}",
            "TOLLKEEPER_REGION": self.region, "TOLLKEEPER_REGIONS": ",".join(REGIONS),
            "TOLLKEEPER_GLOBAL_REDIS_URL": f"127.0.0.1:{self.fleet.links[self.region].port}",
            "TOLLKEEPER_STORE_TIMEOUT": "100ms", "TOLLKEEPER_REPLICAS": "2", "LOG_LEVEL": "warn",
            "USE_STATSD": "false", "GRPC_PORT": str(self.grpc), "PORT": str(self.http), "DEBUG_PORT": str(self.debug),
            **self.fleet.settings, **self.settings,
        }
        self.process = start_process([self.fleet.binary, "serve", "--config", self.fleet.rules], env, self.log)

    def restart(self, **settings):
        self.kill()
        self.settings |= settings
        self.start()

    def use(self, redis):
        self.redis = redis
        self.restart()

    def regions(self):
        """The page's part about regions."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.debug}/store", timeout=1) as answer:
            return json.load(answer)["regions"]


class Fleet:
    """Three regions with two replicas and a link each."""

    def __init__(self, binary, directory, limit, settings, schedule):
        self.binary, self.directory, self.settings = binary, directory, settings
        self.rules = str(pathlib.Path(directory, "rules.yaml"))
        lines = ["domain: shop", "descriptors:"]
        for algorithm in ALGORITHMS:
            lines.append(f"- {{key: {algorithm}, rate_limit: {{unit: second, unit_multiplier: {schedule.period}, "
                         f"requests_per_unit: {limit}, algorithm: {algorithm}, scope: global, "
                         f"reserve: {schedule.reserve}%}}}}")
        pathlib.Path(self.rules).write_text("\n".join(lines) + "\n")
        self.world = Redis(directory, "global")
        self.redis = {region: Redis(directory, region) for region in REGIONS}
        self.links = {region: Link(self.world.port, next(PORTS)) for region in REGIONS}
        self.replicas = {
            region: [Replica(self, region, f"{region}-{n}", self.redis[region])
                     for n in range(2)] for region in REGIONS}

    def all_replicas(self):
        return [replica for replicas in self.replicas.values() for replica in replicas]
