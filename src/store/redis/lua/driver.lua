-- Drivers of the charges on one counter: decide a batch of them, in order, at one time, and write the counter once.
--
-- `one_call` is the script of one call, which may concern leases; `merged` is that of up to 16 calls in one command, on
-- one counter each, and does the same for each of them, without leases. Both consist of the parts below and those of
-- the algorithm, which replace the arrows, so parts share local variables. together.lua is the
-- driver for several counters of a descriptor.
--
-- one_call
-- KEYS: the counter, and the record of leases if the call concerns them. ARGV[2]: see leases.lua.
-- ARGV[1]: signed 64-bit little-endian numbers:
--   now in microseconds since the Unix epoch, negative: use the server's time;
--   the counter: algorithm_id, period in microseconds, a, b (each algorithm says what they mean), then one byte with a
--   number of digits and that many decimal digits: the period in milliseconds;
--   for each run of equal charges: times (how many), hits of each (negative: a refund), limit, capacity, wait in
--   microseconds, and flags: 1 if its rejection rejects the charge, plus 2 if rejected hits count.
--   The wait of a charge is its longest delay; the wait of a refund is the time from which it is void, 0: never. A
--   token_bucket adds 8 times its `max_wait` in microseconds to the flags.
-- Returns: one string: now, a number as above, then the state before the call, and with ARGV[2] the number of hits that
--   refunds leave charged. A reset returns the number of counters that it deleted or emptied.
--
-- merged
-- KEYS: the counters. ARGV: for each group of keys with the same charges, its number of keys, and the ARGV[1] above,
--   whose time is the server's.
-- Returns: the time, a number as above, then for each key its state before the call, or the error of that key. Each key
--   is decided and written before the next one.
--
-- State: one string of unsigned 64-bit little-endian numbers; a log has a list instead. The first is the time of the
-- last charge in microseconds since the Unix epoch; each algorithm lists the others and rejects values that no charge
-- leads to. All are at most 2^53, so that a Lua number holds them exactly.
-- Variables, times in microseconds: last (time of the last charge), at (the counter's own now: the later of now and
-- last), ahead (at - now), void (true if last lies more than a period ahead: the clock was wrong), before (the state as
-- found, for the reply).
-- Writes: nothing if no charge changes the counter, and nothing before all are decided; one SET with PX. Where
-- keeps_expiry, and the time is the server's (is_server_time), the key lives long enough as it is: a SETRANGE, which
-- costs half, or the SET for a user who may not. TTL: ttl_ms, which the algorithm computes, as a number or, faster, in
-- decimal digits.
-- Errors are returned, not raised, so that they begin with Redis's own error word in every version.
--
-- Decides: the form of a counter's state in Redis; a key that holds something else (WRONGTYPE, `wrong_type`).

--: one_call
local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local args, key = ARGV[1], KEYS[1]
local now, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
local leased, is_server_time = 0, now < 0
--> clock
--> leases
--> load
local times, hits, limit, capacity, wait, flags
--> next_run
--> charge_loop
local rejected = record and requested > 0 and not admitted and flags % 2 == 1
--> record_leases
if changed then
  --> plan
  --> write
end
if not record then return pack('<i8', now) .. before end
if purpose == 2 then return 1 end
return pack('<i8', now) .. before .. pack('<i8', leased)

--: merged
local unpack, pack, floor, max, min = struct.unpack, struct.pack, math.floor, math.max, math.min
--> helpers
local now, leased, is_server_time = -1, 0, true
--> clock
local args, period, a, b, period_ms, times, hits, limit, capacity, wait, flags
local function charge(key, times, hits, limit, capacity, wait, flags, position)
  --> load
  --> charge_loop
  if changed then
    --> plan
    --> write
  end
  return before
end
local replies = {pack('<i8', now)}
for group = 1, #ARGV, 2 do
  local position, algorithm_id
  args = ARGV[group + 1]
  -- The first number is the time, which all groups share.
  algorithm_id, algorithm_id, period, a, b, period_ms, position = unpack('<i8i8i8i8i8Bc0', args)
  --> next_run
  for _ = 1, ARGV[group] do
    local place = #replies
    replies[place + 1] = charge(KEYS[place], times, hits, limit, capacity, wait, flags, position)
  end
end
return replies

--: clock
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

--: read
local before, last = redis.pcall('GET', key)
if not before then
  before = string.rep('\0', bytes)
elseif type(before) == 'table' then
  return before
elseif #before ~= bytes then
  --> wrong_size
end

--: wrong_size
-- A state that can be held has a part of the same name, as have the two parts below: see hold.lua.
--> wrong_type

--: lower_limit
-- Nothing is held.

--: keep_hold
-- Nothing is held.

--: effective_now
if last >= 9007199254740992 then
  --> wrong_type
end
local at, ahead, void = now, last - now
if ahead <= 0 then
  ahead = 0
elseif ahead <= period then
  at = last
else
  ahead, void = 0, true
end

--: next_run
-- Sets the next run of equal charges, times nil after the last; position is that of the one after it.
times = nil
if position < #args then
  times, hits, limit, capacity, wait, flags, position = unpack('<i8i8i8i8i8i8', args, position)
end

--: charge_loop
-- Decides and applies the charges. `decide` sets admitted; `apply` charges the hits, or enters rejected hits as debt.
local admitted, changed
while times do
  --> lower_limit
  --> equal_charges
  repeat
    --> decide
    -- A charge that changed nothing would change nothing when repeated. `wait` of a refund: the time it is void from.
    if not admitted and flags % 4 < 2 or hits < 0 and wait > 0 and at >= wait then break end
    --> apply
    changed = true
    times = times - 1
  until times == 0
  --> next_run
end

--: equal_charges
-- Equal charges in a row that fit as one also fit one by one, with the same result: a hot key costs little more than an
-- idle one. An algorithm for which this is wrong replaces it with a part of the same name.
if times > 1 and hits > 0 then
  local each = hits
  hits = each * times
  --> decide
  if admitted then times = 1 else hits = each end
end

--: decide_counters
for _, counter in ipairs(counters) do
  if counter.rejects(hits) then rejected = true end
end

--: reservation_mark
return at, 0

--: refundable
-- No hits of this counting are reserved.
return 0

--: set_or_overwrite
if not (keeps_expiry and is_server_time) or type(redis.pcall('SETRANGE', key, '0', value)) == 'table' then
  --> keep_hold
  --> set
end

--: set
local done = redis.pcall('SET', key, value, 'PX', ttl_ms)
if done.err then return done end

--: wrong_type
return {err = 'WRONGTYPE the value of this key is not the state of a counter'}
