-- The driver for several counters of one descriptor: a charge is charged to all of them, or, if an enforced one refuses,
-- to none but those where refused hits count.
--
-- KEYS: the counters. ARGV[1], reply and rules as in driver.lua: what is said of the counter stands for each key, and
-- in each run limit, capacity, patience and flags for each; the states follow one another.
-- Nothing is written before all is decided, and the first write fails if any does: all keys are written or none.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, makers = ARGV[1], {}
--> makers
local now, place = unpack('<i8', args)
--> clock
local counters, reply = {}, {pack('<i8', now)}
for i, key in ipairs(KEYS) do
  local kind, period, a, b, period_ms
  kind, period, a, b, period_ms, place = unpack('<i8i8i8i8Bc0', args, place)
  local counter = makers[kind](key, now, period, a, b, period_ms)
  if counter.err then return counter end
  counters[i], reply[i + 1] = counter, counter.before
end
while place < #args do
  local times, hits
  times, hits, place = unpack('<i8i8', args, place)
  for _, counter in ipairs(counters) do
    counter.under(unpack('<i8i8i8i8', args, place))
    place = place + 32
  end
  repeat
    local refused, changed = false, false
    for _, counter in ipairs(counters) do
      if counter.refuses(hits) then refused = true end
    end
    for _, counter in ipairs(counters) do
      if counter.adds(refused) then changed = true end
    end
    times = times - 1
  until times == 0 or not changed
end
for _, counter in ipairs(counters) do
  local err = counter.plan()
  if err then return err end
end
for _, counter in ipairs(counters) do
  local err = counter.write()
  if err then return err end
end
return table.concat(reply)
