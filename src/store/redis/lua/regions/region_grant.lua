-- Gives a grant to a region's counter of windows, or takes its unused hits: see src/limit/algorithm/region_window.rs.
--
-- KEYS: the counter, with the state of region_window.lua.
-- ARGV[1]: signed 64-bit little-endian numbers: purpose (0: a grant, 1: a return), period in milliseconds, window; then
-- of a grant: request, epoch, hits, low, exhausted, next_request_at.
-- Returns: 1 if the grant was taken, else 0; the number of hits of a return.
-- Writes: one SET with PX if something changed. TTL: two periods plus 2 s.

local unpack, pack, min = struct.unpack, struct.pack, math.min
local key, purpose, period_ms, of_window = KEYS[1], unpack('<i8i8i8', ARGV[1])
local before = redis.pcall('GET', key)
if not before then
  return 0
elseif type(before) == 'table' then
  return before
elseif #before ~= 120 then
  --> wrong_type
end
local last, window, granted, reserve_used, requested, low, granted_total, next_reserve_used, previous_requested,
  exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
local result = 1
if purpose == 0 then
  local request, granted_epoch, hits, new_low, new_exhausted, not_before = unpack('<i8i8i8i8i8i8', ARGV[1], 25)
  if request == 0 or request ~= open_request then return 0 end
  if of_window == window + 1 then
    window, reserve_used, previous_requested = of_window, next_reserve_used, requested
    granted, granted_total, next_reserve_used, requested = 0, 0, 0, 0
  end
  if of_window ~= window then return 0 end
  if granted_epoch > epoch then
    granted, granted_total, reserve_used, next_reserve_used, epoch = 0, 0, 0, 0, granted_epoch
  end
  granted, granted_total, open_request = granted + hits, granted_total + hits, 0
  low, exhausted, next_request_at = new_low, new_exhausted, not_before
else
  if of_window ~= window or granted == 0 then return 0 end
  result, granted, granted_total = granted, 0, granted_total - min(granted, granted_total)
end
local done = redis.pcall('SET', key, pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, window, granted, reserve_used,
  requested, low, granted_total, next_reserve_used, previous_requested, exhausted, open_request, next_request_at, epoch,
  cut_off_start, cut_off_used), 'PX', 2 * period_ms + 2000)
if done.err then return done end
return result
