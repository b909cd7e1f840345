#!/usr/bin/env python3
"""Draws the pictures of docs/algorithms.md: the same requests through each of the five algorithms.

The algorithms below follow the definitions of that page, in exact fractions; only captions are placed by hand. Every
picture has its own background and two sets of colours, for light and dark mode. Only the standard library is used. Run
it without arguments: it writes the .svg files beside itself.
"""

from fractions import Fraction as F
from math import ceil, floor
from pathlib import Path

LIMIT, PERIOD = 5, F(10)  # every rule here: 5 per 10 s
STEP = PERIOD / LIMIT  # a token comes, or a request leaves, every 2 s
REQUESTS = [F(t) / 2 for t in (14, 15, 16, 17, 18, 21, 22, 23, 24, 25, 30, 34, 38, 52, 53, 54, 55, 56, 57, 58)]
START, END = F(6), F(38)  # what the time axis shows, in seconds


# The algorithms. Each returns its marks [(time, verdict, leaves at)] and what it needs to draw its state.


def token_bucket():
    used, last, marks, line = F(0), START, [], [(START, F(LIMIT))]
    for t in REQUESTS:
        before = used
        used = max(F(0), used - (t - last) / STEP)
        if before and not used:
            line.append((last + before * STEP, F(LIMIT)))
        line.append((t, LIMIT - used))
        ok = used + 1 <= LIMIT
        if ok:
            used += 1
            line.append((t, LIMIT - used))
        marks.append((t, "ok" if ok else "no", t))
        last = t
    full = last + used * STEP
    line += [(full, F(LIMIT)), (END, F(LIMIT))] if full < END else [(END, LIMIT - used + (END - last) / STEP)]
    return marks, line


def leaky_bucket():
    tail, marks, line = START, [], [(START, F(0))]
    for t in REQUESTS:
        if tail <= t:
            line.append((tail, F(0)))
        tail_now = max(tail, t)
        line.append((t, (tail_now - t) / STEP))
        ok = tail_now + STEP - t <= LIMIT * STEP
        marks.append((t, "no" if not ok else "held" if tail_now > t else "ok", tail_now))
        if ok:
            tail = tail_now + STEP
            line.append((t, (tail - t) / STEP))
    line.append((END, max(F(0), (tail - END) / STEP)))
    return marks, line


def fixed_window():
    counts, marks, line = {}, [], [(START, 0)]
    for t in REQUESTS:
        window = floor(t / PERIOD)
        line += [(t, counts.get(window, 0))]
        counts[window] = counts.get(window, 0) + 1  # count_rejected is the default: rejected hits count too
        line += [(t, counts[window])]
        marks.append((t, "ok" if counts[window] <= LIMIT else "no", t))
    steps = []
    for t, count in line:
        if steps and floor(t / PERIOD) != floor(steps[-1][0] / PERIOD):
            edge = floor(t / PERIOD) * PERIOD
            steps += [(edge, steps[-1][1]), (edge, 0)]
        steps.append((t, count))
    edge = 3 * PERIOD
    return marks, steps + [(edge, steps[-1][1]), (edge, 0), (END, 0)]


def sliding_window_log():
    log, marks, entries = [], [], []
    for t in REQUESTS:
        log = [entry for entry in log if entry > t - PERIOD]  # exactly one period old is out
        ok = len(log) + 1 <= LIMIT
        if ok:
            log.append(t)
            entries.append(t)
        marks.append((t, "ok" if ok else "no", t))
    line = [(START, 0)]
    for t in sorted(set(entries) | {entry + PERIOD for entry in entries}):
        if t <= END:
            line += [(t, line[-1][1]), (t, sum(1 for entry in entries if t - PERIOD < entry <= t))]
    return marks, line + [(END, line[-1][1])], entries


def weighted(counts, t):
    window = floor(t / PERIOD)
    left = (window + 1) - t / PERIOD
    return counts.get(window, 0), counts.get(window - 1, 0) * left


