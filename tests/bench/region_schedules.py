"""Schedules of faults over three regions: aimed ones by name, and random ones."""

from dataclasses import dataclass, field

from region_fleet import PERIOD_S, REGIONS, Replica


@dataclass
class Schedule:
    """Faults, each at a time with a text and an action on the run, and the demand meanwhile."""

    name: str
    period: int = PERIOD_S
    length: float = 60.0
    reserve: int = 10
    # Demand in limits per period: mean, and what it is multiplied by at a time.
    factor: float = 2.0
    shape: callable = lambda elapsed: 1.0
    # Parts of the regions in the demand, at a time.
    parts: callable = lambda elapsed: (0.35, 0.3, 0.35)
    faults: list = field(default_factory=list)
    # Settings of all replicas of a region, from the start.
    apart: dict = field(default_factory=dict)
    # A region with another global Redis.
    own_world: str = ""

    def at(self, at, text, action):
        self.faults.append((at, text, action))
        self.length = max(self.length, at + 2 * PERIOD_S)
        return self

    def between(self, at, seconds, text, begin, end):
        self.at(at, f"{text} until {at + seconds:.0f}", begin)
        return self.at(at + seconds, "", end)


def cut_link(schedule, region, at, seconds, how="closed"):
    """How: `closed`, `held` (both directions arrive late) or `answers` (only these)."""
    held = {"closed": (), "held": ("calls", "answers"), "answers": ("answers",)}

    def apply(run):
        faults = run.link_faults[region]
        run.fleet.links[region].set_cut("closed" in faults)
        run.fleet.links[region].set_held(*(direction for fault in faults for direction in held[fault]))

    def begin(run):
        run.link_faults[region].append(how)
        apply(run)

    def end(run):
        run.link_faults[region].remove(how)
        apply(run)
    return schedule.between(at, seconds, f"link of {region} {how}", begin, end)


def lose_redis(schedule, region, at, seconds, how="paused"):
    """How: `paused`, `killed` (it keeps its data) or `emptied`."""
    def begin(run):
        run.fleet.redis[region].pause() if how == "paused" else run.fleet.redis[region].kill()

    def end(run):
        redis = run.fleet.redis[region]
        redis.resume() if how == "paused" else redis.start(empty=how == "emptied")
    return schedule.between(at, seconds, f"Redis of {region} {how}", begin, end)


def lose_world(schedule, at, seconds, how="paused"):
    def begin(run):
        run.fleet.world.pause() if how == "paused" else run.fleet.world.kill()
        if how == "emptied":
            run.losses.append(run.elapsed())

    def end(run):
        world = run.fleet.world
        world.resume() if how == "paused" else world.start(empty=how == "emptied")
    return schedule.between(at, seconds, f"global Redis {how}", begin, end)


def kill_replica(schedule, region, number, at, seconds):
    return schedule.between(
        at, seconds, f"replica {number} of {region} killed", lambda run: run.fleet.replicas[region][number].kill(),
        lambda run: run.fleet.replicas[region][number].start())


def set_world_clock(schedule, at, seconds, offset_s):
    def begin(run):
        run.fleet.world.set_clock(offset_s)
        run.offsets.append((run.elapsed(), offset_s))

    def end(run):
        run.fleet.world.set_clock(0)
        run.offsets.append((run.elapsed(), 0))
    return schedule.between(at, seconds, f"clock of the global Redis {offset_s:+}", begin, end)


def set_region_clock(schedule, region, at, seconds, offset_s):
    return schedule.between(
        at, seconds, f"clock of the Redis of {region} {offset_s:+}",
        lambda run: run.fleet.redis[region].set_clock(offset_s), lambda run: run.fleet.redis[region].set_clock(0))


def remove_region(schedule, region, cut_at, removed_at, until):
    """A region is cut off and taken out of the list of the others, but runs on."""
    rest = ",".join(name for name in REGIONS if name != region)
    cut_link(schedule, region, cut_at, until - cut_at)
    for name in rest.split(","):
        for number in range(2):
            def restart(run, name=name, number=number):
                run.fleet.replicas[name][number].restart(TOLLKEEPER_REGIONS=rest)
            text = "" if number else f"{name} restarted with the list {rest}"
            schedule.at(removed_at + number * 1.5, text, restart)
    return schedule


