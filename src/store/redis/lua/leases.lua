-- Record of the leases of a descriptor, which lies beside its counters: parts of driver.lua and together.lua. A call
-- that only charges strict limits concerns no leases, and leaves ARGV[2] out.
--
-- KEYS: if ARGV[2] is given and not empty, the last key is the record.
-- ARGV[2]: signed numbers as in ARGV[1]: purpose (0: charges, 1: the return of a lease, 2: a reset), requested (hits of
-- the lease that the last charge requests, 0: none), kept_us (time for which that lease is recorded, in microseconds);
-- then for each lease that the caller knows, as the record has it, its end and hits, and how many of these it will not
-- admit any more.
-- State: unsigned numbers, two for each lease: the time at which its record ends, and its hits; at most 256 leases. The
-- last one stands for all above that.
-- Variables: leased (hits that may still be admitted, so that a refund leaves them charged).
-- A return takes effect only if its lease is recorded. A reset deletes the counters, or leaves them with the leased hits
-- and with what is held.
-- Writes: one SET with PX, if the record changes; UNLINK for a reset. TTL: until the last lease ends, at least 1 s.
--
-- Decides: leases of a counter that Redis records; returns of leases that are lost or late: no effect.

--: leases
local purpose, requested, kept_us, record, recorded
if ARGV[2] and ARGV[2] ~= '' then
  local start, known, is_known
  purpose, requested, kept_us, start = unpack('<i8i8i8', ARGV[2])
  recorded = redis.pcall('GET', KEYS[#KEYS]) or ''
  if type(recorded) == 'table' then
    return recorded
  elseif #recorded % 16 ~= 0 then
    --> wrong_type
  end
  known, record = {}, {}
  for i = start, #ARGV[2], 24 do
    known[string.sub(ARGV[2], i, i + 15)] = unpack('<i8', ARGV[2], i + 16)
  end
  for i = 1, #recorded, 16 do
    local lease = string.sub(recorded, i, i + 15)
    local ends, hits = unpack('<I8I8', lease)
    if ends > now then
      local done = known[lease]
      known[lease], is_known = nil, is_known or done
      leased = leased + hits - (done or 0)
      if purpose == 0 or not done then record[#record + 1] = lease end
    end
  end
  if purpose == 1 then
    -- Leaves the counters as they are, or returns all hits.
    leased = is_known and 0 or 9007199254740992
  elseif purpose == 2 and leased == 0 then
    local deleted, is_held = 0, false
    for i = 1, #KEYS - 1 do
      -- What is held outlasts a reset: see hold.lua. All hits are then refunded.
      local value = redis.pcall('GET', KEYS[i])
      is_held = is_held or type(value) == 'string' and string.sub(value, -20, -17) == 'hold'
        and string.find(value, '[^%z]', -8) ~= nil
    end
    for i, key in ipairs(is_held and {} or KEYS) do
      local done = redis.pcall('UNLINK', key)
      if type(done) == 'table' then return done end
      if i < #KEYS then deleted = deleted + done end
    end
    if not is_held then return deleted end
  end
end

--: record_leases
if record then
  if requested > 0 and not rejected then
    if #record < 256 then
      record[#record + 1] = pack('<I8I8', now + kept_us, requested)
    else
      local ends, hits = unpack('<I8I8', record[256])
      record[256] = pack('<I8I8', max(ends, now + kept_us), hits + requested)
    end
  end
  local text = table.concat(record)
  if text ~= recorded then
    local ttl_us = 1000000
    for i = 1, #text, 16 do ttl_us = max(ttl_us, unpack('<I8', text, i) - now) end
    local done = redis.pcall('SET', KEYS[#KEYS], text, 'PX', math.ceil(ttl_us / 1000))
    if done.err then return done end
  end
end
