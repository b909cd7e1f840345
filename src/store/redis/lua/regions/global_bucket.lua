-- Prepaid hits of a token bucket, in the global Redis: see src/limit/algorithm/global_bucket.rs.
--
-- KEYS: the bucket.
-- ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use the server's
-- time; purpose (0: a grant, 1: a reset), period in microseconds, rate (tokens per period) and capacity of the bucket,
-- both below 2^32; then of a grant: wanted hits, and the time in microseconds for which a region may admit them.
-- Returns: five numbers: now, the epoch, end of the grant, hits granted, and tokens that stay.
-- State, 40 bytes, unsigned: 2 (the format), last (time of the last refill), tokens, part (units of which a token has
-- as many as the period has microseconds), epoch. Another format is as no state.
-- Writes: one SET with PX. TTL: the time to fill, and a period; at least a day after a reset.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> divide
local key, now, purpose, period, rate, capacity, wanted, prepaid = KEYS[1], unpack('<i8i8i8i8i8i8i8', ARGV[1])
--> clock
local found = redis.pcall('GET', key)
if type(found) == 'table' then return found end
local last, tokens, part, epoch = 0, 0, 0, 0
if found and #found == 40 and unpack('<I8', found) == 2 then
  last, tokens, part, epoch = unpack('<I8I8I8I8', found, 9)
end
if max(last, tokens, part, epoch) > 9007199254740992 or part >= period then
  --> wrong_type
end
if last == 0 then
  tokens, part, last = capacity, 0, now
elseif now > last then
  local refilled, rest = divide(now - last, rate, period)
  tokens, part = tokens + refilled, part + rest
  if part >= period then tokens, part = tokens + 1, part - period end
  last = now
elseif last > now + period then
  last = now
end
if tokens >= capacity then tokens, part = capacity, 0 end
local hits = 0
if purpose == 0 then
  hits = min(floor((tokens + 3) / 4), wanted)
  tokens = tokens - hits
else
  tokens, part, epoch = capacity, 0, max(epoch, now)
end
local ttl_ms = math.ceil(period / 1000 * capacity / max(rate, 1)) + math.ceil(period / 1000)
if epoch > 0 then ttl_ms = max(ttl_ms, 86400000) end
local done = redis.pcall('SET', key, pack('<I8I8I8I8I8', 2, last, tokens, part, epoch), 'PX', ttl_ms)
if done.err then return done end
return pack('<i8i8i8i8i8', now, epoch, now + prepaid, hits, tokens)