def take_name(schedule, region, cut_at, taken_at, back_at):
    """A region is cut off, another deployment with its own Redis starts under its name, and the first comes back."""
    cut_link(schedule, region, cut_at, back_at - cut_at)

    def start(run):
        redis = run.add_redis(f"{region}-second")
        link = run.add_link(run.fleet.world)
        settings = {"TOLLKEEPER_GLOBAL_REDIS_URL": f"127.0.0.1:{link.port}"}
        names = [f"{region}-second-{number}" for number in range(2)]
        run.fleet.replicas[region] += [Replica(run.fleet, region, name, redis, settings) for name in names]
    return schedule.at(taken_at, f"second deployment named {region}", start)


def copy_redis(schedule, region, at):
    """The Redis of a region is copied, and one of its replicas uses the copy."""
    def copy(run):
        run.copy = run.add_redis(f"{region}-copy")
        run.when_ready(run.copy, lambda: run.copy.command("REPLICAOF", "127.0.0.1", str(run.fleet.redis[region].port)))

    def use(run):
        run.copy.command("REPLICAOF", "NO", "ONE")
        run.fleet.replicas[region][1].use(run.copy)
        run.copies.append((run.elapsed(), region))
    schedule.at(at, "", copy)
    return schedule.at(at + 3, f"replica 1 of {region} uses a copy of its Redis", use)


def bursts(*times):
    """Full demand in spans of time, given as begins and ends, and none between."""
    return lambda elapsed: float(any(begin <= elapsed < end for begin, end in zip(times[::2], times[1::2])))


