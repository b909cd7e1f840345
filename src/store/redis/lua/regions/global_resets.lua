-- List of resets in the global Redis, which all regions follow: see src/store/redis/regions/resets.rs.
--
-- KEYS: the list. ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use
-- the server's time; a time. To read: resets after this time are returned. To add: resets get this time or a later one;
-- then for each counter: its period in milliseconds and the length of its key as numbers, and its key. Returns: two
-- numbers: now, and the time of the newest reset, 0: none. Then, to read: resets as they are stored; all of them if the
-- newest is older than the given time, because the list was lost since. State: a string: for each reset, newest first,
-- three unsigned numbers (its time, the period, the length of the key) and the region's key of the counter. Each call
-- that adds has a time of its own. Writes: to add, one SET with PX. Resets are kept for an hour, at most 1000 of
-- before. TTL: one hour. O(resets).
--
-- Decides: how many resets are kept for a region that is cut off (1000), and for how long (an hour).

local unpack, pack, max, sub, concat = struct.unpack, struct.pack, math.max, string.sub, table.concat
local key, now, time = KEYS[1], unpack('<i8i8', ARGV[1])
--> clock
local found = redis.pcall('GET', key) or ''
if type(found) == 'table' then return found end
local newest = #found >= 24 and unpack('<I8', found) or 0
local is_read = #ARGV[1] == 16
local oldest = now - 3600000000
if is_read and time <= newest then oldest = max(oldest, time) end
local position, kept = 1, 0
while position <= #found and kept < 1000 do
  if position + 23 > #found then
    --> wrong_type
  end
  local reset, _, length = unpack('<I8I8I8', found, position)
  if position + 23 + length > #found then
    --> wrong_type
  end
  if reset <= oldest then break end
  position, kept = position + 24 + length, kept + 1
end
local rest = sub(found, 1, position - 1)
if is_read then return pack('<i8i8', now, newest) .. rest end
newest = max(now, time, newest + 1)
local resets, from = {}, 17
while from <= #ARGV[1] do
  local period_ms, length = unpack('<i8i8', ARGV[1], from)
  resets[#resets + 1] = pack('<I8I8I8', newest, period_ms, length) .. sub(ARGV[1], from + 16, from + 15 + length)
  from = from + 16 + length
end
local value, ttl_ms = concat(resets) .. rest, '3600000'
--> set
return pack('<i8i8', now, newest)
