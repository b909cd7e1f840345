-- Driver for several calls on one counter each that travel together: each does what driver.lua does, without leases.
--
-- KEYS: the counters. ARGV: for each group of keys with the same charges and clock, its number of keys, the ARGV[1] of
-- driver.lua, whose time is the server's, and its ARGV[3] or an empty string.
-- Returns: the time, a number as in driver.lua, then for each key its state before the call, or the error of that key.
-- Writes, TTL: as in driver.lua. Each key is decided and written before the next one.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local now, lent, is_server_time = -1, 0, true
--> clock
local args, global_view, period, a, b, period_ms, times, hits, limit, capacity, wait, flags
local function charge(key, times, hits, limit, capacity, wait, flags, position)
  --> load
  --> charge_loop
  if changed then
    --> plan
    --> write
  end
  return before
end
local replies = {pack('<i8', now)}
for group = 1, #ARGV, 3 do
  local position, algorithm_id
  args, global_view = ARGV[group + 1], ARGV[group + 2]
  -- The first number is the time, which all groups share.
  algorithm_id, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
  --> next_run
  for _ = 1, ARGV[group] do
    local place = #replies
    replies[place + 1] = charge(KEYS[place], times, hits, limit, capacity, wait, flags, position)
  end
end
return replies