def sliding_window_counter():
    counts, marks, rises = {}, [], []
    for t in REQUESTS:
        current, previous = weighted(counts, t)
        ok = floor(current + previous) + 1 <= LIMIT
        if ok:
            counts[floor(t / PERIOD)] = current + 1
            rises.append(t)
        marks.append((t, "ok" if ok else "no", t))
    current_line, sum_line, so_far = [(START, 0)], [(START, F(0))], {}
    events = sorted(set(rises) | {PERIOD, 2 * PERIOD, 3 * PERIOD, END})
    for t in events:
        window = floor(sum_line[-1][0] / PERIOD)  # up to t the window of the last point goes on
        left = (window + 1) - t / PERIOD
        current, previous = so_far.get(window, 0), so_far.get(window - 1, 0)
        current_line.append((t, current))
        sum_line.append((t, current + previous * left))
        if t in rises:
            so_far[floor(t / PERIOD)] = so_far.get(floor(t / PERIOD), 0) + 1
        current, previous = weighted(so_far, t)
        current_line.append((t, current))
        sum_line.append((t, current + previous))
    return marks, current_line, sum_line


def most_in_a_period(marks):
    """The most admitted hits in any half-open span of one period, by the time at which they are let through."""
    times = [leaves for _, verdict, leaves in marks if verdict != "no"]
    return max(sum(1 for other in times if t - PERIOD < other <= t) for t in times)


# Drawing.

WIDTH, LEFT, SCALE = 920, 84, 25.4
LIGHT = dict(back="#ffffff", edge="#d0d7de", text="#1f2328", soft="#59636e", grid="#e4e8ec", band="#f3f5f8",
             ok="#0a58ca", no="#c5321f", state="#5b4b9a", fill="#d9d3f0", more="#b8dfd5", moreline="#1b7f66")
DARK = dict(back="#0d1117", edge="#3d444d", text="#f0f6fc", soft="#a3adb8", grid="#262c34", band="#161b22",
            ok="#6cb0ff", no="#ff8a75", state="#b9a8f5", fill="#362f57", more="#1d4a40", moreline="#63cfb2")


def style():
    rules = """text{{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:{text}}}
.title{{font-size:17px;font-weight:600}} .soft{{fill:{soft}}} .small{{font-size:12px;fill:{soft}}} .end{{text-anchor:end}}
.mid{{text-anchor:middle}} .back{{fill:{back};stroke:{edge}}} .band{{fill:{band}}} .grid{{stroke:{grid}}}
.axis{{stroke:{soft}}} .limit{{stroke:{no};stroke-dasharray:6 4;stroke-width:1.5}} .limitname{{fill:{no};font-size:12px}}
.ok{{fill:{ok};stroke:{ok};stroke-width:1.6}} .held{{fill:{back};stroke:{ok};stroke-width:2}}
.wait{{stroke:{ok};stroke-width:1.6}} .no{{stroke:{no};stroke-width:2.4;stroke-linecap:round}}
.state{{fill:none;stroke:{state};stroke-width:2.2;stroke-linejoin:round}} .fill{{fill:{fill}}} .more{{fill:{more}}}
.moreline{{fill:none;stroke:{moreline};stroke-width:2.2;stroke-linejoin:round}} .bar{{fill:{fill};stroke:{state}}}"""
    return "<style>" + rules.format(**LIGHT) + "@media (prefers-color-scheme:dark){" + rules.format(**DARK) + "}</style>"


def num(value):
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


def x(t):
    return LEFT + float(t - START) * SCALE


