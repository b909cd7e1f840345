-- fixed_window: a count for each window; windows are aligned to the Unix epoch, or to calendar months in UTC.
--
-- KEYS: the counter; a: the calendar months of a window, 0 if it has the period's length. State, 16 bytes: last, count
-- (2^53 at most) of the window of last. Draws: limit. Rounding: none. Writes: one SET with PX.
-- TTL: a period from the counter's now on; of calendar months, until some days after the window's end.

--: helpers
-- The windows of so many months since January of the year 0; by days since March 1st of that year.
local function month_window(us, months)
  local days = floor(us / 86400000000) + 719468
  local era = floor(days / 146097)
  local day = days % 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  local month = floor((5 * (day - (365 * year + floor(year / 4) - floor(year / 100))) + 2) / 153)
  return floor(((era * 400 + year) * 12 + month + 2) / months)
end

--: open
local bytes = 16
--> read
local count
last, count = unpack('<I8I8', before)
if count > 9007199254740992 then
  --> wrong
end
--> arrive
local window
if a == 0 then
  if void or floor(at / period) > floor(last / period) then count = 0 end
else
  window = month_window(at, a)
  if void or window > month_window(last, a) then count = 0 end
end

--: fits
passes = hits < 0 or count + hits <= limit

--: add
count, last = min(max(count + hits, 0), 9007199254740992), at

--: write
local life_us = ahead + period
if window then
  -- The months before the next window, by the mean length of one: right to 5 days, which are added.
  life_us = ((window + 1) * a * 30.436875 - 719528 + 5) * 86400000000 - now
end
local value = pack('<I8I8', last, count)
--> set
