-- sliding_window_counter: this window's count plus the last one's, weighted by what is left of this window.
--
-- KEYS: the counter. State, 24 bytes: last, current and previous: the counts of the window of last and of the one
-- before it, at most 2^34. Charges: limit. Rounding: the weight is rounded down. Writes: one SET with PX.
-- TTL: until the end of the next window, or, with nothing in this one, a period from the counter's now on; rounded up.

--: open
local bytes = 24
--> read
local current, previous
last, current, previous = unpack('<I8I8I8', before)
if current > 17179869184 or previous > 17179869184 then
  --> wrong
end
--> arrive
local windows = floor(at / period) - floor(last / period)
if void or windows > 1 then
  current, previous = 0, 0
elseif windows == 1 then
  current, previous = 0, current
end
local left_us = period - at % period

--: fits
passes = hits < 0 or current + divide(left_us, previous, period) + hits <= limit

--: add
if hits < 0 then
  previous = max(previous + min(current + hits, 0), 0)
  current = max(current + hits, 0)
elseif passes then
  current = current + hits
else
  -- Debt ends at the limit twice over and never lowers the count.
  current = max(current, min(2 * limit, current + hits))
end
last = at

--: write
local life_ms = math.ceil((ahead + period + (current > 0 and left_us or 0)) / 1000)
local value = pack('<I8I8I8', last, current, previous)
--> set
