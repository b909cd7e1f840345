-- fixed_window: a count per window; windows are aligned to the Unix epoch, or to calendar months in UTC.
--
-- KEYS: the counter. a: number of calendar months in a window, 0 if a window has the period's length. b: unused. State,
-- 16 bytes: last, count of the window of last (at most 2^53). Charges: limit. Counts are not rounded; times to wait are
-- rounded up. Writes: one SET with PX, or a SETRANGE if the last charge was in the same window: its expiry is past the
-- window's end. TTL: one period after the counter's now; for calendar months a few days past the window's end.
--
-- Decides: when the key of a fixed window expires (TTL).

--: load
local bytes, hold, held_hits, held_capacity, held_limit, held_until = 16
--> read
local count
last, count = unpack('<I8I8', before)
if count > 9007199254740992 then
  --> wrong_type
end
--> effective_now
--> end_hold
local window
local is_new = void
if a == 0 then
  is_new = is_new or floor(at / period) > floor(last / period)
else
  -- Index of the window: groups of `a` months since January of year 0. Days are counted from March 1st of that year.
  local function window_of(us)
    local days = floor(us / 86400000000) + 719468
    local era, day = floor(days / 146097), days % 146097
    local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
    local month = floor((5 * (day - (365 * year + floor(year / 4) - floor(year / 100))) + 2) / 153)
    return floor(((era * 400 + year) * 12 + month + 2) / a)
  end
  window = window_of(at)
  is_new = is_new or window > window_of(last)
end
if is_new then count = 0 end
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
local ttl_ms = period_ms
if window then
  -- Start of the next window by the mean length of a month, which is right to 5 days; these are added.
  ttl_ms = math.ceil((((window + 1) * a * 30.436875 - 719528 + 5) * 86400000000 - now) / 1000)
elseif ahead > 0 then
  ttl_ms = math.ceil((ahead + period) / 1000)
end
local value = pack('<I8I8', last, count)
--> set_or_overwrite

--: current_hits
return count

--: reservation_mark
return at, window or (floor(at / period) + 1) * period

--: refundable
local still_counts = at < base
if window then still_counts = window == base end
return still_counts and 9007199254740992 or 0
