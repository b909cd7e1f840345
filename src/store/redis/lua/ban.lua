-- Bans beside the counters of a descriptor: parts of together.lua, for a call with a limit that has a `ban`.
--
-- KEYS: the counters, then the ban of each counter that has one. ARGV[1] has two parts more: before the first counter
-- the number of counters, and after the numbers of each counter: ban_place (index of the ban's key, 0: none), ban_us
-- (length of a ban in microseconds), after (rejections that start it), peek (hits that must fit for a peek to pass, -1:
-- peeks start no ban). A charge of 0 hits is a peek: it changes bans only.
-- State, 24 bytes: time of the last rejection that changed it, end of the ban, rejections since the last ban; times in
-- microseconds. Reply: the state follows that of its counter. Writes: one SET with PX for a ban that changed.
-- TTL: up to a second after the end of the ban, and after the period in which the last rejection counts.
--
-- Decides: in Redis: when a ban begins and ends.

--: ban_functions
local function with_ban(counter, key, now, period, ban_us, after, peek)
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
    fits = not counts.rejects(hits == 0 and peek or hits)
    is_banned = hits >= 0 and ends > at
    return (is_banned or not fits) and flags % 2 == 1
  end
  counter.apply = function(rejected)
    local done = hits ~= 0 and counts.apply(rejected or is_banned)
    local counts_for_ban = hits > 0 or hits == 0 and peek >= 0
    if not counts_for_ban or fits and not is_banned or is_banned and flags % 4 < 2 then return done end
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

-- Leaves a counter without a ban as it is when a peek is charged to the counters beside it.
local function without_peeks(counter)
  local rejects, apply, hits = counter.rejects, counter.apply
  counter.rejects = function(charged)
    hits = charged
    return rejects(charged)
  end
  counter.apply = function(rejected)
    return hits ~= 0 and apply(rejected)
  end
  return counter
end

--: ban_of_counter
local ban_place, ban_us, after, peek
ban_place, ban_us, after, peek, position = unpack('<i8i8i8i8', args, position)
if ban_place > 0 then
  counter = with_ban(counter, KEYS[ban_place], now, period, ban_us, after, peek)
  if counter.err then return counter end
else
  counter = without_peeks(counter)
end
