-- slots: requests at once. A hash has a field for each slot; seats in use are kept in a field of their own.
--
-- KEYS: the counter. a: seats of the limit. b: seats that the request needs, negative for a release. ARGV[3]: the slot:
-- id (16 bytes), token and holder (8 each), action (1: acquire, 2: release by token, 3: release without an answer), then,
-- if there are any, the age in microseconds from which slots of dead holders are free, and these (8 bytes each). State for the reply, numbers of 8 bytes: now, seats in use, kind of the own slot
-- (0: absent, 1: held, 2: a tombstone), its token and seats, seats that were found over. Charges: limit. Nothing is rounded.
-- Hash: id -> token, holder, end (8 bytes), seats (4 bytes, 0: a tombstone); '' -> seats, number of tombstones, time of the last
-- walk, cursor of the next step.
-- Writes: one HSET or HDEL. If seats are lacking, and once in the life of a slot, a walk (streams.lua) deletes slots that
-- are over.
-- TTL: one second and the life of a slot after the end of the slot that lives longest, so that slots that nothing
-- released are counted by the next request. An empty hash is deleted.
--
-- Decides: in Redis: seats of a concurrent limit, when a slot is over or expired, what a release frees.

--: load
local last, at, wait_is_unused = now, now
--> stream_of_request
local found = redis.pcall('HMGET', key, '', id)
if found.err then return found end
local used, tombstones, walked, cursor = 0, 0, 0, '0'
if found[1] then
  if #found[1] < 25 then
    --> wrong_type
  end
  used, tombstones, walked = unpack('<I8I8I8', found[1])
  cursor = string.sub(found[1], 25)
end
local own, kind, seats, own_token, expired = found[2], 0, 0, string.rep('\0', 8), 0
local function head()
  return pack('<I8I8I8', max(used, 0), max(tombstones, 0), walked) .. cursor
end
local function remove(field, of_slot)
  used = used - of_slot
  if of_slot == 0 then tombstones = tombstones - 1 end
  return redis.pcall('HDEL', key, field)
end
if own then
  local ends
  if #own ~= 28 then
    --> wrong_type
  end
  ends, seats = unpack('<I8I4', own, 17)
  own_token, kind = string.sub(own, 1, 8), seats > 0 and 1 or 2
  if ends <= now then
    local err = remove(id, seats)
    if type(err) == 'table' then return err end
    own, kind, expired, seats = nil, 0, seats, 0
  end
end
local lacks_seats = kind == 0 and b > 0 and used + b > a or (b > 0 or is_unanswered) and tombstones >= 100000
--> walk_is_due
local wants_routine_walk = found[1] and not own and (cursor ~= '0' or now - walked >= period)
if (lacks_seats or wants_routine_walk) and is_due then
  --> walk_streams
  local done = redis.pcall('HSET', key, '', head())
  if type(done) == 'table' then return done end
elseif found[2] and not own then
  local done = redis.pcall('HSET', key, '', head())
  if type(done) == 'table' then return done end
end
local before = pack('<I8I8I8', now, max(used, 0), kind) .. own_token .. pack('<I8I8', seats, expired)
local value, ttl_us

--: walked_stream
if #field == 16 then
  local ends, of_slot = unpack('<I8I4', of, 17)
  if ends <= now or of_slot > 0 and is_freed_by_death(of, ends - period) then
    local done = remove(field, of_slot)
    if type(done) == 'table' then return done end
    expired = expired + of_slot
  end
end

--: decide
admitted = hits < 0 or kind == 1 or kind == 0 and used + hits <= limit

--: apply
if hits > 0 then
  if kind == 0 then used, seats = used + hits, hits end
  kind, own_token, ttl_us = 1, token, 2 * period
  value = token .. holder .. pack('<I8I4', now + period, seats)
elseif kind == 1 and (is_unanswered or own_token == token) then
  used, kind, seats = used - seats, 0, 0
elseif kind == 2 or not is_unanswered or tombstones >= 100000 then
  do return changed end
end
if hits <= 0 and is_unanswered and tombstones < 100000 then
  tombstones, kind, ttl_us = tombstones + 1, 2, 15000000
  value = string.rep('\0', 8) .. holder .. pack('<I8I4', now + 15000000, 0)
end

--: write
local done
if value then
  done = redis.pcall('HSET', key, id, value, '', head())
elseif used <= 0 and tombstones <= 0 then
  done = redis.pcall('UNLINK', key)
else
  done = redis.pcall('HDEL', key, id)
  if type(done) ~= 'table' then done = redis.pcall('HSET', key, '', head()) end
end
if type(done) == 'table' then return done end
if ttl_us then
  --> keep_streams
end
