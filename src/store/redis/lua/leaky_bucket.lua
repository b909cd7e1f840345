-- leaky_bucket: requests leave at `limit` a period, those that wait are held.
--
-- KEYS: the counter. State, 32 bytes: last, queued whole places (x), parts of one more (y; see drain.lua), and the
-- tail: places of the request admitted last, which alone a refund may take.
-- Charges: limit, capacity (places), patience (us; how long a request may stand in the queue).
-- Rounding: none. Writes: one SET with PX. TTL: see drain.lua.

--: open
local bytes = 32
--> read
local x, y, tail
last, x, y, tail = unpack('<I8I8I8I8', before)
if x > 4294967295 or y >= period or tail > 4294967295 then
  --> wrong
end
--> arrive
if void then last, x, y = at, 0, 0 end
--> level

--: fits
passes = false
--> drain
local room = capacity - level_x - hits
if hits < 0 then
  passes = true
elseif hits <= capacity and limit > 0 and (room > 0 or room == 0 and level_y == 0) then
  -- It leaves when all that stood before it has left.
  local beyond = level_x
  --> lend
end

--: add
local entered = hits
if hits < 0 then
  entered = -min(tail, -hits)
  tail = tail + entered
else
  tail = hits
end
--> fill

--: write
--> life
local value = pack('<I8I8I8I8', last, x, y, tail)
--> set
