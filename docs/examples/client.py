#!/usr/bin/env python3
"""A client that lives well with a rate limit. Python 3.8 or newer, nothing else.

    python3 client.py http://127.0.0.1:10000/ 20      # GETs the URL 20 times

Copy `Client` and change what is in capitals. What it does, and why, is in ../clients.md:

- it slows down before it is refused, by what the headers say is left;
- it never asks again before Retry-After, and not at the same instant as all the others;
- it gives up in time, and says when to come back;
- it does not ask for what it still has.
"""

import email.utils
import random
import sys
import time
import urllib.error
import urllib.request

LONGEST_S = 60  # What one call may take, waits included. A job at night can afford more, a page in a browser less.
TRIES = 5  # Of one call. More do not help: five refusals are not bad luck.
FIRST_BACKOFF_S = 0.5  # Where no header says how long to wait; it doubles with each try.
SLOW_BELOW = 0.25  # When less of the limit than this is left, what is left is spread over the time until the reset.
TIMEOUT_S = 10  # For one answer.


class Refused(Exception):
    """The call did not pass. `after_s`: when it may, in seconds from now; None if the server did not say."""

    def __init__(self, status, after_s):
        super().__init__(f"refused with {status}; again after {after_s} s")
        self.status = status
        self.after_s = after_s


class Client:
    """One of these for each credential: the limit is the credential's, so the waiting must be shared. Not for several
    threads at once; give them a lock, or one thread that asks for all."""

    def __init__(self, headers=None):
        self.headers = headers or {}
        self.not_before = 0.0  # Nothing is sent before this, on the monotonic clock.
        self.kept = {}  # URL to (fresh until, body).

    def get(self, url):
        """The body of the answer. Raises Refused, or what urllib raises for all that is no refusal."""
        fresh_until, body = self.kept.get(url, (0.0, None))
        if time.monotonic() < fresh_until:
            return body
        give_up = time.monotonic() + LONGEST_S
        for attempt in range(TRIES):
            self._wait(give_up)
            try:
                request = urllib.request.Request(url, headers=self.headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    body = answer.read()
                    self._slow_down(answer.headers)
                    self._keep(url, answer.headers, body)
                    return body
            except urllib.error.HTTPError as refusal:
                refusal.close()
                # 429: refused, and not executed, so any method may be repeated. 503 may have been: a GET only.
                if refusal.code not in (429, 503):
                    raise
                status, after = refusal.code, retry_after(refusal.headers)
                self._back_off(attempt, after)
        raise Refused(status, after)

    def _wait(self, give_up):
        """Sleeps until sending is allowed; raises at once if that is too late for this call."""
        wait = self.not_before - time.monotonic()
        if self.not_before > give_up:
            raise Refused(429, wait)
        while wait > 0:
            time.sleep(wait)
            wait = self.not_before - time.monotonic()

    def _back_off(self, attempt, after):
        """Full jitter where nothing is said; else what is said, and some jitter on top of it, never below."""
        backoff = FIRST_BACKOFF_S * 2**attempt
        wait = random.uniform(0, backoff) if after is None else after + random.uniform(0, max(1.0, after / 10))
        self.not_before = max(self.not_before, time.monotonic() + wait)

    def _slow_down(self, headers):
        """Spreads the last calls over the time until the limit is whole again, instead of running into a refusal."""
        limit, left, reset_s = (number(headers, name) for name in ("Limit", "Remaining", "Reset"))
        if limit and left is not None and reset_s is not None and left < limit * SLOW_BELOW:
            self.not_before = max(self.not_before, time.monotonic() + reset_s / (left + 1))

    def _keep(self, url, headers, body):
        """Keeps the answer for as long as the server says it is good."""
        now = time.monotonic()
        self.kept = {known: kept for known, kept in self.kept.items() if kept[0] > now}
        for part in headers.get("Cache-Control", "").split(","):
            name, _, seconds = part.strip().partition("=")
            if name.lower() == "max-age" and seconds.isdecimal():
                self.kept[url] = (now + int(seconds), body)


def number(headers, name):
    """The first number of X-RateLimit-NAME (Envoy) or RateLimit-NAME (tollkeeper); None if there is none.

    The limit may go on with a list of all limits: `10, 10;w=60, 1000;w=86400`.
    """
    text = headers.get("X-RateLimit-" + name) or headers.get("RateLimit-" + name) or ""
    first = text.split(",")[0].split(";")[0].strip()
    return int(first) if first.isdecimal() else None


def retry_after(headers):
    """The seconds to wait by Retry-After, which is a number of seconds or a date; None if there is none."""
    text = (headers.get("Retry-After") or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        date = email.utils.parsedate_tz(text)
        return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else None
    except (OverflowError, ValueError):
        return None


def main():
    url, times = sys.argv[1], int(sys.argv[2])
    client = Client()
    for call in range(times):
        print(call, client.get(url).decode(errors="replace").strip(), flush=True)


if __name__ == "__main__":
    main()
