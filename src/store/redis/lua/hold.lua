-- Holds on a counter: hits that pools may admit without asking, and that all decisions leave out. Parts of the
-- scripts of fixed_window, calendar_window, sliding_window_counter and token_bucket, and `adjust_hold`, the script that
-- changes a hold. src/limit/hold.rs says what holds are, and does the same arithmetic.
--
-- State: while something is held, 24 bytes follow the state of the counter: unsigned 32-bit numbers and one of 64 bits:
-- hits (held of each window, or of the refill of a bucket), the four letters "hold", capacity (held of a bucket), limit
-- (the limit at the time of the hold), and the time at which the last hold ends, in microseconds. Without them a
-- counter costs nothing more: a read of the right length does not look for them. They stay after the end until the next
-- SET. A SETRANGE leaves them as they are. A token bucket has its mark after them.
-- Variables: hold (these bytes; nil if nothing is held now), held_hits, held_capacity, held_limit, held_until.
-- At the end of a hold on a bucket, its capacity is charged: see token_bucket.lua.
--
-- Decides: in Redis: which replicas may hold hits of a counter, and how many.

--: wrong_size
if #before ~= bytes + 24 then
  --> wrong_type
end
--> read_total_hold

--: read_total_hold
held_hits, hold, held_capacity, held_limit, held_until = unpack('<I4c4I4I4I8', before, bytes + 1)
if hold ~= 'hold' or held_until > 9007199254740992 then
  --> wrong_type
end
hold = string.sub(before, bytes + 1, bytes + 24)

--: end_hold
-- A hold that ends later than any can was made before the clock was set back.
if hold and (at >= held_until or held_until - at > 3600000000 + 2 * period) then hold = nil end

--: lower_limit
if hold then limit, capacity = max(limit - held_hits, 0), max(capacity - held_capacity, 0) end

--: keep_hold
if hold then value, ttl_ms = value .. hold, ttl_ms + math.ceil((held_until - now) / 1000) end

