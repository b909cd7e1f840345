"""What global limits promise, judged by hits that were admitted at known times.

A hit was decided between sending and answer. It counts in a span only if both lie in it, so the figures are never too
large, however late answers come. A hit without an answer does not count.
"""

import bisect
from dataclasses import dataclass

MAX_OVERSHOOT = 0.05
# Time within which a clock changes that was set.
CLOCK_CHANGE_S = 1.2


@dataclass(frozen=True)
class Hit:
    sent: float
    received: float
    region: str


@dataclass(frozen=True)
class Figure:
    """The most that was admitted of what is promised, and where."""

    what: str
    admitted: float
    promised: float
    begin: float
    end: float

    def excess(self):
        return self.admitted - self.promised

    def __str__(self):
        return f"{self.what} {self.admitted:.0f}/{self.promised:.0f}"

    def place(self):
        return f"{self.what} {self.begin:.2f} to {self.end:.2f} s"


class Admitted:
    """Hits of one limit, and what the promise excludes: times at which a Redis forgot what it counted, or its clock
    jumped, and clock offsets of the global one."""

    def __init__(self, algorithm, limit, period_s, hits, losses=(), offsets=((0.0, 0.0),), until=0.0):
        self.algorithm, self.limit, self.period_s, self.hits = algorithm, limit, period_s, hits
        self.losses, self.offsets, self.until = list(losses), list(offsets), until
        self.sent = sorted(hit.sent for hit in hits)
        self.received = sorted(hit.received for hit in hits)
        self.overshoot = limit * MAX_OVERSHOOT

    def count(self, begin, end):
        """Hits that were surely decided in a span; at least that many."""
        return max(0, bisect.bisect_right(self.received, end) - bisect.bisect_left(self.sent, begin))

    def forgotten(self, begin, end):
        """What losses may add, those of the window or bucket in which the span begins, and later."""
        return self.limit * sum(1 for loss in self.losses if begin - self.period_s <= loss <= end)

    def figures(self):
        windows = [self.bucket()] if self.algorithm == "token_bucket" else [self.window()]
        return [figure for figure in [self.span(), *windows] if figure]

    def worst(self, figures):
        return max(figures, key=Figure.excess, default=None)

    def span(self):
        """Any span of a period: both windows, or a full bucket and what refills, and the overshoot."""
        figures = []
        for end in self.received:
            begin = end - self.period_s
            promised = 2 * self.limit + self.overshoot + self.forgotten(begin, end)
            figures.append(Figure("span", self.count(begin, end), promised, begin, end))
        return self.worst(figures)

    def window(self):
        """Each window of global time during which the clock of the global Redis did not change."""
        figures = []
        ends = [at for at, _ in self.offsets[1:]] + [self.until]
        for (since, offset), until in zip(self.offsets, ends):
            since = since + CLOCK_CHANGE_S if since else since
            first = -(-(since + offset) // self.period_s) * self.period_s - offset
            while first + self.period_s <= until:
                end = first + self.period_s
                lost = self.limit * sum(1 for loss in self.losses if first <= loss <= end)
                promised = self.limit + self.overshoot + lost
                figures.append(Figure("window", self.count(first, end), promised, first, end))
                first = end
        return self.worst(figures)

    def bucket(self):
        """Any span: capacity, what refills, and the overshoot, of which allowances are a fourth for each period."""
        rate = self.limit / self.period_s
        figures = []
        # Shorter spans than a period have the whole overshoot; longer ones what allowances add.
        more = self.overshoot / 4 / self.period_s
        for least, part, slope in ((0.0, 1.0, rate), (self.period_s, 0.75, rate + more)):
            figures += self._bucket_spans(least, self.limit + part * self.overshoot, slope)
        return self.worst(figures)

    def _bucket_spans(self, least, constant, slope):
        """The worst span of at least that length: of all, and of those before, between and after losses."""
        parts = [(0.0, self.until, self.limit * len(self.losses))]
        if self.losses:
            edges = [0.0, *sorted(self.losses), self.until]
            parts += [(edge + self.period_s if edge else 0.0, end, 0.0) for edge, end in zip(edges, edges[1:])]
        for begin, end, forgotten in parts:
            if figure := self._worst_bucket_span((begin, end), least, constant + forgotten, slope):
                yield figure

    def _worst_bucket_span(self, part, least, constant, slope):
        lowest, since, index, worst = float("inf"), part[0], bisect.bisect_left(self.sent, part[0]), None
        for answered, end in enumerate(self.received):
            if end > part[1]:
                break
            while index < len(self.sent) and self.sent[index] <= end - least:
                if index - slope * self.sent[index] < lowest:
                    lowest, since = index - slope * self.sent[index], self.sent[index]
                index += 1
            beyond = answered + 1 - slope * end - lowest - constant
            if lowest < float("inf") and (worst is None or beyond > worst.excess()):
                promised = constant + slope * (end - since)
                worst = Figure("bucket", beyond + promised, promised, since, end)
        return worst

    def weighted(self):
        """Most of the sliding window's own weighted sum, in hits; no promise, because reserves are not weighted."""
        most = 0.0
        for end in self.received:
            start = end // self.period_s * self.period_s
            before = self.count(start - self.period_s, start) * (1 - (end - start) / self.period_s)
            most = max(most, self.count(start, end) + before)
        return most
