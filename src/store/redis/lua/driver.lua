-- Driver for one counter: decides a batch of charges on it, in order, at one time.
--
-- KEYS: the counter, and the record of leases if the call concerns them. ARGV[2]: see leases.lua. ARGV[3]:
-- view of the global Redis, for the countings of regions: see region_window.lua; ARGV[2] may then be empty.
-- ARGV[1]: signed 64-bit little-endian numbers:
--   now in microseconds since the Unix epoch, negative: use the server's time;
--   the counter: algorithm_id, period in microseconds, a, b (each algorithm says what they mean), then one byte with a
--   number of digits and that many decimal digits: the period in milliseconds;
--   for each run of equal charges: times (how many), hits of each (negative: a refund), limit, capacity, wait in
--   microseconds, and flags: 1 if the limit is enforced (for together.lua) plus 2 if rejected hits count.
--   The wait of a charge is its longest delay, for countings of regions its cut-off allowance; the wait of a refund is
--   the time from which it is void, 0: never. A region's bucket adds four times the slack of clocks to the flags.
-- Returns: one string: now, a number as above, then the state before the call, and with ARGV[2] the number of hits that
--   refunds leave charged. A reset returns the number of counters that it deleted or emptied.
-- Writes: nothing if no charge changes the counter, and nothing before all are decided. TTL: see the algorithm.
-- Errors are returned, not raised, so that they begin with Redis's own error word in every version.
--
-- A script is this text with the parts of its algorithm in place of the arrows. The parts share local variables: those
-- below, those of state.lua and those of charge_loop.lua.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, global_view, key = ARGV[1], ARGV[3], KEYS[1]
local now, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
local lent, is_server_time = 0, now < 0
--> clock
--> leases
--> load
local times, hits, limit, capacity, wait, flags
--> next_run
--> charge_loop
local rejected = record and requested > 0 and not admitted and flags % 2 == 1
--> record_leases
if changed then
  --> plan
  --> write
end
if not record then return pack('<i8', now) .. before end
if purpose == 2 then return 1 end
return pack('<i8', now) .. before .. pack('<i8', lent)
