-- Gives a grant to a region's bucket: see src/limit/algorithm/region_bucket.rs.
--
-- KEYS: the counter, with the state of region_bucket.lua. ARGV[3]: view of the global Redis, see region_window.lua.
-- ARGV[1]: signed 64-bit little-endian numbers: now in microseconds (negative: use the server's time), period in
-- microseconds, TTL in milliseconds, the region's own rate and capacity, the uncertainty of global time that needs no
-- smaller capacity; then request, epoch, rate, capacity, start and end of the term (global time), exhausted,
-- next_request_at.
-- Returns: 1 if the grant was taken, else 0. Writes: one SET with PX if it was.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local key, global_view, wait, lent, is_server_time = KEYS[1], ARGV[3], 0, 0, false
local now, period, period_ms, limit, capacity, slack_us, request, new_epoch, new_rate, new_capacity, new_start, new_end,
  new_exhausted, not_before = unpack('<i8i8i8i8i8i8i8i8i8i8i8i8i8i8', ARGV[1])
local flags = 4 * slack_us
--> clock
--> load
if request == 0 or request ~= open_request then return 0 end
-- The grant was made before now.
if is_known then refilled_until = max(from, first, min(new_start, final)) end
--> refill
rate, granted_capacity, term_end, spent, requested_hits = new_rate, new_capacity, new_end, 0, 0
requested_since, exhausted, open_request, next_request_at = now, new_exhausted, 0, not_before
if new_epoch > epoch then epoch, level, level_part = new_epoch, own_capacity, 0 end
last, tokens, part = at, level, level_part
--> write
return 1
