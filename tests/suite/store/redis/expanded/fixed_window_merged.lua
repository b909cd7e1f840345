-- Script of several calls on one fixed_window counter each: `merged` of driver.lua with all parts in place.
--
-- For readers; src/store/redis/lua/ has the source, and a test compares both. Sent by EVALSHA <hash> N KEY... and three
-- arguments for each group of keys with the same charges.

local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
local now, lent, is_server_time = -1, 0, true
-- part: clock
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local args, global_view, period, a, b, period_ms, times, hits, limit, capacity, wait, flags
local function charge(key, times, hits, limit, capacity, wait, flags, position)
  -- part: load of fixed_window.lua
  local bytes, hold, held_hits, held_capacity, held_limit, held_until = 16
  -- part: read
  local before, last = redis.pcall('GET', key)
  if not before then
    before = string.rep('\0', bytes)
  elseif type(before) == 'table' then
    return before
  elseif #before ~= bytes then
    -- part: wrong_size of hold.lua
    if #before ~= bytes + 24 then
      return {err = 'WRONGTYPE the value of this key is not the state of a counter'}
    end
    held_hits, hold, held_capacity, held_limit, held_until = unpack('<I4c4I4I4I8', before, bytes + 1)
    if hold ~= 'hold' or held_until > 9007199254740992 then
      return {err = 'WRONGTYPE the value of this key is not the state of a counter'}
    end
    hold = string.sub(before, bytes + 1)
  end
  -- back in load
  local count
  last, count = unpack('<I8I8', before)
  if count > 9007199254740992 then
    return {err = 'WRONGTYPE the value of this key is not the state of a counter'}
  end
  -- part: effective_now
  if last >= 9007199254740992 then
    return {err = 'WRONGTYPE the value of this key is not the state of a counter'}
  end
  local at, ahead, void = now, last - now
  if ahead <= 0 then
    ahead = 0
  elseif ahead <= period then
    at = last
  else
    ahead, void = 0, true
  end
  -- part: end_hold of hold.lua
  if hold and (at >= held_until or held_until - at > 3600000000 + 2 * period) then hold = nil end
  -- back in load
  local window
  local is_new = void
  if a == 0 then
    is_new = is_new or floor(at / period) > floor(last / period)
  else
    local function window_of(us)
      local days = floor(us / 86400000000) + 719468
      local era, day = floor(days / 146097), days % 146097
      local year = floor((day - floor(day / 1460) + floor(day / 36524) - floor(day / 146096)) / 365)
      local month = floor((5 * (day - (365 * year + floor(year / 4) - floor(year / 100))) + 2) / 153)
      return floor(((era * 400 + year) * 12 + month + 2) / a)
    end
    window = window_of(at)
    is_new = is_new or window > window_of(last)
  end
  if is_new then count = 0 end
  local keeps_expiry = last > 0 and not is_new
  -- part: charge_loop
  local admitted, changed
  while times do
    -- part: lower_limit of hold.lua
    if hold then limit, capacity = max(limit - held_hits, 0), max(capacity - held_capacity, 0) end
    -- part: equal_charges, with `decide` of fixed_window.lua in it
    if times > 1 and hits > 0 then
      local each = hits
      hits = each * times
      admitted = hits < 0 or count + hits <= limit
      if admitted then times = 1 else hits = each end
    end
    repeat
      admitted = hits < 0 or count + hits <= limit
      if not admitted and flags < 2 or hits < 0 and wait > 0 and at >= wait then break end
      -- part: apply of fixed_window.lua
      count, last = count + hits, at
      if hits < 0 then
        count = max(count, min(count - hits, lent))
      elseif count > 9007199254740992 then
        count = 9007199254740992
      end
      changed = true
      times = times - 1
    until times == 0
    -- part: next_run
    times = nil
    if position < #args then
      times, hits, limit, capacity, wait, flags, position = unpack('<i8i8i8i8i8i8', args, position)
    end
  end
  if changed then
    -- part: write of fixed_window.lua
    local ttl_ms = period_ms
    if window then
      ttl_ms = math.ceil((((window + 1) * a * 30.436875 - 719528 + 5) * 86400000000 - now) / 1000)
    elseif ahead > 0 then
      ttl_ms = math.ceil((ahead + period) / 1000)
    end
    local value = pack('<I8I8', last, count)
    -- part: set_or_overwrite
    if not (keeps_expiry and is_server_time) or type(redis.pcall('SETRANGE', key, '0', value)) == 'table' then
      -- part: keep_hold of hold.lua
      if hold then value, ttl_ms = value .. hold, ttl_ms + math.ceil((held_until - now) / 1000) end
      local done = redis.pcall('SET', key, value, 'PX', ttl_ms)
      if done.err then return done end
    end
  end
  return before
end
local replies = {pack('<i8', now)}
for group = 1, #ARGV, 3 do
  local position, algorithm_id
  args, global_view = ARGV[group + 1], ARGV[group + 2]
  algorithm_id, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
  -- part: next_run
  times = nil
  if position < #args then
    times, hits, limit, capacity, wait, flags, position = unpack('<i8i8i8i8i8i8', args, position)
  end
  for _ = 1, ARGV[group] do
    local place = #replies
    replies[place + 1] = charge(KEYS[place], times, hits, limit, capacity, wait, flags, position)
  end
end
return replies
