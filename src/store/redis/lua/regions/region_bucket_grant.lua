-- Gives prepaid hits to a region's bucket: see src/limit/algorithm/region_bucket.rs.
--
-- KEYS: the counter, with the state of region_bucket.lua. ARGV[1]: signed 64-bit little-endian numbers: TTL in
-- milliseconds, capacity of the region's own bucket; then request, epoch, hits, low, start and end of the grant (global
-- time), exhausted, next_request_at.
-- Returns: 1 if the grant was taken, else 0. Writes: one SET with PX if it was.

local unpack, pack, min = struct.unpack, struct.pack, math.min
local key = KEYS[1]
local ttl_ms, own_capacity, request, new_epoch, hits, new_low, start, ends, new_exhausted, not_before =
  unpack('<i8i8i8i8i8i8i8i8i8i8', ARGV[1])
local before = redis.pcall('GET', key)
if not before then
  return 0
elseif type(before) == 'table' then
  return before
elseif #before ~= 144 then
  if #before == 128 then return 0 end
  --> wrong_type
end
local last, tokens, part, granted, granted_until, earlier, earlier_until, low, refilled_until, spent, requested_hits,
  requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
if request == 0 or request ~= open_request then return 0 end
if new_epoch > epoch then epoch, tokens, part, granted, earlier = new_epoch, own_capacity, 0, 0, 0 end
if granted_until <= start then granted = 0 end
if earlier_until <= start then earlier = 0 end
if earlier == 0 then
  earlier_until = granted_until
elseif granted > 0 then
  earlier_until = min(earlier_until, granted_until)
end
earlier, granted, granted_until, low, spent = earlier + granted, hits, ends, new_low, 0
local value = pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, tokens, part, granted, granted_until, earlier,
  earlier_until, low, refilled_until, spent, requested_hits, requested_since, new_exhausted, 0, not_before, epoch,
  cut_off_start, cut_off_used)
--> set
return 1
