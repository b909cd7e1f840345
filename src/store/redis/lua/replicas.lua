-- The processes that share the limits: which of them has which of R slots, and how many they are.
--
-- KEYS: their table. ARGV[1]: signed 64-bit numbers, little-endian: the time in microseconds since the Unix epoch,
-- negative for the server's; R, 1 to 1000, as this process has it; 1 if it stops and gives up what it has, else 0; then
-- 16 bytes that tell it from all others.
-- Returns five numbers as above: the time; its slot, from 0 on, -1 for none; the time at which the claim before its own
-- ended, 0 if there was none; how many processes are alive; the R in force.
-- Table: a string of R as an unsigned number; for each slot the owner, and in unsigned numbers the time at which its
-- claim ends or ended, 0 if there was none, and at which the one before it did; then for each process that waits for a
-- slot itself and the time until which it counts as alive. Those beyond 1000 are not counted.
-- A claim lasts 30 s. Among free slots it takes the one that is free for longest. While claims of another R run it gets
-- none; when they have ended, its own R is in force, and that counts as the end of all claims.
-- A clock that was set back keeps nothing alive for longer: no claim ends later than 30 s from now.
-- Writes: one SET with PX. TTL: 366 days. O(R + those that wait).

local unpack, pack, min = struct.unpack, struct.pack, math.min
local now, slots, ends = unpack('<i8i8i8', ARGV[1])
local me, key, life_ms = string.sub(ARGV[1], 25), KEYS[1], '31622400000'
local nobody = string.rep('\0', 16)
--> clock
local found = redis.pcall('GET', key)
if not found then
  found = pack('<I8', slots) .. string.rep('\0', 32 * slots)
elseif type(found) == 'table' then
  return found
end
local force = #found % 8 == 0 and #found > 8 and unpack('<I8', found) or 0
local place = 9 + 32 * force
if force < 1 or force > 1000 or place > #found + 1 or (#found + 1 - place) % 24 ~= 0 then
  --> wrong
end
local latest, owners, ended, before, live = now + 30000000, {}, {}, {}, 0
for i = 1, force do
  local owner, over, earlier = unpack('<c16I8I8', found, 32 * i - 23)
  owners[i], ended[i], before[i] = owner, min(over, latest), min(earlier, now)
  if ended[i] > now then live = live + 1 end
end
if force ~= slots and live == 0 then
  force = slots
  for i = 1, force do owners[i], ended[i], before[i] = nobody, now, 0 end
end
local mine, free
if force == slots then
  for i = 1, force do
    if owners[i] == me then mine = i end
    if ended[i] <= now and (not free or ended[i] < ended[free]) then free = i end
  end
  if ends == 1 then
    if mine and ended[mine] > now then ended[mine], live = now, live - 1 end
    mine = nil
  else
    mine = mine or free
    if mine and ended[mine] <= now then owners[mine], before[mine], live = me, ended[mine], live + 1 end
    if mine then ended[mine] = latest end
  end
end
local rows, waiting = {pack('<I8', force)}, 0
for i = 1, force do rows[i + 1] = pack('<c16I8I8', owners[i], ended[i], before[i]) end
local function wait(owner, over)
  if over > now and waiting < 1000 then
    rows[#rows + 1], waiting, live = pack('<c16I8', owner, over), waiting + 1, live + 1
  end
end
for at = place, #found, 24 do
  local owner, over = unpack('<c16I8', found, at)
  if owner ~= me then wait(owner, min(over, latest)) end
end
if not mine and ends == 0 then wait(me, latest) end
local value = table.concat(rows)
--> set
return pack('<i8i8i8i8i8', now, mine and mine - 1 or -1, mine and before[mine] or 0, live, force)
