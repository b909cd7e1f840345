-- leaky_bucket: admitted requests leave at `limit` per period; those that have to wait are delayed.
--
-- KEYS: the counter. a, b: unused. State, 32 bytes: last, queued (whole places), part (see leaky_level.lua), tail:
-- places of the request admitted last, the only ones that a refund may take; or, from 2^31 on, the size of a mark (see
-- leaky_level.lua), and no such places.
-- Charges: limit, capacity (places), wait (longest delay, in microseconds).
-- Rounding: none. Writes: one SET with PX or SETRANGE. TTL: see leaky_level.lua.
--
-- Decides: when the key of a leaky bucket expires (TTL).

--: load
local bytes = 32
--> read
local whole, part, tail, size, was_resized, bucket, never_cuts_level
last, whole, part, tail = unpack('<I8I8I8I8', before)
if whole > 4294967295 or part >= period or tail > 4294967295 then
  --> wrong_type
end
--> effective_now
if tail >= 2147483648 then size, was_resized, tail = tail - 2147483648, true, 0 end
if void then last, whole, part, size, was_resized = at, 0, 0, nil, nil end
--> level

--: equal_charges
-- No shortcut: the tail is the last request alone.

--: decide
admitted = false
--> fit_size
--> drain
local room = capacity - level_whole - hits
if hits < 0 then
  admitted = true
elseif hits <= capacity and limit > 0 and (room > 0 or room == 0 and level_part == 0) then
  -- The request leaves when all requests before it have left.
  local excess = level_whole
  --> fits_in_time
end

--: apply
local entered = hits
-- What is cut comes from the end.
if level_size then tail = 0 end
if hits < 0 then
  entered = -min(tail, -hits)
  tail = tail + entered
else
  tail = hits
end
--> fill
if size and size >= 2147483648 then size, was_resized = nil, nil end
tail = size and 0 or min(tail, 2147483647)

--: write
--> level_ttl
local value = pack('<I8I8I8I8', last, whole, part, size and size + 2147483648 or tail)
--> set_or_overwrite
