-- fixed_window: a count for each window; windows are aligned to the Unix epoch, or to calendar months in UTC.
--
-- KEYS: the counter, with the calendar months of a window, 0 if it is of the period's length. State, 16 bytes: last,
-- count (2^53 at most) of the window of last. Draws: limit. Rounding: none. Writes: one SET with PX.
-- TTL: a period from c.at on; of calendar months, to within days after the window's end. Milliseconds, rounded up.

-- The months from January of the year 0 to the one of a time, in whole windows; by days since March 1st of the year 0.
local function month_window(us, months)
  local days = floor(us / 86400000000) + 719468
  local era = floor(days / 146097)
  local day = days % 146097
  local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
  local month = floor((5 * (day - (365 * year + floor(year / 4) - floor(year / 100))) + 2) / 153)
  return floor(((era * 400 + year) * 12 + month + 2) / months)
end

algorithms[2] = {
  open = function(c)
    local err = read(c, '<I8I8', 16, 9007199254740992, math.huge)
    if err then return err end
    local same
    if c.a == 0 then
      same = floor(c.at / c.period) == floor(c.last / c.period)
    else
      c.window = month_window(c.at, c.a)
      same = c.window == month_window(c.last, c.a)
    end
    if not same then c.x = 0 end
  end,
  fits = function(c, hits, limit)
    return c.x + hits <= limit or hits < 0
  end,
  add = function(c, hits)
    c.x, c.last = min(max(c.x + hits, 0), 9007199254740992), c.at
  end,
  close = function(c)
    local ttl = c.ahead + c.period
    if c.a > 0 then
      -- The months before the next window, by the mean length of one: right to 5 days, which are added.
      ttl = ((c.window + 1) * c.a * 30.436875 - 719528 + 5) * 86400000000 - c.now
    end
    return pack('<I8I8', c.last, c.x), math.ceil(ttl / 1000)
  end,
}
