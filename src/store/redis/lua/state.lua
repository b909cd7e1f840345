-- State of a counter as one string, and its own time: parts that the algorithms share. A log uses the time only.
--
-- State: unsigned 64-bit little-endian numbers. The first is the time of the last charge in microseconds since the Unix
-- epoch; each algorithm lists the others and rejects values that no charge leads to. All are at most 2^53, so that a
-- Lua number holds them exactly.
-- Variables, times in microseconds: last (time of the last charge), at (the counter's own now: the later of now and
-- last), ahead (at - now), void (true if last lies more than a period ahead: the clock was wrong), before (the state as
-- found, for the reply).
-- Writes: one SET with PX. TTL: ttl_ms, which the algorithm computes, as a number or, faster, in decimal digits. Where
-- keeps_expiry, and the time is the server's (is_server_time), the key lives long enough as it is: a SETRANGE, which
-- costs half, or the SET for a user who may not.

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
  --> wrong_type
end

--: effective_now
if last >= 9007199254740992 then
  --> wrong_type
end
local at, ahead, void = now, last - now
if ahead <= 0 then
  ahead = 0
elseif ahead <= period then
  at = last
else
  ahead, void = 0, true
end

--: wrong_type
return {err = 'WRONGTYPE the value of this key is not the state of a counter'}

--: set
local done = redis.pcall('SET', key, value, 'PX', ttl_ms)
if done.err then return done end

--: set_or_overwrite
if not (keeps_expiry and is_server_time) or type(redis.pcall('SETRANGE', key, '0', value)) == 'table' then
  --> set
end
