-- The driver: decides draws on the counters of one descriptor, one after the other at one time.
--
-- KEYS: the counters. ARGV[1]: signed 64-bit numbers, little-endian: the time in microseconds since the Unix epoch,
-- negative for the server's; for each key its algorithm, period in microseconds, a, and b, which mean what the
-- algorithm says; then for each run of equal draws how many, the hits of each, negative to give back, and for each key
-- limit, capacity, patience in microseconds, and 1 if it is enforced plus 2 if refused hits count.
-- Returns one string: the time, a number as above, and for each key the state before the call.
-- Writes nothing for what changes nothing. Each write has a TTL; nothing is written before all is decided, and the first
-- write fails if any does: all keys are written or none. Errors are replies, not exceptions, to keep Redis's words.

local args = ARGV[1]
local now, place = unpack('<i8', args)
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local counters, reply = {}, {pack('<i8', now)}
for i, key in ipairs(KEYS) do
  local c = {key = key, now = now}
  c.algorithm, c.period, c.a, c.b, place = unpack('<i8i8i8i8', args, place)
  c.algorithm = algorithms[c.algorithm]
  local err = c.algorithm.open(c)
  if err then return err end
  counters[i], reply[i + 1] = c, c.before
end

while place < #args do
  local times, hits, changed
  times, hits, place = unpack('<i8i8', args, place)
  for _, c in ipairs(counters) do
    c.limit, c.capacity, c.patience, c.flags, place = unpack('<i8i8i8i8', args, place)
  end
  repeat
    local refused = false
    for _, c in ipairs(counters) do
      c.passes = c.algorithm.fits(c, hits, c.limit, c.capacity, c.patience)
      refused = refused or not c.passes and c.flags % 2 == 1
    end
    changed = false
    for _, c in ipairs(counters) do
      local passes = hits < 0 or c.passes and not refused
      if passes or c.flags >= 2 then
        c.algorithm.add(c, hits, c.limit, c.capacity, not passes)
        changed, c.changed = true, true
      end
    end
    times = times - 1
  -- A draw that changed nothing would change nothing the next time.
  until times == 0 or not changed
end

for _, c in ipairs(counters) do
  if c.changed then c.value, c.ttl = c.algorithm.close(c) end
  if c.bad then return wrong() end
end
for _, c in ipairs(counters) do
  if c.value then
    local done = redis.pcall('SET', c.key, c.value, 'PX', c.ttl)
    if done.err then return done end
  elseif c.commands then
    for _, command in ipairs(c.commands) do
      local done = redis.pcall(_G.unpack(command))
      if type(done) == 'table' and done.err then return done end
    end
  end
end
return table.concat(reply)
