-- Grants of a window's hits to regions, in the global Redis: see src/limit/algorithm/global_window.rs.
--
-- KEYS: the count of one limit.
-- ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative: use the server's
-- time; purpose (0: a grant, 1: a return, 2: a reset), period in microseconds, sliding (1 if the previous window
-- counts), max (hits that may be granted), then hits (wanted, or returned), and the window and epoch of a return.
-- Returns: five numbers: now, the epoch, the window, hits granted or taken back, and hits that stay free (of a grant).
-- State, 32 bytes, unsigned: window, current, previous (at most 2^34), epoch.
-- Writes: one SET with PX. TTL: two periods, at least a day after a reset.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> divide
local key = KEYS[1]
local now, purpose, period, sliding, most, hits, of_window, of_epoch = unpack('<i8i8i8i8i8i8i8i8', ARGV[1])
--> clock
local found = redis.pcall('GET', key)
if not found then
  found = string.rep('\0', 32)
elseif type(found) == 'table' then
  return found
elseif #found ~= 32 then
  --> wrong_type
end
local window, current, previous, epoch = unpack('<I8I8I8I8', found)
if max(window, epoch) > 9007199254740992 or max(current, previous) > 17179869184 then
  --> wrong_type
end
local at, left = floor(now / period), period - now % period
if window == at + 1 then
  left = period
else
  if at == window + 1 then
    previous, current = current, 0
  elseif at ~= window then
    previous, current = 0, 0
  end
  window = at
end
local changed, free = 0, 0
if purpose == 0 then
  local weight = 0
  if sliding == 1 then weight = divide(left, previous, period) end
  free = max(most - current - weight, 0)
  local freed, rest = divide(1500000, most, period)
  local small = max(floor((most + 31) / 32), freed + (rest > 0 and 1 or 0))
  changed = min(max(floor((free + 3) / 4), min(free, small)), hits)
  current, free = current + changed, free - changed
elseif purpose == 1 then
  if of_window == window and of_epoch >= epoch then changed = min(hits, current) end
  current = current - changed
else
  current, previous, epoch = 0, 0, max(epoch, now)
end
local ttl_ms = math.ceil(2 * period / 1000)
if epoch > 0 then ttl_ms = max(ttl_ms, 86400000) end
local done = redis.pcall('SET', key, pack('<I8I8I8I8', window, current, previous, epoch), 'PX', ttl_ms)
if done.err then return done end
return pack('<i8i8i8i8i8', now, epoch, window, changed, free)