class Picture:
    def __init__(self, name, title, subtitle, height):
        self.name, self.height = name, height
        self.parts = [f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>']
        self.text(20, 30, title, "title")
        self.text(20, 51, subtitle, "soft")
        self.alt = title + ". " + subtitle

    def add(self, part):
        self.parts.append(part)

    def text(self, at_x, at_y, words, classes=""):
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.add(f'<text x="{num(at_x)}" y="{num(at_y)}" class="{classes}">{words}</text>')

    def line(self, x1, y1, x2, y2, classes):
        self.add(f'<path class="{classes}" d="M{num(x1)} {num(y1)}L{num(x2)} {num(y2)}"/>')

    def mark(self, at_x, at_y, verdict):
        if verdict == "no":
            self.add(f'<path class="no" d="M{num(at_x - 4)} {num(at_y - 4)}l8 8m0 -8l-8 8"/>')
        else:
            self.add(f'<circle class="{verdict}" cx="{num(at_x)}" cy="{num(at_y)}" r="4.6"/>')

    def windows(self, top, bottom):
        for window in range(4):
            start, stop = max(START, window * PERIOD), min(END, (window + 1) * PERIOD)
            if window % 2 == 0:
                self.add(f'<rect class="band" x="{num(x(start))}" y="{top}" width="{num(x(stop) - x(start))}" '
                         f'height="{bottom - top}"/>')

    def time_axis(self, y):
        self.line(x(START), y, x(END), y, "axis")
        for t in range(ceil(START), floor(END) + 1, 2):
            self.line(x(t), y, x(t), y + 5, "axis")
            self.text(x(t), y + 19, f"{t} s", "small mid")

    def marks(self, y, marks, label="requests"):
        self.text(LEFT - 10, y + 4, label, "small end")
        for t, verdict, _ in marks:
            self.mark(x(t), y, verdict)

    def scale(self, top, bottom, most, limit=LIMIT, name=""):
        """The vertical axis of a state from 0 to `most`; returns what maps a value to its height."""
        def y(value):
            return bottom - (bottom - top) * value / most
        for value in range(most + 1):
            self.line(x(START), y(value), x(END), y(value), "grid")
            self.text(LEFT - 10, y(value) + 4, str(value), "small end")
        if name:
            self.line(x(START), y(limit), x(END), y(limit), "limit")
            self.text(x(END), y(limit) - 5, name, "limitname end")
        return y

    def path(self, points, y, classes, base=None):
        points = [point for point in points if point[0] <= END]
        d = "M" + "L".join(f"{num(x(t))} {num(y(v))}" for t, v in points)
        if base is not None:
            d += f"L{num(x(points[-1][0]))} {num(y(base))}L{num(x(points[0][0]))} {num(y(base))}Z"
        self.add(f'<path class="{classes}" d="{d}"/>')

    def legend(self, y, items):
        at = 20
        for kind, words in items:
            if kind in ("ok", "held", "no"):
                self.mark(at + 6, y - 4, kind)
            else:
                self.add(f'<rect class="{kind}" x="{at}" y="{y - 10}" width="13" height="12"/>')
            self.text(at + 20, y, words, "small")
            at += 44 + floor(len(words) * 6.3)

    def save(self):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
                f'height="{self.height}" role="img"><title>{self.alt}</title>')
        body = "\n".join([head, style(), *self.parts, "</svg>"])
        (Path(__file__).parent / f"{self.name}.svg").write_text(body + "\n", encoding="utf-8")


ADMITTED, REJECTED = ("ok", "admitted"), ("no", "rejected")


def result(marks, what="admitted"):
    passed = sum(1 for mark in marks if mark[1] != "no")
    return f"{passed} of {len(marks)} {what}, at most {most_in_a_period(marks)} in any 10 s"


def draw_token_bucket():
    marks, line = token_bucket()
    p = Picture("token_bucket", "token_bucket: 5 per 10 s, bucket_size 5", result(marks), 350)
    y = p.scale(112, 282, 5, name="bucket_size")
    p.path(line, y, "fill", base=0)
    p.path(line, y, "state")
    p.marks(82, marks)
    p.text(x(F(61, 10)), y(F(9, 2)) + 2, "full", "small")
    p.text(x(F(109, 10)), y(F(9, 2)) + 2, "less than one token: rejected", "small")
    p.text(x(F(305, 10)), y(F(9, 2)) + 2, "one token every 2 s", "small")
    p.text(x(F(203, 10)), y(F(5, 10)) + 4, "idle time earns a burst", "small")
    p.time_axis(282)
    p.legend(332, [ADMITTED, REJECTED, ("bar", "tokens in the bucket: bucket_size less tokens used")])
    p.save()


def draw_leaky_bucket():
    marks, line = leaky_bucket()
    p = Picture("leaky_bucket", "leaky_bucket: 5 per 10 s, queue_size 5", result(marks, "let through"), 520)
    p.marks(82, marks)
    top, rows = 112, [mark for mark in marks if mark[1] != "no"]
    for second in range(6, 39, 2):
        p.line(x(second), top - 6, x(second), top + 11 * len(rows), "grid")
    for row, (t, verdict, leaves) in enumerate(rows):
        height = top + row * 11
        if leaves > t:
            p.line(x(t), height, x(leaves), height, "wait")
        p.mark(x(leaves), height, "ok")
        if leaves > t:
            p.mark(x(t), height, "held")
    p.text(x(F(235, 10)), top + 14, "each line is one request: delayed from its arrival", "small")
    p.text(x(F(235, 10)), top + 30, "until it leaves; one leaves every 2 s", "small")
    y = p.scale(308, 452, 5, name="queue_size")
    p.path(line, y, "fill", base=0)
    p.path(line, y, "state")
    p.time_axis(452)
    p.legend(502, [("ok", "leaves (answered OK)"), ("held", "arrives and is delayed"), REJECTED,
                   ("bar", "places taken, the one leaving included")])
    p.save()


