"""Schedules of faults over three regions: aimed ones by name, and random ones."""

from dataclasses import dataclass, field

from region_fleet import PERIOD_S, REGIONS


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
        if how == "emptied":
            run.losses.append(run.elapsed())
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
        run.losses.append(run.elapsed())
        run.offsets.append((run.elapsed(), offset_s))

    def end(run):
        run.fleet.world.set_clock(0)
        run.losses.append(run.elapsed())
        run.offsets.append((run.elapsed(), 0))
    return schedule.between(at, seconds, f"clock of the global Redis {offset_s:+}", begin, end)


def set_region_clock(schedule, region, at, seconds, offset_s):
    def set_to(run, offset_s):
        run.fleet.redis[region].set_clock(offset_s)
        run.losses.append(run.elapsed())
    return schedule.between(at, seconds, f"clock of the Redis of {region} {offset_s:+}",
                            lambda run: set_to(run, offset_s), lambda run: set_to(run, 0))


def bursts(*times):
    """Full demand in spans of time, given as begins and ends, and none between."""
    return lambda elapsed: float(any(begin <= elapsed < end for begin, end in zip(times[::2], times[1::2])))


def mostly_ap(name, **settings):
    """Demand under which a region that admits by itself shows."""
    return Schedule(name, factor=3.0, parts=lambda elapsed: (0.3, 0.25, 0.45), **settings)


def changing_world_clock(name, offset_s):
    """Demand in bursts of some limits each: before a change, after it, after the next one, and in the next window."""
    schedule = Schedule(name, period=30, factor=8.0, shape=bursts(0, 3, 30, 33, 34, 48, 51, 66, 90, 98), length=100)
    return set_world_clock(schedule, 33, 18, offset_s)


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
    "region-clock-back": lambda name: set_region_clock(mostly_ap(name), "ap", 22, 9, -25),
    "region-clock-on": lambda name: set_region_clock(mostly_ap(name), "ap", 22, 9, 25),
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
    kind = rng.randrange(9)
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
    else:
        set_region_clock(schedule, region, at, rng.choice((2, 9, 18)), rng.choice((-60, -25, -3, 3, 25, 90)))


def random_schedule(rng):
    schedule = Schedule("random", length=rng.uniform(60, 90), reserve=rng.choice((10, 10, 30, 50)))
    random_demand(schedule, rng)
    last = schedule.length - 22
    for _ in range(rng.randint(1, 3)):
        add_random_fault(schedule, rng, last)
    return schedule
