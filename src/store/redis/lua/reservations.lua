-- Reservations of the counters of a descriptor: parts of together.lua, for a call with a limit that has `reservations`.
-- src/limit/reservation.rs says what they are; the modules `reservation_charge` and `reservation_table` do the same.
--
-- KEYS: the counters, the bans, then the reservations of each counter that has some, in the slot of the counter.
-- ARGV[1] also has, after the numbers of each counter (and of its ban): place (index of the key, 0: none),
-- life_us (time within which a reservation is settled), kept_us (time for which one that is over stays after that, 0:
-- its hits are never given back), estimate (0: the hits of the request). ARGV[3]: the slot, as in slots.lua. The hits of a
-- release are negative: -1 less the true cost.
-- Hash: id -> token, holder, end, hits (0: a tombstone), time of the charge, base (6 x 8 bytes); '' -> number of fields
-- beside this one, hits given back so far, time of the last walk, most hits per period of the limit since anything was
-- open (8 bytes each), cursor of the walk's next step. `base` is what `reservation_mark` of an algorithm returns;
-- `refundable` tells by it how many hits still count.
-- Reply: after the state of the counter, numbers of 8 bytes: kind of the own reservation (0: absent, 1: open, 2: a
-- tombstone, 3: over), its token and hits, hits that can be given back, hits of unsettled ones that were given back
-- before the charge, number of unsettled ones, 1 if there is no room for one more.
-- Writes: one HSET or HDEL. If hits are lacking and are to be given back, or there is no room, a walk (streams.lua)
-- deletes what is over.
-- TTL: a second after the end of the reservation that lives longest, and after kept_us.
--
-- Decides: in Redis: what settles a reservation, and when an unsettled one is given back.

