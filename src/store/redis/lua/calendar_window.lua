-- calendar_window: a count per window of a fixed_window with a `window`; the calendar is that of the caller.
--
-- KEYS: the counter. a: start of the caller's window of now, in seconds since the Unix epoch. b: its length in seconds
-- times 2^26, plus the length of the next window. State, 24 bytes: last, count of the window of last (at most 2^53),
-- end of that window in microseconds. Charges: limit. Counts are not rounded; waits are rounded up. Writes: one SET
-- with PX, or a SETRANGE if the last charge was in the same window: its expiry is past the window's end. TTL: up to a
-- second after the end of the window.
-- The end that a window was opened with holds until it is reached, whatever the caller's calendar says.
--
-- Decides: when the key of a calendar window expires (TTL).

--: load
local bytes, hold, held_hits, held_capacity, held_limit, held_until = 24
--> read
local count, window_end
last, count, window_end = unpack('<I8I8I8', before)
if count > 9007199254740992 or window_end > 9007199254740992 then
  --> wrong_type
end
--> effective_now
--> end_hold
local is_new = void or at >= window_end
if is_new then
  -- The time of the server is in one of these windows, or in the one before them, unless the clocks differ by more than
  -- a window: then the ends are repeated by the nearer length.
  local length = floor(b / 67108864)
  local next_length = b % 67108864
  local first_end = a + length
  local second = floor(at / 1000000)
  if second < first_end then
    window_end = first_end - floor((first_end - second - 1) / length) * length
  else
    window_end = first_end + (floor((second - first_end) / next_length) + 1) * next_length
  end
  count, window_end = 0, window_end * 1000000
end
local keeps_expiry = last > 0 and not is_new

--: decide
admitted = hits < 0 or count + hits <= limit

--: apply
count, last = count + hits, at
if hits < 0 then
  count = max(count, min(count - hits, leased))
elseif count > 9007199254740992 then
  count = 9007199254740992
end

--: write
local ttl_ms = math.ceil((window_end - now) / 1000) + 1000
local value = pack('<I8I8I8', last, count, window_end)
--> set_or_overwrite

--: current_hits
return count

--: reservation_mark
return at, window_end

--: refundable
return window_end == base and at < window_end and 9007199254740992 or 0
