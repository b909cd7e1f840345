-- fixed_window: a count for each window; windows are aligned to the Unix epoch, or to calendar months in UTC.
--
-- KEYS: the counter; a: the calendar months of a window, 0 if it has the period's length. State, 16 bytes: last, count
-- (2^53 at most) of the window of last. Charges: limit. Rounding: none. Writes: one SET with PX.
-- TTL: a period from the counter's now on; of calendar months, until some days after the window's end. Rounded up.

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
  -- The windows of so many months since January of the year 0; by days since March 1st of that year.
  local function window_of(us)
    local days = floor(us / 86400000000) + 719468
    local era, day = floor(days / 146097), days % 146097
    local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
    local month = floor((5 * (day - (365 * year + floor(year / 4) - floor(year / 100))) + 2) / 153)
    return floor(((era * 400 + year) * 12 + month + 2) / a)
  end
  window = window_of(at)
  if void or window > window_of(last) then count = 0 end
end

--: fits
passes = hits < 0 or count + hits <= limit

--: add
count, last = count + hits, at
if count < 0 then
  count = 0
elseif count > 9007199254740992 then
  count = 9007199254740992
end

--: write
local life_ms = period_ms
if window then
  -- The months before the next window, by the mean length of one: right to 5 days, which are added.
  life_ms = math.ceil((((window + 1) * a * 30.436875 - 719528 + 5) * 86400000000 - now) / 1000)
elseif ahead > 0 then
  life_ms = math.ceil((ahead + period) / 1000)
end
local value = pack('<I8I8', last, count)
--> set
