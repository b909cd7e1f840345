-- region_bucket: tokens of a bucket that the region refills at the rate that it always has.
--
-- KEYS: the counter. a, b: unused.
-- State, 112 bytes: last, tokens (whole ones that are left), part (fraction of a token), then the grant.
-- Charges: limit (rate of the region), capacity (tokens in the region's own bucket). Flags of charges must include 2.
-- Rounding: down. Writes: one SET with PX. TTL: two periods plus 2 s.

--: load
local bytes = 112
--> read
local tokens, part
last, tokens, part = unpack('<I8I8I8', before)
if max(tokens, part) > 9007199254740992 then
  --> wrong_type
end
--> effective_now
local level, level_part

--: decide
level, level_part = tokens, part
if last == 0 then
  level, level_part = capacity, 0
elseif now > last then
  local refilled, rest = divide(now - last, limit, period)
  level, level_part = level + refilled, level_part + rest
  if level_part >= period then level, level_part = level + 1, level_part - period end
end
if level >= capacity then level, level_part = capacity, 0 end
admitted = hits < 0 or hits <= level

--: apply
if admitted then
  tokens, part, last = min(level - hits, capacity), level_part, at
end

--: write
local ttl_ms = 2 * period_ms + 2000
local value = pack('<I8I8I8', last, tokens, part) .. string.sub(before, 25)
--> set
