-- A counter: its state as one string, and a time of its own. Every script begins with this.
--
-- State: a string of unsigned 64-bit numbers, little-endian. The first is the time of the last charge in microseconds
-- since the Unix epoch; each algorithm says what the others are. Numbers that no draw can have led to are refused.
-- A counter `c` has, times in microseconds: key, period, now (the call's), last, at (its own now: the later of the two),
-- ahead (at - now), x y z (the other numbers), before (the state as found, for the reply).
-- Bounds: all numbers are below 2^53, or 2^53 itself, so that they are exact.

local algorithms = {}
local floor, max, min, pack, unpack = math.floor, math.max, math.min, struct.pack, struct.unpack
local function wrong()
  return {err = 'WRONGTYPE the value of this key is no state of its counter'}
end

-- Sets the counter's own now. True if the last charge lies more than a period ahead: the state is void.
local function arrive(c)
  local now, ahead = c.now, c.last - c.now
  if ahead <= 0 then
    c.at, c.ahead = now, 0
  elseif ahead <= c.period then
    c.at, c.ahead = c.last, ahead
  else
    c.at, c.ahead = now, 0
    return true
  end
end

-- Reads a state of so many bytes; x is at most x_most, y at most y_most. Returns the error if there is one, else whether
-- the state is void, in which case x and y are 0.
local function read(c, format, bytes, x_most, y_most)
  local raw = redis.pcall('GET', c.key)
  if not raw then
    c.before, c.last, c.x, c.y, c.z = string.rep('\0', bytes), 0, 0, 0, 0
  elseif type(raw) == 'table' then
    return raw
  elseif #raw ~= bytes then
    return wrong()
  else
    c.before, c.last, c.x, c.y, c.z = raw, unpack(format, raw)
    if c.last >= 9007199254740992 or c.x > x_most or c.y > y_most then return wrong() end
  end
  if arrive(c) then c.x, c.y, c.last = 0, 0, c.at end
end
