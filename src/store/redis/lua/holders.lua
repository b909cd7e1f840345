-- Envoys that hold slots, and when a replica last heard of each: see src/store/redis/holder_exchange.rs.
--
-- KEYS: the table. ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use
-- the server's time; time of silence in microseconds after which a holder is dead; then for each holder that was heard:
-- its identity (8 bytes), microseconds since then, and 1 if the table gets the holder (its health checks followed each
-- other), 0 if it only counts for one that the table has. Returns: the identities of dead holders, up to 1024, those
-- that died last first.
-- State: a sorted set: identity -> time of the last heartbeat in milliseconds, at most 10 000, and 'last_call' -> time
-- of the last call. Holders that were silent for a day are removed; their slots end with max_duration. Silence counts
-- only while a replica listens: if none called for half of the timeout, holders that were not dead by then count as
-- heard now; if the clock was set back, all do.
-- Writes: ZADD, ZREMRANGEBYSCORE. TTL: a day.
--
-- Decides: in Redis: when an Envoy is dead; its silence while no replica listened.

local unpack, floor = struct.unpack, math.floor
local key, now, timeout = KEYS[1], unpack('<i8i8', ARGV[1])
--> clock
local now_ms = floor(now / 1000)
local last_call = redis.pcall('ZSCORE', key, 'last_call')
if type(last_call) == 'table' then return last_call end
last_call = tonumber(last_call) or 0
if now_ms < last_call or now_ms - last_call > timeout / 2000 then
  local oldest = now_ms < last_call and '-inf' or string.format('%.0f', last_call - floor(timeout / 1000))
  for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', key, '+inf', oldest)) do redis.call('ZADD', key, now_ms, id) end
end
redis.call('ZADD', key, now_ms, 'last_call')
for i = 17, #ARGV[1], 24 do
  local id, age, is_added = string.sub(ARGV[1], i, i + 7), unpack('<i8i8', ARGV[1], i + 8)
  local heard_ms, known = floor((now - age) / 1000), redis.call('ZSCORE', key, id)
  if known and tonumber(known) < heard_ms or not known and is_added == 1 then redis.call('ZADD', key, heard_ms, id) end
end
redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms - 86400000)
redis.call('ZREMRANGEBYRANK', key, 0, -10002)
redis.call('PEXPIRE', key, 86400000)
return redis.call('ZREVRANGEBYSCORE', key, '(' .. string.format('%.0f', now_ms - floor(timeout / 1000)), '-inf',
  'LIMIT', 0, 1024)
