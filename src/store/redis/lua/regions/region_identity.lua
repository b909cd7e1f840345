-- Identity of a region's Redis, its fencing tokens, and what all processes of the region must know: see
-- src/store/redis/regions/registry.rs.
--
-- KEYS: the identity. ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative:
-- use the server's time; remembers (1: what follows is from an earlier reply, 0: the id is a proposal); is_settled (1:
-- no region has had another list); changed; changed_ago: microseconds since a list of another region changed,
-- negative: none did; is_new; generation; leased_until: end of the lease of the region's parts, 0: none is known;
-- jumped_ago: microseconds since this server's clock jumped, negative: it did not. Then 16 bytes each: an id; the hash
-- of this process's list. Then 8 bytes each: the current and the next token; the token that the registry accepted,
-- zeros: none; a new token. Returns: numbers as above: now, changed, is_new, generation, leased_until, disturbed; then
-- id, current and next token. State: a string: id, list; as unsigned numbers changed: the time of the last change of a
-- list, 0: none changed; is_new: 1 if this Redis cannot know of an earlier list; generation of the current token; time
-- of its last change; leased_until; disturbed: the time of the last jump of the clock or loss of data, 0: there was
-- none; time of the last call; then current and next token. Rules: a process writes back what it remembers if the
-- identity is lost, also over a new one, and newer tokens over older ones. Then counters were lost too. An identity that is new counts its creation as a change until it is
-- settled. A token that the registry accepted becomes the current one, at most every 10 s. A jump of the clock ends the
-- lease, because its end is a time of this clock. Writes: one SET with PX. TTL: 366 days.

local unpack, pack, min, max = struct.unpack, struct.pack, math.min, math.max
local now, remembers, is_settled, changed, changed_ago, is_new, generation, leased_until, jumped_ago, own_id, own_list,
  current_token, next_token, accepted, new_token = unpack('<i8i8i8i8i8i8i8i8i8c16c16c8c8c8c8', ARGV[1])
local key, ttl_ms = KEYS[1], '31622400000'
--> clock
local found = redis.pcall('GET', key)
local id, list, advanced, disturbed, called, lease = own_id, own_list, 0, 0, 0, 0
local is_own = remembers == 1
if not found then
  if not is_own then
    changed, is_new, generation, next_token, advanced = now, 1, 1, new_token, now
  else
    disturbed = now
  end
elseif type(found) == 'table' then
  return found
elseif #found ~= 104 then
  --> wrong_type
else
  local found_id, found_changed, is_found_new, found_generation, found_current, found_next
  found_id, list, found_changed, is_found_new, found_generation, advanced, lease, disturbed, called, found_current,
    found_next = unpack('<c16c16I8I8I8I8I8I8I8c8c8', found)
  if is_found_new == 0 or not is_own or is_new == 1 then
    is_own = is_own and found_id == own_id
    changed, is_new = found_changed, is_found_new
    if not is_own or found_generation >= generation then
      generation, current_token, next_token = found_generation, found_current, found_next
    end
    id = found_id
  else
    lease, disturbed = 0, now
  end
end
local told = jumped_ago >= 0 and max(now - jumped_ago, 0) or 0
if called > now + 1000000 then
  disturbed, lease = now, 0
elseif told > disturbed + 1000000 then
  disturbed, lease = told, 0
end
disturbed, advanced, lease = min(disturbed, now), min(advanced, now), min(lease, now + 604800000000)
if is_own then
  lease = max(lease, leased_until)
  if accepted == next_token and advanced + 10000000 <= now then
    generation, current_token, next_token, advanced = generation + 1, next_token, new_token, now
  end
end
if list ~= own_list then
  list, changed, is_new = own_list, now, 0
elseif is_settled == 1 and is_new == 1 then
  changed, is_new = 0, 0
elseif changed_ago >= 0 and is_new == 0 then
  changed = max(changed, now - changed_ago)
end
changed = min(changed, now)
local value = pack('<c16c16I8I8I8I8I8I8I8c8c8', id, list, changed, is_new, generation, advanced, lease, disturbed, now,
  current_token, next_token)
--> set
return pack('<i8i8i8i8i8i8c16c8c8', now, changed, is_new, generation, lease, disturbed, id, current_token, next_token)