--: adjust_hold
-- Charges what a pool used, and grants what it wants as far as that fits.
--
-- KEYS: the counter, and the record of its pools.
-- ARGV[1]: the time and the numbers of the counter as in driver.lua, then signed numbers: limit, capacity, by_capacity
-- (1: holds take capacity, 0: hits of windows), windows (after how many ends of windows a hold ends, 0: at its time),
-- first_end and second_end (the next two ends of windows of a calendar at the end of the hold, by the caller's clock,
-- in microseconds; 0: windows have the period's length), used, wanted_hits, wanted_capacity, lasts_us, demand, number
-- (below the pool's last one, the request is late and changes nothing; 0: none), first (number of the request that told
-- `used` first: it is charged unless that one or a later one came), charged_capacity and charged_flags (as charges have
-- them); then 16 bytes: the pool.
-- Returns: numbers as above: now, granted hits and capacity, the end of the hold, hits and capacity that would still
-- fit; then the record of the other pools.
-- Record: for each pool 16 bytes, its identity, and as unsigned numbers the hits and the capacity that it holds, the
-- end of its hold, its demand, and its last number; at most 128 pools.
-- Writes: one SET with PX for each key. TTL of the record: ten seconds after the last hold ends. O(pools).
local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, key, record_key = ARGV[1], KEYS[1], KEYS[2]
local now, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
local leased, is_server_time = 0, false
--> clock
--> load
local hits, limit, capacity, wait, flags, admitted
local full_limit, full_capacity, by_capacity, windows, first_end, second_end, used, wanted_hits, wanted_capacity,
  lasts_us, demand, number, first, charged_capacity, charged_flags, me =
  unpack('<i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8c16', args, position)
local recorded = redis.pcall('GET', record_key) or ''
if type(recorded) == 'table' then
  return recorded
elseif #recorded % 56 ~= 0 then
  --> wrong_type
end
-- The other pools, what they hold, and what the caller holds. What has ended is charged, unless `load` did that.
local told, rows, sum_hits, sum_capacity, own_hits, own_capacity, ended = used, {}, 0, 0, 0, 0, 0
local sum_until, record_until, late_ends = 0, 0, nil
for i = 1, #recorded, 56 do
  local id, row_hits, row_capacity, ends, row_demand, row_number = unpack('<c16I8I8I8I8I8', recorded, i)
  local row = string.sub(recorded, i, i + 55)
  if ends <= at then
    ended, row_hits, row_capacity = ended + row_capacity, 0, 0
    row = pack('<c16I8I8I8I8I8', id, 0, 0, ends, row_demand, row_number)
  end
  -- An ended row is known for ten seconds: ROW_KEPT_US.
  if ends > at - 10000000 and ends - at <= 3600000000 + 2 * period then
    if id == me then
      own_hits, own_capacity = row_hits, row_capacity
      if number > 0 and number < row_number then
        used, told, number, demand, late_ends = 0, 0, row_number, row_demand, ends
        wanted_hits, wanted_capacity = row_hits, row_capacity
      elseif first > 0 and row_number >= first then
        used = 0
      end
    else
      rows[#rows + 1] = row
      sum_hits, sum_capacity, record_until = sum_hits + row_hits, sum_capacity + row_capacity, max(record_until, ends)
      if row_hits + row_capacity > 0 then sum_until = max(sum_until, ends) end
    end
  end
end
-- Without a hold that lasts, what has ended was settled with it.
if not hold then ended = 0 end
-- Used hits are charged whatever the room, the refill of a bucket being what holds left of it until now.
local own, debt = own_hits, full_limit + full_capacity
hits, limit, capacity, wait, flags = 0, 4294967295, charged_capacity, 0, 3 + charged_flags - charged_flags % 8
if by_capacity == 1 then
  own, limit, capacity = own_capacity, max(full_limit - (hold and held_hits or 0), 0), 4294967295
  bucket, never_cuts_level = full_capacity, hold and held_limit == full_limit
  if settled_limit == full_limit and not was_resized and (whole > bucket or whole == bucket and part > 0) then size = bucket end
end
hits = ended + min(used, own + debt)
--> decide
--> apply
if by_capacity == 1 then own_capacity = max(own - used, 0) else own_hits = max(own - used, 0) end
-- What is still held, up to what is wanted, stays; the rest of what is wanted has to fit beside all holds.
local has_place = #rows < 128
wanted_hits = has_place and min(wanted_hits, 4294967295) or 0
wanted_capacity = has_place and by_capacity == 1 and min(wanted_capacity, 4294967295) or 0
local granted_hits, granted_capacity = min(own_hits, wanted_hits), min(own_capacity, wanted_capacity)
sum_hits, sum_capacity = sum_hits + granted_hits, sum_capacity + granted_capacity
limit, capacity = full_limit, charged_capacity
local room_hits, room_capacity = max(full_limit - sum_hits, 0), 0
if by_capacity == 1 then capacity = max(full_capacity - sum_capacity, 0) else limit = room_hits end
local fits, too_many = 0, (by_capacity == 1 and capacity or limit) + 1
while too_many - fits > 1 do
  hits = floor((fits + too_many) / 2)
  --> decide
  if admitted then fits = hits else too_many = hits end
end
if by_capacity == 1 then room_capacity = fits else room_hits = fits end
local added_hits = min(wanted_hits - granted_hits, room_hits)
local added_capacity = min(wanted_capacity - granted_capacity, room_capacity)
granted_capacity = granted_capacity + added_capacity
if wanted_capacity > 0 then
  -- No more of the refill than goes with the capacity: floor(wanted_hits * granted_capacity / wanted_capacity), in
  -- two steps, because the product can exceed 2^53.
  local high = floor(wanted_hits / 65536) * granted_capacity
  local low = high % wanted_capacity * 65536 + wanted_hits % 65536 * granted_capacity
  local fitting = floor(high / wanted_capacity) * 65536 + floor(low / wanted_capacity)
  added_hits = min(granted_hits + added_hits, fitting) - granted_hits
end
granted_hits = granted_hits + added_hits
local ends = at + min(lasts_us, 3600000000)
if first_end > 0 then
  ends = ends < first_end and first_end or max(ends, second_end)
elseif windows > 0 then
  ends = (floor(ends / period) + windows) * period
end
ends = late_ends or ends
local others = table.concat(rows)
recorded = others
if has_place and (late_ends or granted_hits + granted_capacity + demand + told > 0) then
  recorded = others .. pack('<c16I8I8I8I8I8', me, granted_hits, granted_capacity, ends, demand, number)
  record_until = max(record_until, ends)
  if granted_hits + granted_capacity > 0 then sum_until = max(sum_until, ends) end
end
hold, sum_hits, sum_capacity = nil, sum_hits + added_hits, sum_capacity + added_capacity
if sum_hits + sum_capacity > 0 then
  held_hits, held_capacity = min(sum_hits, 4294967295), min(sum_capacity, 4294967295)
  held_limit, held_until = min(full_limit, 4294967295), sum_until
  hold = pack('<I4c4I4I4I8', held_hits, 'hold', held_capacity, held_limit, held_until)
end
--> write
local kept_ms = math.ceil(max(record_until - now, 0) / 1000) + 10000
local done = redis.pcall('SET', record_key, recorded, 'PX', kept_ms)
if done.err then return done end
return pack('<i8i8i8i8i8i8', now, granted_hits, granted_capacity, ends, room_hits - max(added_hits, 0),
  room_capacity - added_capacity) .. others
