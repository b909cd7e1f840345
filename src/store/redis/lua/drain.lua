-- A level that drains at `limit` a period: what token_bucket and leaky_bucket have in common.
--
-- State: last, x whole hits (below 2^53) and y parts of one more, of which a hit has as many as the period has
-- microseconds; z is leaky_bucket's. What drains in t microseconds is t x limit parts, a whole number: never rounded.
-- TTL: time to empty under the limit of the last charge, and a period beyond, in whole milliseconds rounded down; 285
-- years at most.

-- Drains the level until c.at; the counter's own numbers stay, so that a draw without effect leaves none.
local function drained(c, limit)
  local x, y, elapsed = c.x, c.y, c.at - c.last
  if elapsed > 0 and limit > 0 then
    local whole, parts = divide(elapsed, limit, c.period)
    x, y = x - whole, y - parts
    if y < 0 then x, y = x - 1, y + c.period end
    if x < 0 then x, y = 0, 0 end
  end
  c.level_x, c.level_y = x, y
  return x, y
end

-- Whether x whole hits and y parts, fewer than none too, have drained when a caller of that patience (us) has waited.
local function drains(c, x, y, limit, patience)
  if x < 0 or x == 0 and y == 0 then return true end
  local wait = patience - c.ahead
  if wait <= 0 then return false end
  local whole, parts = divide(wait, limit, c.period)
  return x < whole or x == whole and y <= parts
end

-- Keeps a level; as many as none if it is less.
local function fill(c, x, y, limit)
  if x < 0 then x, y = 0, 0 end
  c.x, c.y, c.last = x, y, c.at
  c.level_x, c.level_y, c.by = x, y, limit
end

local function drain_ttl(c)
  local empty = 0
  if c.by > 0 then empty = (c.x * c.period + c.y) / c.by end
  return floor(min(c.ahead + empty + c.period, 9007199254740992) / 1000)
end