def draw_fixed_window():
    marks, steps = fixed_window()
    p = Picture("fixed_window", "fixed_window: 5 per 10 s", result(marks), 400)
    p.windows(66, 332)
    y = p.scale(132, 332, 8, name="limit")
    p.path(steps, y, "fill", base=0)
    p.path(steps, y, "state")
    p.marks(112, marks)
    first, last = x(F(7)), x(F(25, 2))
    p.add(f'<path class="axis" fill="none" d="M{num(first)} 100v-8H{num(last)}v8"/>')
    p.text((first + last) / 2, 85, "10 within 5.5 s: twice the limit", "mid small")
    p.text(x(F(17)), 85, "window 10 s to 20 s", "small mid")
    p.text(x(F(25)), 85, "window 20 s to 30 s", "small mid")
    p.text(x(F(106, 10)), y(F(64, 10)), "rejected hits count too", "small")
    p.time_axis(332)
    p.legend(382, [ADMITTED, REJECTED, ("bar", "the window's count: back to 0 at each multiple of 10 s")])
    p.save()


def draw_sliding_window_log():
    marks, line, entries = sliding_window_log()
    p = Picture("sliding_window_log", "sliding_window_log: 5 per 10 s", result(marks), 470)
    p.marks(82, marks)
    top = 106
    for second in range(6, 39, 2):
        p.line(x(second), top - 2, x(second), top + 12 * len(entries), "grid")
    for row, t in enumerate(entries):
        stop = min(END, t + PERIOD)
        p.add(f'<rect class="bar" x="{num(x(t))}" y="{top + row * 12}" width="{num(x(stop) - x(t))}" height="8" rx="2"/>')
    p.text(x(F(61, 10)), top + 94, "each bar is one entry: it counts", "small")
    p.text(x(F(61, 10)), top + 110, "for exactly 10 s, then it is out", "small")
    p.text(x(F(192, 10)), top + 20, "at 17 s the entry of 7 s is out, so one passes", "small")
    y = p.scale(264, 402, 6, name="limit")
    p.path(line, y, "fill", base=0)
    p.path(line, y, "state")
    p.time_axis(402)
    p.legend(452, [ADMITTED, REJECTED, ("bar", "entries; below, their number in the last 10 s")])
    p.save()


def draw_sliding_window_counter():
    marks, current_line, sum_line = sliding_window_counter()
    p = Picture("sliding_window_counter", "sliding_window_counter: 5 per 10 s", result(marks), 390)
    p.windows(66, 322)
    y = p.scale(122, 322, 6, name="limit")
    p.path(sum_line, y, "more", base=0)
    p.path(current_line, y, "fill", base=0)
    p.path(current_line, y, "state")
    p.path(sum_line, y, "moreline")
    p.marks(96, marks)
    p.text(x(F(203, 10)), y(F(26, 5)) - 24, "the last window's 5 fade evenly", "small")
    p.text(x(F(301, 10)), y(F(26, 5)) - 24, "rounded down: 4.75 counts as 4", "small")
    p.time_axis(322)
    p.legend(372, [ADMITTED, REJECTED, ("fill", "this window's count"),
                   ("more", "the last window's count × what is left of this one")])
    p.save()


def draw_five():
    p = Picture("five", "The same 20 requests, five answers", "every rule: 5 per 10 s; when each request is let through, and which are rejected", 336)
    rows = [("token_bucket", token_bucket), ("leaky_bucket", leaky_bucket), ("fixed_window", fixed_window),
            ("sliding_window_log", sliding_window_log), ("sliding_window_counter", sliding_window_counter)]
    for row, (name, algorithm) in enumerate(rows):
        marks, top = algorithm()[0], 70 + row * 43
        if row % 2 == 0:
            p.add(f'<rect class="band" x="8" y="{top}" width="{WIDTH - 16}" height="43"/>')
        p.text(20, top + 15, name, "")
        p.text(WIDTH - 20, top + 15, result(marks, "pass"), "small end")
        for t, verdict, leaves in marks:
            p.mark(x(t if verdict == "no" else leaves), top + 30, "no" if verdict == "no" else "ok")
    p.time_axis(288)
    p.legend(328, [("ok", "let through at this time"), REJECTED])
    p.save()


if __name__ == "__main__":
    for draw in (draw_token_bucket, draw_leaky_bucket, draw_fixed_window, draw_sliding_window_log,
                 draw_sliding_window_counter, draw_five):
        draw()
