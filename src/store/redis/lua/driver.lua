-- The driver for one counter: decides charges on it, one after the other at one time.
--
-- KEYS: the counter. ARGV[1]: signed 64-bit numbers, little-endian: the time in microseconds since the Unix epoch,
-- negative for the server's; the counter's algorithm (its script knows), period in microseconds, a, and b, which mean
-- what the algorithm says, and, after a byte with their number, the digits of the period in milliseconds; then for each
-- run of equal charges how many, the hits of each, negative to give back, limit, capacity, patience in microseconds, and 1
-- if it is enforced (for together.lua) plus 2 if refused hits count. The patience of hits that are given back is the
-- time from which on they are void, or 0.
-- Returns one string: the time, a number as above, and the state before the call.
-- Writes nothing for what changes nothing, and nothing before all is decided; then by the algorithm, with a TTL.
-- Errors are replies, not exceptions, so that they begin with Redis's own word in every version.
--
-- A script is this text with the parts of its algorithm in place of the arrows. They share local variables: the names
-- above, and those of state.lua. `fits` sets passes; `add` charges, or enters as debt what does not pass.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, key = ARGV[1], KEYS[1]
local now, kind, period, a, b, period_ms, place = unpack('<i8i8i8i8i8Bc0', args)
--> clock
--> open
local hits, limit, capacity, patience, flags, passes, times, changed
while place < #args do
  times, hits, limit, capacity, patience, flags, place = unpack('<i8i8i8i8i8i8', args, place)
  -- Equal charges that pass as one pass one by one and come to the same, but in a leaky_bucket (1), whose tail is its last
  -- request: so a hot key costs little more than an idle one.
  if times > 1 and hits > 0 and kind ~= 1 then
    local each = hits
    hits = each * times
    --> fits
    if passes then times = 1 else hits = each end
  end
  repeat
    --> fits
    -- A charge that changed nothing would change nothing the next time.
    if not passes and flags < 2 or hits < 0 and patience > 0 and at >= patience then break end
    --> add
    changed = true
    times = times - 1
  until times == 0
end
if changed then
  --> plan
  --> write
end
return pack('<i8', now) .. before
