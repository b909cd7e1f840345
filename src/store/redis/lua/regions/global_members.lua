-- Registry of the regions in the global Redis: see src/store/redis/regions/registry.rs.
--
-- KEYS: the registry. ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch,
-- negative: use the server's time; sent: the latest time at which this call was sent, 0: it only reads; lease: time in
-- microseconds for which the region may use its parts after this report; generation of the current token; jumped_ago:
-- microseconds since the clock of the global Redis jumped, negative: it did not. Then 16 bytes each: the id of the
-- region's Redis; the hash of its list of regions. Then 8 bytes each: its current and its next token. Then the region's
-- name, at most 63 bytes. Returns: numbers as above: now; recorded: 1 if the report counts; accepted: 1 if the next
-- token is the one that the registry has; changed: the time of the last change of this region's list, 0: it never
-- changed; contested_until: time until which the Redis counts as copied, 0: it never did; disturbed: the time of the
-- last jump of the clock, 0: there was none. Then for each other Redis: the length of its region's name in one byte,
-- the name, a byte that is 1 if its list differs, its id, and as numbers the last change of its list, its last report
-- and leased_until: the time until which its region may use its parts. State: a string: disturbed, then for each Redis
-- the length of its region's name in one byte, the name, id and list, as unsigned numbers the last change of its list,
-- its last report, leased_until, contested_until, the generation of its token and the time of the token's last change,
-- then its token and the one before. Rules: a report that arrives more than 5 s after it was sent only reads. A
-- region's first list is no change. The token advances
-- from the current to the next of a report. The token before counts for 10 s; any other older one is that of a copy.
-- A report later than now tells that the clock was set back. A Redis without a report for 366 days is forgotten, and
-- the least recent one if there are more than 128. Writes: one SET with PX. TTL: 366 days. O(Redis).
--
-- Decides: lists of regions that differ (`TOLLKEEPER_REGIONS`); when the row of a region that is gone is forgotten.
-- Decides: that the Redis of a region was copied (fencing token, `contested_until`).

local unpack, pack, min, max, concat = struct.unpack, struct.pack, math.min, math.max, table.concat
local now, sent, lease, generation, jumped_ago, own_id, own_list, current_token, next_token =
  unpack('<i8i8i8i8i8c16c16c8c8', ARGV[1])
local own_name, key, ttl_ms = string.sub(ARGV[1], 89), KEYS[1], '31622400000'
local no_token = string.rep('\0', 8)
--> clock
local found = redis.pcall('GET', key) or pack('<I8', 0)
if type(found) == 'table' then return found end
if #found < 8 then
  --> wrong_type
end
local is_report = sent > 0 and now <= sent + 5000000
local disturbed, position = unpack('<I8', found)
if is_report and jumped_ago >= 0 then disturbed = max(disturbed, now - jumped_ago) end
local rows, seen_at, others = {}, {}, {}
local changed, leased_until, contested_until, known_generation, advanced, token, token_before = 0, 0, 0, 0, 0, nil, nil
while position <= #found do
  local length = string.byte(found, position)
  local following = position + length + 97
  if following > #found + 1 then
    --> wrong_type
  end
  local name, id, list, list_changed, seen, leased, contested, row_generation, row_advanced, row_token, row_before =
    unpack('<Bc0c16c16I8I8I8I8I8I8c8c8', found, position)
  if seen > now then
    local back = seen - now
    leased, contested = max(leased - back, 0), max(contested - back, 0)
    if back > 1000000 then disturbed = now end
  end
  list_changed, seen, row_advanced = min(list_changed, now), min(seen, now), min(row_advanced, now)
  if name == own_name and id == own_id then
    changed = is_report and list ~= own_list and now or list_changed
    leased_until, contested_until, known_generation, advanced = leased, contested, row_generation, row_advanced
    token, token_before = row_token, row_before
  elseif seen + 31622400000000 > now then
    rows[#rows + 1] = pack('<Bc0c16c16I8I8I8I8I8I8c8c8', length, name, id, list, list_changed, seen, leased, contested,
      row_generation, row_advanced, row_token, row_before)
    seen_at[#seen_at + 1] = seen
    others[#others + 1] =
      pack('<Bc0Bc16i8i8i8', length, name, list == own_list and 0 or 1, id, list_changed, seen, leased)
  end
  position = following
end
disturbed = min(disturbed, now)
if is_report then
  leased_until = max(leased_until, now + lease)
  local is_known = next_token == token or (next_token == token_before and advanced + 10000000 > now)
  if not is_known then
    local is_next = not token or current_token == token or generation > known_generation
    if not is_next then contested_until = leased_until end
    token_before, token = is_next and token or no_token, next_token
    known_generation, advanced = generation + 1, now
  end
  if #rows > 127 then
    local oldest = 1
    for i = 2, #rows do
      if seen_at[i] < seen_at[oldest] then oldest = i end
    end
    table.remove(rows, oldest)
  end
  rows[#rows + 1] = pack('<Bc0c16c16I8I8I8I8I8I8c8c8', #own_name, own_name, own_id, own_list, changed, now,
    leased_until, contested_until, known_generation, advanced, token, token_before or no_token)
  local value = pack('<I8', disturbed) .. concat(rows)
  --> set
end
local recorded, accepted = is_report and 1 or 0, is_report and token == next_token and 1 or 0
return pack('<i8i8i8i8i8i8', now, recorded, accepted, changed, contested_until, disturbed) .. concat(others)
