#!/usr/bin/env python3
"""A client that respects a rate limit. Python 3.8 or newer, nothing else.

    python3 client.py http://127.0.0.1:10000/ 20      # GETs the URL 20 times

Copy `Client` and change what is in capitals. What it does, and why, is in ../clients.md:

- it slows down before it is rejected, by the remaining hits in the headers;
- it never retries before Retry-After, and adds jitter;
- it gives up in time, and reports when to retry;
- it caches responses.
"""

import email.utils
import random
import sys
import time
import urllib.error
import urllib.request

LONGEST_S = 60  # Longest duration of one call, waits included. A nightly job can afford more, a web page less.
TRIES = 5  # Attempts of one call. More do not help after five rejections.
FIRST_BACKOFF_S = 0.5  # Without a Retry-After header; doubles with each attempt.
SLOW_BELOW = 0.25  # Below this share of the most that remained, the rest is spread over the time until the reset.
TIMEOUT_S = 10  # For one response.


class Rejected(Exception):
    """The call was rejected. `after_s`: seconds until it may pass; None if the server did not send it."""

    def __init__(self, status, after_s):
        super().__init__(f"rejected with {status}; retry after {after_s} s")
        self.status = status
        self.after_s = after_s


class Client:
    """One per credential: the limit belongs to the credential, so all callers must share the wait. Not thread-safe: use
    a lock, or one thread for all calls."""

    def __init__(self, headers=None):
        self.headers = headers or {}
        self.not_before = 0.0  # Monotonic time of the next allowed request.
        self.kept = {}  # URL -> (fresh until, body).
        self.most = 0  # Most remaining hits seen. The limit of a bucket is what refills in a period, not its size.

    def get(self, url):
        """Returns the response body. Raises Rejected, or the error of urllib for everything else."""
        fresh_until, body = self.kept.get(url, (0.0, None))
        if time.monotonic() < fresh_until:
            return body
        give_up = time.monotonic() + LONGEST_S
        for attempt in range(TRIES):
            self._wait(give_up)
            try:
                request = urllib.request.Request(url, headers=self.headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    body = response.read()
                    self._slow_down(response.headers)
                    self._keep(url, response.headers, body)
                    return body
            except urllib.error.HTTPError as rejection:
                rejection.close()
                # 429 was not executed: any method may be repeated. 503 may have been: only a GET.
                if rejection.code not in (429, 503):
                    raise
                status, after = rejection.code, retry_after(rejection.headers)
                self._back_off(attempt, after)
        raise Rejected(status, after)

    def _wait(self, give_up):
        """Sleeps until sending is allowed; raises at once if that is too late for this call."""
        wait = self.not_before - time.monotonic()
        if self.not_before > give_up:
            raise Rejected(429, wait)
        while wait > 0:
            time.sleep(wait)
            wait = self.not_before - time.monotonic()

    def _back_off(self, attempt, after):
        """Waits Retry-After plus jitter, or with full jitter if there is none."""
        backoff = FIRST_BACKOFF_S * 2**attempt
        wait = random.uniform(0, backoff) if after is None else after + random.uniform(0, max(1.0, after / 10))
        self.not_before = max(self.not_before, time.monotonic() + wait)

    def _slow_down(self, headers):
        """Spreads the last calls over the time until the reset, to avoid a rejection."""
        limit, left, reset_s = (number(headers, name) for name in ("Limit", "Remaining", "Reset"))
        if not limit or left is None or reset_s is None:
            return
        most = self.most or limit  # The first answer can only be compared with the limit.
        self.most = max(self.most, left)
        if left < most * SLOW_BELOW:
            self.not_before = max(self.not_before, time.monotonic() + reset_s / (left + 1))

    def _keep(self, url, headers, body):
        """Caches the response for its max-age."""
        now = time.monotonic()
        self.kept = {known: kept for known, kept in self.kept.items() if kept[0] > now}
        for part in headers.get("Cache-Control", "").split(","):
            name, _, seconds = part.strip().partition("=")
            if name.lower() == "max-age" and seconds.isdecimal():
                self.kept[url] = (now + int(seconds), body)


def number(headers, name):
    """The first number of X-RateLimit-NAME (Envoy) or RateLimit-NAME (tollkeeper); None if there is none.

    A list of all limits may follow: `10, 10;w=60, 1000;w=86400`.
    """
    text = headers.get("X-RateLimit-" + name) or headers.get("RateLimit-" + name) or ""
    first = text.split(",")[0].split(";")[0].strip()
    return int(first) if first.isdecimal() else None


def retry_after(headers):
    """The seconds to wait by Retry-After (a number of seconds or a date); None if there is none."""
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