--: reservation_functions
local function with_reservations(counter, index, key, now, period, life_us, kept_us, estimate)
  --> stream_of_request
  local action = string.byte(slot, 33)
  local found = redis.pcall('HMGET', key, '', id)
  if found.err then return found end
  local fields, given_back, walked, highest_rate, cursor = 0, 0, 0, 0, '0'
  if found[1] then
    if #found[1] < 33 then
      --> wrong_type
    end
    fields, given_back, walked, highest_rate = unpack('<I8I8I8I8', found[1])
    cursor = string.sub(found[1], 33)
  end
  local own, kind, reserved, own_token, at, base, own_end = found[2], 0, 0, string.rep('\0', 8), 0, 0, 0
  if own then
    if #own ~= 48 then
      --> wrong_type
    end
    own_end, reserved, at, base = unpack('<I8I8I8I8', own, 17)
    own_token, kind = string.sub(own, 1, 8), reserved > 0 and 1 or 2
  end
  -- Deleted fields, hits to give back, unsettled ones; `refundable` of the own reservation; what is written at the end.
  local gone, returned, unsettled, refundable, has_looked, dirty, value, ttl_us = {}, 0, 0, 0, false, false, nil, nil
  local counts, state = {}, counter.before
  for name, part in pairs(counter) do counts[name] = part end
  local hits, amount, fits, limit, capacity, wait, flags, failed
  local function report()
    local shown = kind
    if own and own_end <= now then shown = kind == 1 and 3 or 0 end
    counter.before = state .. pack('<I8', shown) .. own_token
      .. pack('<I8I8I8I8I8', reserved, refundable, returned, unsettled, fields >= 100000 and 1 or 0)
    reply[index + 1] = counter.before
  end
  -- Charges or refunds; flags as in ARGV[1], 4: the oldest hits of a log.
  local function change(by, of_flags)
    counts.set_limit(limit, capacity, of_flags == 1 and wait or 0, of_flags + flags - flags % 8)
    counts.rejects(by)
    return counts.apply(false)
  end
  local function refundable_of(of, charged_at, of_base)
    return min(of, counts.refundable(charged_at, of_base, given_back, of, highest_rate))
  end
  local function end_unsettled(of, charged_at, of_base)
    unsettled = unsettled + 1
    if kept_us > 0 then
      local back = refundable_of(of, charged_at, of_base)
      returned, given_back = returned + back, given_back + back
    end
  end
  local function walk()
    --> walk_streams
    dirty = true
    return nil
  end
  -- Before the first charge: ends the own reservation if it is over, then others if hits or room are lacking.
  local function look()
    has_looked = true
    counts.set_limit(limit, capacity, 0, flags - flags % 8)
    if hits ~= 0 and limit > highest_rate then highest_rate, dirty = limit, fields > 0 or dirty end
    if own and own_end <= now then
      gone[id], gone[1], fields, dirty = true, id, fields - 1, true
      if kind == 1 then
        end_unsettled(reserved, at, base)
        kind, reserved = 3, 0
      else
        kind = 0
      end
      own, own_token = nil, string.rep('\0', 8)
    end
    counts.set_limit(limit, capacity, wait, 1 + flags - flags % 8)
    local lacks = hits > 0 and not own and kept_us > 0 and counts.rejects(amount)
    --> walk_is_due
    if (lacks or not own and fields >= 100000 and (hits > 0 or is_unanswered)) and is_due then failed = walk() end
    if kind == 1 then refundable = refundable_of(reserved, at, base) end
    if returned > 0 then change(-returned, 4) end
    report()
  end
  counter.set_limit = function(...) limit, capacity, wait, flags = ... end
  counter.rejects = function(charged)
    hits = charged
    amount = hits > 0 and estimate > 0 and estimate or hits
    if not has_looked then look() end
    if hits < 0 or kind == 1 then return false end
    counts.set_limit(limit, capacity, wait, 1 + flags - flags % 8)
    fits = kind ~= 2 and not counts.rejects(amount)
    return not fits and flags % 2 == 1
  end
  -- Two descriptors of a call may have one counter: the next charge finds the reservation as this one leaves it.
  local function charge()
    own_token, ttl_us, dirty = token, life_us + kept_us, true
    if kind ~= 1 then
      change(amount, 1)
      if fields >= 100000 then return end
      at, base = counts.reservation_mark(given_back)
      fields, kind, reserved, refundable = fields + 1, 1, amount, refundable_of(amount, at, base)
    end
    value = token .. holder .. pack('<I8I8I8I8', now + life_us, reserved, at, base)
  end
  local function tombstone()
    ttl_us = 15000000
    return string.rep('\0', 8) .. holder .. pack('<I8I8I8I8', now + 15000000, 0, 0, 0)
  end
  -- The estimate of a reservation that is over stands for its cost. A settlement without an answer leaves a tombstone
  -- then too, so that one that is repeated finds it.
  local function settle()
    local cost = -hits - 1
    if kind == 1 and (is_unanswered or own_token == token) then
      local back = min(reserved - cost, refundable)
      if cost > reserved then
        change(cost - reserved, 2)
      elseif back > 0 then
        change(-back, 4)
        given_back = given_back + back
      end
      dirty, kind, reserved = true, is_unanswered and 2 or 0, 0
      if is_unanswered then
        value = tombstone()
      else
        gone[#gone + 1], fields = id, fields - 1
      end
    elseif kind ~= 2 and is_unanswered then
      if kind == 0 and cost > 0 then change(cost, 2) end
      if fields < 100000 then
        fields, dirty, kind, value = fields + 1, true, 2, tombstone()
      end
    end
  end
  counter.apply = function(rejected)
    if action ~= 1 then
      if hits < 0 then settle() end
    elseif hits > 0 and not rejected and (kind == 1 or kind ~= 2 and fits) then
      charge()
    end
    return false
  end
  counter.plan = function() return failed or counts.plan() end
  counter.write = function()
    local err = counts.write()
    if err or not dirty then return err end
    local done
    if fields <= 0 and not value then
      done = redis.pcall('UNLINK', key)
      return type(done) == 'table' and done or nil
    end
    for _, field in ipairs(gone) do
      done = redis.pcall('HDEL', key, field)
      if type(done) == 'table' then return done end
    end
    local head = pack('<I8I8I8I8', max(fields, 0), min(given_back, 9007199254740992), walked, highest_rate) .. cursor
    done = value and redis.pcall('HSET', key, id, value, '', head) or redis.pcall('HSET', key, '', head)
    if type(done) == 'table' then return done end
    if ttl_us then
      --> keep_streams
    end
  end
  report()
  return counter
end

--: walked_stream
if #field == 16 and #of == 48 and not gone[field] then
  local ends, of_hits, charged_at, of_base = unpack('<I8I8I8I8', of, 17)
  if ends <= now or of_hits > 0 and is_freed_by_death(of, charged_at) then
    gone[field], gone[#gone + 1], fields = true, field, fields - 1
    if of_hits > 0 then end_unsettled(of_hits, charged_at, of_base) end
  end
end

--: reservation_of_counter
local place, life_us, kept_us, estimate
place, life_us, kept_us, estimate, position = unpack('<i8i8i8i8', args, position)
if place > 0 then
  counter = with_reservations(counter, i, KEYS[place], now, period, life_us, kept_us, estimate)
  if counter.err then return counter end
end

--: reservation_methods
-- The mark of a charge that was just applied: its time, and a number that `refundable` understands.
reservation_mark = function(given_back)
  --> reservation_mark
end,
-- Hits of a charge of `reserved` hits with this mark that certainly still count. A bucket had at most this rate.
refundable = function(charged_at, base, given_back, reserved, highest_rate)
  if at < charged_at then return 0 end
  --> refundable
end,
