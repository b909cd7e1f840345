-- Registry of the regions in the global Redis: see src/store/redis/regions/standing.rs.
--
-- KEYS: the registry. ARGV[1]: a signed 64-bit little-endian number: now in microseconds since the Unix epoch,
-- negative: use the server's time. Then 16 bytes each: the id of the region's Redis; the hash of its list of regions.
-- Then the region's name, at most 63 bytes. Returns: three numbers as above: now; is_second: 1 if another Redis has had
-- this name within 60 s; changed: the time of the last change of this region's list, 0: it never changed. Then for each
-- other region: the length of its name in one byte, the name, a byte that is 1 if its list differs, and as numbers the
-- last change of its list and its last report. State: a string: for each region the length of its name in one byte, the
-- name, its id and the hash of its list, 16 bytes each, and as unsigned numbers the last change of its list, 0: it
-- never changed, and the time of its last report. Rules: a region's first list is no change. A second Redis of one name
-- changes nothing. A region without a report for 366 days is forgotten, and the least recent one if there are more than
-- 128. Writes: one SET with PX. TTL: 366 days. O(regions).

local unpack, pack, min, concat = struct.unpack, struct.pack, math.min, table.concat
local now, own_id, own_list = unpack('<i8c16c16', ARGV[1])
local own_name, key, ttl_ms = string.sub(ARGV[1], 41), KEYS[1], '31622400000'
--> clock
local found = redis.pcall('GET', key) or ''
if type(found) == 'table' then return found end
local rows, seen_at, others, position = {}, {}, {}, 1
local changed, is_second, own_row = 0, 0, nil
while position <= #found do
  local length = string.byte(found, position)
  local following = position + length + 49
  if following > #found + 1 then
    --> wrong_type
  end
  local name, id, list, list_changed, seen = unpack('<Bc0c16c16I8I8', found, position)
  list_changed, seen = min(list_changed, now), min(seen, now)
  if name == own_name then
    changed = list_changed
    if id ~= own_id and seen + 60000000 > now then
      is_second, own_row = 1, string.sub(found, position, following - 1)
    elseif list ~= own_list then
      changed = now
    end
  elseif seen + 31622400000000 > now then
    rows[#rows + 1], seen_at[#seen_at + 1] = string.sub(found, position, following - 1), seen
    others[#others + 1] = pack('<Bc0Bi8i8', #name, name, list == own_list and 0 or 1, list_changed, seen)
  end
  position = following
end
if #rows > 127 then
  local oldest = 1
  for i = 2, #rows do
    if seen_at[i] < seen_at[oldest] then oldest = i end
  end
  table.remove(rows, oldest)
end
rows[#rows + 1] = own_row or pack('<Bc0c16c16I8I8', #own_name, own_name, own_id, own_list, changed, now)
local value = concat(rows)
--> set
return pack('<i8i8i8', now, is_second, changed) .. concat(others)
