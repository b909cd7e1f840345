-- sliding_window_counter: the count of this window plus the count of the previous one, weighted by the part of this
-- window that is left.
--
-- KEYS: the counter. a, b: unused. State, 24 bytes: last, current, previous: counts of the window of last and of the
-- window before it, each at most 2^53. Charges: limit, capacity (most hits of the previous window that count).
-- Rounding: the weighted count is rounded down. Writes: one SET with PX, or a SETRANGE if current was above 0 already.
-- TTL: until the end of the next window, or one period after the counter's now if current is 0; rounded up.
--
-- Decides: when the key of a sliding window counter expires (TTL).

--: load
local bytes, hold, held_hits, held_capacity, held_limit, held_until = 24
--> read
local current, previous
last, current, previous = unpack('<I8I8I8', before)
if current > 9007199254740992 or previous > 9007199254740992 then
  --> wrong_type
end
--> effective_now
--> end_hold
local keeps_expiry = ahead == 0 and current > 0
local windows = floor(at / period) - floor(last / period)
if void or windows > 1 then
  current, previous = 0, 0
elseif windows == 1 then
  current, previous = 0, current
end
keeps_expiry = keeps_expiry and windows == 0
local left_us = period - at % period

--: decide
admitted = hits < 0 or current + divide(left_us, min(previous, capacity), period) + hits <= limit

--: apply
if hits < 0 then
  previous = max(previous + min(current + hits, 0), 0)
  current = max(current + hits, min(current, leased))
elseif admitted then
  current = current + hits
else
  -- Debt ends at twice the limit and never lowers the count.
  current = max(current, min(2 * limit, current + hits, 9007199254740992))
end
last = at

--: write
local ttl_ms = math.ceil((ahead + period + (current > 0 and left_us or 0)) / 1000)
local value = pack('<I8I8I8', last, current, previous)
--> set_or_overwrite

--: current_hits
-- A limit of 0 leaves what another one counted.
local most = limit > 0 and capacity or 9007199254740992
return min(current, most) + divide(left_us, min(previous, most), period)

--: reservation_mark
return at, floor(at / period)

--: refundable
return floor(at / period) == base and 9007199254740992 or 0
