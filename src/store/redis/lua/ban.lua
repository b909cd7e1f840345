-- Bans beside the counters of a descriptor: parts of together.lua, for a call with a limit that has a `ban`.
--
-- KEYS: the counters, then the ban of each counter that has one. ARGV[1] has two parts more: before the first counter
-- the number of counters, and after the numbers of each counter: ban_place (index of the ban's key, 0: none), ban_us
-- (length of a ban in microseconds), after (rejections that start it).
-- State, 24 bytes: time of the last rejection that changed it, end of the ban, rejections since the last ban; times in
-- microseconds. Reply: the state follows that of its counter. Writes: one SET with PX for a ban that changed.
-- TTL: up to a second after the end of the ban, and after the period in which the last rejection counts.
--
-- Decides: in Redis: when a ban begins and ends.

--: ban_functions
local function with_ban(counter, key, now, period, ban_us, after)
  local bytes = 24
  --> read
  local ends, rejections
  last, ends, rejections = unpack('<I8I8I8', before)
  if last > 9007199254740992 or ends > 9007199254740992 or rejections > 9007199254740992 then
    --> wrong_type
  end
  -- A ban that was shortened since ends by its new length.
  ends = min(ends, last + ban_us)
  local at, ahead = now, last - now
  if ahead > max(period, ban_us) then
    ends, rejections = 0, 0
  elseif ahead > 0 then
    at = last
  end
  if at - last > period then rejections = 0 end
  local hits, fits, flags, changed
  local is_banned
  local counts = {}
  for name, value in pairs(counter) do counts[name] = value end
  counter.before = counter.before .. before
  counter.set_limit = function(limit, capacity, wait, limit_flags)
    flags = limit_flags
    -- An odd flag: `rejects` then tells whether the hits fit, in shadow mode too.
    counts.set_limit(limit, capacity, wait, limit_flags - limit_flags % 2 + 1)
  end
  counter.rejects = function(charged)
    hits = charged
    fits = not counts.rejects(charged)
    is_banned = hits >= 0 and ends > at
    return (is_banned or not fits) and flags % 2 == 1
  end
  counter.apply = function(rejected)
    local done = counts.apply(rejected or is_banned)
    if hits <= 0 or fits and not is_banned or is_banned and flags % 4 < 2 then return done end
    rejections = rejections + 1
    if is_banned or rejections >= after then
      ends, rejections = at + ban_us, 0
    else
      ends = 0
    end
    last, changed = at, true
    return true
  end
  counter.write = function()
    local err = counts.write()
    if err or not changed then return err end
    local ttl_ms = math.ceil((max(ends, last + period) - now) / 1000) + 1000
    local value = pack('<I8I8I8', last, ends, rejections)
    --> set
  end
  return counter
end

--: ban_of_counter
local ban_place, ban_us, after
ban_place, ban_us, after, position = unpack('<i8i8i8', args, position)
if ban_place > 0 then
  counter = with_ban(counter, KEYS[ban_place], now, period, ban_us, after)
  if counter.err then return counter end
end
