-- Driver for several counters of one descriptor: a charge is applied to all of them. If an enforced limit rejects it,
-- it is applied only to the counters whose rejected hits count.
--
-- KEYS: the counters, then the record of leases as in driver.lua. ARGV, reply and writes as in driver.lua. The numbers
-- of the counter are repeated for each key, and in each run of equal charges limit, capacity, wait and flags are; the
-- states in the reply follow one another. Nothing is written before all charges are decided. The first write fails if
-- any would, so all keys are written or none.
--
-- Decides: in Redis: all limits of a descriptor are charged, or none but those whose rejected hits count.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, constructors, leased, rejected, is_server_time = ARGV[1], {}, 0
--> constructors
--> ban_functions
--> pool_functions
local now, position = unpack('<i8', args)
is_server_time = now < 0
--> clock
--> leases
local counters, reply = {}, {pack('<i8', now)}
local count = #KEYS - (record and 1 or 0)
--> reservation_functions
--> counter_count
for i = 1, count do
  local algorithm_id, period, a, b, period_ms
  algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8Bc0', args, position)
  local counter = constructors[algorithm_id](KEYS[i], now, period, a, b, period_ms)
  if counter.err then return counter end
  --> pool_of_counter
  --> ban_of_counter
  --> reservation_of_counter
  --> overflow_of_counter
  counters[i], reply[i + 1] = counter, counter.before
end
while position < #args do
  local times, hits
  times, hits, position = unpack('<i8i8', args, position)
  for _, counter in ipairs(counters) do
    counter.set_limit(unpack('<i8i8i8i8', args, position))
    position = position + 32
  end
  repeat
    local changed = false
    rejected = false
    --> decide_counters
    for _, counter in ipairs(counters) do
      if counter.apply(rejected) then changed = true end
    end
    times = times - 1
  until times == 0 or not changed
end
for _, counter in ipairs(counters) do
  local err = counter.plan()
  if err then return err end
end
--> record_leases
for _, counter in ipairs(counters) do
  local err = counter.write()
  if err then return err end
end
if purpose == 2 then return #counters end
if record then reply[#reply + 1] = pack('<i8', leased) end
return table.concat(reply)
