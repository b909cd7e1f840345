-- token_bucket: tokens that are out come back at `limit` a period.
--
-- KEYS: the counter. State, 24 bytes: last, used whole tokens (x), parts of one more (y; see drain.lua).
-- Charges: limit, capacity (tokens in the bucket), patience (us; how long may be waited for tokens that are lacking).
-- Rounding: none. Writes: one SET with PX. TTL: see drain.lua.

--: open
local bytes = 24
--> read
local x, y
last, x, y = unpack('<I8I8I8', before)
if x >= 9007199254740992 or y >= period then
  --> wrong
end
--> arrive
if void then last, x, y = at, 0, 0 end
--> level

--: fits
passes = false
--> drain
if hits < 0 then
  passes = true
elseif hits <= capacity and limit > 0 then
  local beyond = level_x + hits - capacity
  --> lend
end

--: add
local entered = hits
if not passes then
  -- Debt ends at one period's worth of tokens below an empty bucket, and never lowers what is out.
  local room = capacity + limit - level_x
  if room <= 0 then
    entered = 0
  elseif hits >= room then
    entered, level_y = room, 0
  end
end
--> fill

--: write
--> life
local value = pack('<I8I8I8', last, x, y)
--> set
