-- Registry of the replicas that share the limits: assigns each of R places to one process, and counts the processes.
--
-- KEYS: the registry.
-- ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use the server's
-- time; places: R as this process has it, 1 to 1000; release: 1 to give up the place, else 0. Then 16 bytes: the owner id
-- of this process.
-- Returns: five numbers as above: now; the place of this process, from 0 on, -1: none; the end of the claim before its
-- own, 0: there was none; the number of live processes; the R that applies.
-- State: a string: R as an unsigned number; for each place the owner id, and as unsigned numbers the end of its claim, 0
-- if it has had none, and the end of the claim before; then for each process without a place its owner id and the time
-- until which it counts as live. At most 1000 of these are counted.
-- Rules: a claim lasts 30 s. A process takes the place that has been free for longest. While claims under another R run,
-- it gets no place; once they have ended its own R applies, and that counts as the end of all claims.
-- A clock that was set back extends no claim: an end later than 30 s from now is cut to that.
-- Writes: one SET with PX. TTL: 366 days. O(R + processes without a place).
--
-- Decides: in Redis: who has which replica place, how many replicas there are, too many (`TOLLKEEPER_MAX_REPLICAS`).

local unpack, pack, min = struct.unpack, struct.pack, math.min
local now, places, release = unpack('<i8i8i8', ARGV[1])
local me, key, ttl_ms = string.sub(ARGV[1], 25), KEYS[1], '31622400000'
local no_owner = string.rep('\0', 16)
--> clock
local found = redis.pcall('GET', key)
if not found then
  found = pack('<I8', places) .. string.rep('\0', 32 * places)
elseif type(found) == 'table' then
  return found
end
local agreed = #found % 8 == 0 and #found > 8 and unpack('<I8', found) or 0
local waiting_start = 9 + 32 * agreed
if agreed < 1 or agreed > 1000 or waiting_start > #found + 1 or (#found + 1 - waiting_start) % 24 ~= 0 then
  --> wrong_type
end
local latest, owners, ends, previous_ends, live = now + 30000000, {}, {}, {}, 0
for i = 1, agreed do
  local owner, ended, previous_end = unpack('<c16I8I8', found, 32 * i - 23)
  owners[i], ends[i], previous_ends[i] = owner, min(ended, latest), min(previous_end, now)
  if ends[i] > now then live = live + 1 end
end
if agreed ~= places and live == 0 then
  agreed = places
  for i = 1, agreed do owners[i], ends[i], previous_ends[i] = no_owner, now, 0 end
end
local mine, free
if agreed == places then
  for i = 1, agreed do
    if owners[i] == me then mine = i end
    if ends[i] <= now and (not free or ends[i] < ends[free]) then free = i end
  end
  if release == 1 then
    if mine and ends[mine] > now then ends[mine], live = now, live - 1 end
    mine = nil
  else
    mine = mine or free
    if mine and ends[mine] <= now then owners[mine], previous_ends[mine], live = me, ends[mine], live + 1 end
    if mine then ends[mine] = latest end
  end
end
local rows, waiting = {pack('<I8', agreed)}, 0
for i = 1, agreed do rows[i + 1] = pack('<c16I8I8', owners[i], ends[i], previous_ends[i]) end
local function add_waiting(owner, until_us)
  if until_us > now and waiting < 1000 then
    rows[#rows + 1], waiting, live = pack('<c16I8', owner, until_us), waiting + 1, live + 1
  end
end
for position = waiting_start, #found, 24 do
  local owner, until_us = unpack('<c16I8', found, position)
  if owner ~= me then add_waiting(owner, min(until_us, latest)) end
end
if not mine and release == 0 then add_waiting(me, latest) end
local value = table.concat(rows)
--> set
return pack('<i8i8i8i8i8', now, mine and mine - 1 or -1, mine and previous_ends[mine] or 0, live, agreed)
