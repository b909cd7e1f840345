-- Division of a token bucket over regions, in the global Redis: see src/limit/algorithm/global_bucket.rs.
--
-- KEYS: the grants of one bucket.
-- ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use the server's
-- time; purpose (0: a grant, 1: a reset); then for a grant: region, wanted, term in microseconds, pool_rate,
-- pool_capacity. Rates and capacities are below 2^32, a term below 2^45.
-- Returns: four numbers: now, the epoch, rate, capacity, and end of the grant, 0 if the region has too many. A reset
-- returns now and the epoch.
-- State, unsigned numbers: the epoch, then for each grant: region, rate, capacity, wanted, end.
-- Writes: one SET with PX. TTL: until the last grant ends, at least a day after a reset. O(grants), at most 4 x 64.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> divide
local key, now, purpose = KEYS[1], unpack('<i8i8', ARGV[1])
--> clock
local found = redis.pcall('GET', key)
if not found then
  found = pack('<I8', 0)
elseif type(found) == 'table' then
  return found
elseif #found % 40 ~= 8 then
  --> wrong_type
end
local epoch, kept, held, own, last_end = unpack('<I8', found), {}, {}, 0, now
local region, wanted, term, pool_rate, pool_capacity
if purpose == 0 then region, wanted, term, pool_rate, pool_capacity = unpack('<i8i8i8i8i8', ARGV[1], 17) end
for i = 9, #found, 40 do
  local holder, rate, capacity, want, ends = unpack('<I8I8I8I8I8', found, i)
  if ends > now then
    kept[#kept + 1] = string.sub(found, i, i + 39)
    last_end = max(last_end, ends)
    if holder == region then
      own = own + 1
    else
      local part = held[holder] or {0, 0}
      held[holder] = {max(part[1], rate), max(part[2], capacity), want}
    end
  end
end
local rate, capacity, ends = 0, 0, 0
if purpose == 1 then
  epoch = max(epoch, now)
elseif own < 4 then
  local taken_rate, taken_capacity, wanted_by_all = 0, 0, wanted
  for _, part in pairs(held) do
    taken_rate, taken_capacity, wanted_by_all = taken_rate + part[1], taken_capacity + part[2], wanted_by_all + part[3]
  end
  rate = wanted
  if wanted_by_all > pool_rate then rate = divide(pool_rate, wanted, wanted_by_all) end
  rate = min(rate, max(pool_rate - taken_rate, 0))
  capacity = min(divide(pool_capacity, rate, max(pool_rate, 1)), max(pool_capacity - taken_capacity, 0))
  ends = now + term
  last_end = max(last_end, ends)
  kept[#kept + 1] = pack('<I8I8I8I8I8', region, rate, capacity, wanted, ends)
end
local ttl_ms = max(math.ceil((last_end - now) / 1000), 1000)
if epoch > 0 then ttl_ms = max(ttl_ms, 86400000) end
local done = redis.pcall('SET', key, pack('<I8', epoch) .. table.concat(kept), 'PX', ttl_ms)
if done.err then return done end
if purpose == 1 then return pack('<i8i8', now, epoch) end
return pack('<i8i8i8i8i8', now, epoch, rate, capacity, ends)
