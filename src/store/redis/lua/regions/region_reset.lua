-- Lets a region's counter follow a reset of its limit in another region.
--
-- KEYS: the counter, with the state of region_window.lua or region_bucket.lua, which end in epoch, cut_off_start and
-- cut_off_used.
-- ARGV[1]: signed 64-bit little-endian numbers: period in milliseconds; time of the reset, by the global Redis.
-- Returns: 1 if the counter was reset, 0 if there is none or it is younger than the reset.
-- Writes: one SET with PX: an empty state that has the time as its epoch, so a repeated reset changes nothing. TTL: two
-- periods plus 2 s.

local unpack, pack = struct.unpack, struct.pack
local key, period_ms, epoch = KEYS[1], unpack('<i8i8', ARGV[1])
local before = redis.pcall('GET', key)
if not before then
  return 0
elseif type(before) == 'table' then
  return before
elseif #before ~= 120 and #before ~= 144 then
  --> wrong_type
end
if unpack('<I8', before, #before - 23) >= epoch then return 0 end
local value = string.rep('\0', #before - 24) .. pack('<I8I8I8', epoch, 0, 0)
local done = redis.pcall('SET', key, value, 'PX', 2 * period_ms + 2000)
if done.err then return done end
return 1
