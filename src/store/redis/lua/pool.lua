-- Pools of a region beside its counters: parts of together.lua, for a call with a global limit, and `exchange`, the
-- script that gives a pool the answer to its request. src/limit/algorithm/region_pool.rs says what pools are, and does the same
-- arithmetic.
--
-- KEYS: the counters, the bans and the reservations, then the pool of each counter that has one. ARGV[1] has `place`
-- (index of the pool's key, 0: none) after the numbers of each counter. The counter has the limit of the region's part; `wait`
-- is the most hits that could ever pass at once, of a refund the time from which it is void.
-- State, 152 bytes: last, id, left, ends, unreported, number, first_number, reported, requested_at, next_request_at, low, demand,
-- demand_since, unmet, then 40 bytes that only Rust reads. Reply: the state follows that of its counter.
-- Writes: one SET with PX for a pool that changed: not for a charge that the part admits. TTL: a minute after its end.
--
-- Decides: in Redis: from what a region admits a hit, and when it asks the global Redis.

--: pool_functions
local function with_pool(counter, key, now, period)
  local bytes = 152
  --> read
  --> read_pool
  if last == 0 then
    id, demand_since = now, now
  elseif last > now + 1000000 then
    last, left, demand, demand_since, next_request_at = now, 0, 0, now, now
  end
  last = max(last, now)
  if last >= ends then left = 0 end
  local span, elapsed = max(min(floor(period / 5), 4000000), 2000000), last - demand_since
  if elapsed > 2 * span then
    demand, demand_since = 0, last
  elseif elapsed > span then
    demand, demand_since = floor(demand / 2), last - floor(span / 2)
  end
  local hits, of_pool, of_part, fits, flags, most_or_void_from, changed
  local part_last, counts = unpack('<I8', counter.before), {}
  local part_at = part_last - now <= period and max(now, part_last) or now
  for name, value in pairs(counter) do counts[name] = value end
  counter.before = counter.before .. before
  counter.set_limit = function(limit, capacity, wait, limit_flags)
    flags, most_or_void_from = limit_flags, wait
    -- An odd flag: `rejects` then tells whether the hits fit, in shadow mode too.
    counts.set_limit(limit, capacity, 0, limit_flags - limit_flags % 2 + 1)
  end
  counter.rejects = function(charged)
    hits, of_pool, of_part = charged, 0, charged
    fits = not counts.rejects(charged)
    if not fits then
      of_pool = min(left, hits)
      of_part = hits - of_pool
      fits = of_pool > 0 and (of_part == 0 or not counts.rejects(of_part))
    end
    return not fits and flags % 2 == 1
  end
  counter.apply = function(rejected)
    if hits < 0 then
      if most_or_void_from > 0 and part_at >= most_or_void_from then return false end
      local back = min(-hits, max(unreported - leased, 0))
      unreported = unreported - back
      if last < ends then left = left + back end
      if -hits > back then
        counts.rejects(hits + back)
        counts.apply(false)
      end
      changed = true
      return true
    elseif fits and rejected then
      return false
    end
    local asked, done = fits and of_pool or hits <= most_or_void_from and hits or 0, false
    demand = min(demand + asked, 9007199254740992)
    if fits then
      left, unreported = left - of_pool, min(unreported + of_pool, 9007199254740992)
      done = of_part > 0 and counts.apply(false)
    else
      unmet = max(unmet, min(asked, 9007199254740992))
    end
    if asked > 0 and left <= low and (next_request_at <= last or next_request_at > last + 6000000) then
      --> start_request
    end
    changed = changed or asked > 0
    return done or asked > 0
  end
  counter.write = function()
    local err = counts.write()
    if err or not changed then return err end
    --> write_pool
  end
  return counter
end

--: pool_of_counter
local pool_place
pool_place, position = unpack('<i8', args, position)
if pool_place > 0 then
  counter = with_pool(counter, KEYS[pool_place], now, period)
  if counter.err then return counter end
end

--: read_pool
local id, left, ends, unreported, number, first_number, reported, requested_at, next_request_at, low, demand, demand_since, unmet
last, id, left, ends, unreported, number, first_number, reported, requested_at, next_request_at, low, demand, demand_since, unmet =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
if max(last, id, left, ends, unreported, number, first_number, reported, requested_at, next_request_at, low, demand, demand_since,
  unmet) > 9007199254740992 then
  --> wrong_type
end
local answer = string.sub(before, 113)

--: start_request
number = max(last, number + 1)
if first_number == 0 then first_number, reported, unreported = number, unreported, 0 end
requested_at, next_request_at = last, last + 3000000

--: write_pool
local ttl_ms = math.ceil(max(ends - now, 0) / 1000) + 60000
local value = pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, id, left, ends, unreported, number, first_number, reported, requested_at,
  next_request_at, low, demand, demand_since, unmet) .. answer
--> set

--: exchange
-- KEYS: the pool. ARGV[1]: signed numbers: now as in driver.lua, number (of the pool's last request) and purpose; 0: an
-- answer to it, then
-- held, ends, low and next_request_at and the 40 bytes that only Rust reads; 1: only a read; 2: a request that gives hits
-- back, then how many to keep.
-- Returns: the time, then the pool, after the change if the number is that of its last request; nothing without a pool.
-- An answer to a request that is not open changes nothing, and returns nothing.
local unpack, pack, max, min = struct.unpack, struct.pack, math.max, math.min
local key, bytes, now, of_number, purpose, held = KEYS[1], 152, unpack('<i8i8i8', ARGV[1])
--> clock
--> read
--> read_pool
if last == 0 or number ~= of_number or purpose == 0 and first_number == 0 then return '' end
if purpose == 0 then
  held, ends, low, next_request_at = unpack('<i8i8i8i8', ARGV[1], 25)
  left, first_number, reported, unmet, answer = max(held - unreported, 0), 0, 0, 0, string.sub(ARGV[1], 57)
elseif purpose == 2 then
  last = last > now + 1000000 and now or max(last, now)
  left = last < ends and min(left, (unpack('<i8', ARGV[1], 25))) or 0
  --> start_request
end
if purpose ~= 1 then
  --> write_pool
  before = value
end
return pack('<i8', now) .. before
