-- token_bucket: used tokens refill at `limit` per period.
--
-- KEYS: the counter. a, b: unused. State, 24 bytes: last, used (whole tokens), part (see leaky_level.lua).
-- Charges: limit, capacity (tokens in a full bucket), wait (longest delay for missing tokens, in microseconds).
-- Rounding: none. Writes: one SET with PX or SETRANGE. TTL: see leaky_level.lua.

--: load
local bytes = 24
--> read
local whole, part
last, whole, part = unpack('<I8I8I8', before)
if whole >= 9007199254740992 or part >= period then
  --> wrong_type
end
--> effective_now
if void then last, whole, part = at, 0, 0 end
--> level

--: decide
admitted = false
--> drain
if hits < 0 then
  admitted = true
elseif hits <= capacity and limit > 0 then
  local excess = level_whole + hits - capacity
  --> fits_in_time
end

--: apply
local entered = hits
if hits < 0 and level_whole + hits < lent then
  entered = 0
  if level_whole >= lent then entered, level_part = lent - level_whole, 0 end
elseif not admitted then
  -- Debt ends one period's worth of tokens below an empty bucket, and never lowers the used tokens.
  local room = capacity + limit - level_whole
  if room <= 0 then
    entered = 0
  elseif hits >= room then
    entered, level_part = room, 0
  end
end
--> fill

--: write
--> level_ttl
local value = pack('<I8I8I8', last, whole, part)
--> set_or_overwrite
