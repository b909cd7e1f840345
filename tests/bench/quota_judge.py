"""What a limit admits, and what was admitted: the bound and the use of a limit that proxies share.

A proxy decided on a request somewhere between its sending and its answer. So a request counts within a span only if
both times are in it: what is found broken is broken for certain.
"""

import bisect
import collections
import math

# Periods below this are assigned as rates, longer ones as lent hits.
LENT_FROM_S = 20
CLOCK_DRIFT = 500e-6

Limit = collections.namedtuple("Limit", "hits period_s algorithm")


def ideal(sent, limit):
    """Whether one limiter admits each of the requests, which are in order of time."""
    hits, period = limit.hits, limit.period_s
    if limit.algorithm == "token_bucket":
        level, last = float(hits), sent[0] if sent else 0
        for at in sent:
            level, last = min(hits, level + (at - last) * hits / period), at
            admitted = level >= 1
            level -= admitted
            yield admitted
        return
    counts = collections.Counter()
    for at in sent:
        window = int(at // period)
        weighted = counts[window]
        if limit.algorithm == "sliding_window_counter":
            weighted += math.floor(counts[window - 1] * (window + 1 - at / period))
        admitted = weighted < hits
        counts[window] += admitted
        yield admitted


def most_in_window(admitted, period_s):
    """Most hits that are for certain in one aligned window."""
    windows = collections.Counter(answer.sent // period_s for answer in admitted
                                  if answer.sent // period_s == answer.received // period_s)
    return max(windows.values(), default=0)


def most_in_span(admitted, period_s):
    """Most hits that are for certain in one span of a period."""
    sent = sorted(answer.sent for answer in admitted)
    received = sorted(answer.received for answer in admitted)
    return max((bisect.bisect_right(received, start + period_s) - first for first, start in enumerate(sent)), default=0)


def bucket_excess(admitted, limit, capacity):
    """Most hits beyond a bucket of this capacity and its refill, in any span; negative if there are none."""
    rate = limit.hits / limit.period_s * (1 + CLOCK_DRIFT)
    sent = sorted(answer.sent for answer in admitted)
    received = sorted(answer.received for answer in admitted)
    worst, least, first = -math.inf, math.inf, 0
    for last, end in enumerate(received, 1):
        while first < len(sent) and sent[first] < end:
            least = min(least, first - rate * sent[first])
            first += 1
        worst = max(worst, last - rate * end - least)
    return math.ceil(worst - capacity - 1e-6) if admitted else -capacity


def broken_bound(admitted, limit, allowance):
    """How the bound is broken, or an empty text. The allowance is for first requests before an assignment."""
    if not admitted and limit.hits:
        return "nothing was admitted"
    doubled = math.ceil(2 * limit.hits * (1 + CLOCK_DRIFT)) + allowance
    span = most_in_span(admitted, limit.period_s)
    if span > doubled:
        return f"{span} in a span of {limit.period_s} s, at most {doubled}"
    window = most_in_window(admitted, limit.period_s)
    if limit.algorithm == "fixed_window" and limit.period_s >= LENT_FROM_S and window > limit.hits + allowance:
        return f"{window} in a window, at most {limit.hits + allowance}"
    # A window admits N at its end, N at the start of the next and N in each that follows.
    capacity = limit.hits if limit.algorithm == "token_bucket" else 2 * limit.hits
    if (excess := bucket_excess(admitted, limit, capacity) - allowance) > 0:
        return f"{excess} more than {capacity} and {limit.hits} each {limit.period_s} s"
    return ""


def judge(label, answers, limit, allowance=0):
    """The row of a key."""
    answers = sorted((answer for answer in answers if answer.admitted is not None), key=lambda answer: answer.sent)
    admitted = [answer for answer in answers if answer.admitted]
    possible = sum(ideal([answer.sent for answer in answers], limit))
    return {
        "key": label, "algorithm": limit.algorithm, "limit": limit.hits, "period_s": limit.period_s,
        "requests": len(answers), "admitted": len(admitted), "ideal": possible,
        "use": round(100 * len(admitted) / possible, 1) if possible else None,
        "most_in_window": most_in_window(admitted, limit.period_s),
        "most_in_span": most_in_span(admitted, limit.period_s),
        "allowance": allowance, "broken": broken_bound(admitted, limit, allowance),
    }


def share(answers, limit, begin, end):
    """Percent of what one limiter admits that was admitted between two times."""
    answers = sorted((answer for answer in answers if answer.admitted is not None), key=lambda answer: answer.sent)
    verdicts = list(ideal([answer.sent for answer in answers], limit))
    inside = [(answer.admitted, verdict) for answer, verdict in zip(answers, verdicts) if begin <= answer.sent < end]
    possible = sum(verdict for _, verdict in inside)
    return round(100 * sum(admitted for admitted, _ in inside) / possible, 1) if possible else None


def time_until_share(answers, limit, begin, percent, width_s=2, step_s=0.5, until_s=60):
    """Seconds until a span of `width_s` admits this part of what one limiter admits; None if it never does."""
    steps = int(until_s / step_s)
    for step in range(steps):
        start = begin + step * step_s
        reached = share(answers, limit, start, start + width_s)
        if reached is not None and reached >= percent:
            return round(step * step_s, 1)
    return None
