-- A counter's state as one string, and a time of its own: what all algorithms have in common. A log has only the time.
--
-- State: a string of unsigned 64-bit numbers, little-endian. The first is the time of the last charge in microseconds
-- since the Unix epoch; each algorithm says what the others are, and refuses those that no charge can have led to. All
-- are below 2^53, or 2^53 itself, so that a Lua number is exact.
-- Variables, times in microseconds: last, at (the counter's own now: the later of now and last), ahead (at - now), void
-- (last lies more than a period ahead: the clock was wrong), before (the state as found, for the reply).
-- Writes: one SET with PX. TTL: life_ms, which the algorithm says, as a number or, which is faster, in digits.

--: clock
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

--: read
local before, last = redis.pcall('GET', key)
if not before then
  before = string.rep('\0', bytes)
elseif type(before) == 'table' then
  return before
elseif #before ~= bytes then
  --> wrong
end

--: arrive
if last >= 9007199254740992 then
  --> wrong
end
local at, ahead, void = now, last - now
if ahead <= 0 then
  ahead = 0
elseif ahead <= period then
  at = last
else
  ahead, void = 0, true
end

--: wrong
return {err = 'WRONGTYPE the value of this key is no state of its counter'}

--: set
local done = redis.pcall('SET', key, value, 'PX', life_ms)
if done.err then return done end