def jumping_clocks(name):
    schedule = Schedule(name, reserve=50, factor=3.0, length=60)
    for number, region in enumerate(REGIONS):
        for window in (20, 30, 40):
            # Each beyond the expiry of counters written since the last one.
            for jump, at in enumerate((3.5, 6.0, 8.0)):
                offset_s = (window // 10 - 1) * 600 + 180 * (jump + 1)
                schedule.at(window + at + 0.1 * number, f"clock of the Redis of {region} {offset_s:+}",
                            lambda run, region=region, offset_s=offset_s: run.fleet.redis[region].set_clock(offset_s))
    return schedule


def mostly_ap(name, **settings):
    """Demand under which a region that admits by itself shows."""
    return Schedule(name, factor=3.0, parts=lambda elapsed: (0.3, 0.25, 0.45), **settings)


def changing_world_clock(name, offset_s):
    """Demand in bursts of some limits each: before a change, after it, after the next one, and in the next window."""
    schedule = Schedule(name, period=30, factor=8.0, shape=bursts(0, 3, 30, 33, 34, 48, 51, 66, 90, 98), length=100)
    return set_world_clock(schedule, 33, 18, offset_s)


def membership(name, **settings):
    """A large reserve, so that a region that has one too many shows."""
    return Schedule(name, reserve=50, factor=2.5, **settings)


AIMED = {
    "none": lambda name: Schedule(name, factor=3.0, length=40),
    "link-cut": lambda name: cut_link(Schedule(name), "ap", 12, 25),
    "link-held": lambda name: cut_link(Schedule(name), "ap", 12, 25, "held"),
    "answers-held": lambda name: cut_link(Schedule(name), "ap", 12, 25, "answers"),
    "region-paused": lambda name: lose_redis(mostly_ap(name), "ap", 21, 20),
    "region-killed": lambda name: lose_redis(mostly_ap(name), "ap", 21, 20, "killed"),
    "region-emptied": lambda name: lose_redis(Schedule(name, factor=3.0, reserve=50), "ap", 22, 2, "emptied"),
    "replica-killed": lambda name: kill_replica(kill_replica(Schedule(name), "ap", 0, 13, 5), "eu", 1, 24, 3),
    "global-paused": lambda name: lose_world(Schedule(name), 15, 12),
    "global-killed": lambda name: lose_world(Schedule(name), 15, 4, "killed"),
    "global-emptied": lambda name: lose_world(Schedule(name), 15, 1, "emptied"),
    "global-clock-back": lambda name: changing_world_clock(name, -130),
    "global-clock-on": lambda name: changing_world_clock(name, 130),
    "region-clocks": jumping_clocks,
    "removed": lambda name: remove_region(membership(name), "ap", 5, 10, 140),
    "name-taken": lambda name: take_name(membership(name), "ap", 5, 67, 110),
    "copied": lambda name: copy_redis(membership(name, parts=lambda elapsed: (0.1, 0.1, 0.8)), "ap", 12),
    "other-global": lambda name: mostly_ap(name, own_world="ap", length=50),
    "other-prefix": lambda name: mostly_ap(name, apart={"ap": {"CACHE_KEY_PREFIX": "other:"}}, length=50),
}


def random_demand(schedule, rng):
    """Demand of 1.3 to 3 limits, in random parts that change; sometimes in bursts over the ends of windows."""
    schedule.factor = rng.uniform(1.3, 3.0)
    turns = []
    for _ in range(64):
        weights = [rng.choice((0, 1, 1)) * rng.random() ** 2 + 1e-3 for _ in REGIONS]
        turns.append([weight / sum(weights) for weight in weights])
    turn_s = rng.choice((3.0, 7.0, 20.0))
    schedule.parts = lambda elapsed: turns[int(elapsed / turn_s) % len(turns)]
    if rng.random() < 0.5:
        begin, width = rng.uniform(0, PERIOD_S), rng.uniform(0.4, 0.8) * PERIOD_S
        schedule.shape = lambda elapsed: PERIOD_S / width if (elapsed - begin) % PERIOD_S < width else 0.0


def add_random_fault(schedule, rng, last):
    at, region = rng.uniform(4, last), rng.choice(REGIONS)
    kind = rng.randrange(10)
    if kind <= 1:
        cut_link(schedule, region, at, rng.uniform(5, 40), rng.choice(("closed", "held", "answers")))
    elif kind == 2:
        lose_redis(schedule, region, at, rng.choice((2, 20)), rng.choice(("paused", "killed", "emptied")))
    elif kind == 3:
        kill_replica(schedule, region, rng.randrange(2), at, rng.uniform(0.2, 8))
    elif kind <= 5:
        how = rng.choice(("paused", "paused", "killed", "emptied"))
        lose_world(schedule, at, rng.uniform(0.5, 12) if how == "paused" else rng.uniform(0.1, 4), how)
    elif kind <= 7:
        set_world_clock(schedule, at, rng.choice((3, 11, 18)), rng.choice((-130, -37, -20, -3, 3, 15, 40, 130)))
    elif kind == 8:
        set_region_clock(schedule, region, at, rng.choice((2, 9, 18)), rng.choice((-60, -25, -3, 3, 25, 90)))
    else:
        copy_redis(schedule, region, at)


def random_schedule(rng):
    schedule = Schedule("random", length=rng.uniform(60, 90), reserve=rng.choice((10, 10, 30, 50)))
    random_demand(schedule, rng)
    kind = rng.randrange(12)
    last = schedule.length - 22
    if kind == 0:
        cut_at = rng.uniform(4, 15)
        remove_region(schedule, rng.choice(REGIONS), cut_at, cut_at + rng.uniform(-1, 20), rng.uniform(110, 150))
    elif kind == 1:
        cut_at = rng.uniform(4, 15)
        taken_at, back_at = cut_at + rng.choice((5, 30, 61, 75)), cut_at + rng.uniform(80, 110)
        take_name(schedule, rng.choice(REGIONS), cut_at, taken_at, back_at)
    elif kind == 2:
        schedule.own_world = rng.choice(REGIONS)
    elif kind == 3:
        schedule.apart = {rng.choice(REGIONS): {"CACHE_KEY_PREFIX": "other:"}}
    for _ in range(rng.randint(1, 3)):
        add_random_fault(schedule, rng, last)
    return schedule
