-- Identity of a region's Redis, and the last change of its list of regions: see src/store/redis/regions/standing.rs.
--
-- KEYS: the identity. ARGV[1]: signed 64-bit little-endian numbers: now in microseconds since the Unix epoch, negative:
-- use the server's time; remembers (1: id, changed and is_new are those of an earlier reply, 0: the id is a proposal);
-- is_settled (1: no region has had another list); changed; is_new. Then 16 bytes each: an id; the hash of this
-- process's list. Returns: three numbers as above: now, changed, is_new; then the 16 bytes of the id. State: a string:
-- the id and the hash of the list, 16 bytes each; then as unsigned numbers: the time of the list's last change, 0: it
-- never changed; is_new: 1 if this Redis cannot know of an earlier list. Rules: a process writes back what it remembers
-- if the identity is lost, also over a new one. An identity that is new counts its creation as a change until it is
-- settled. Writes: one SET with PX. TTL: 366 days.

local unpack, pack, min = struct.unpack, struct.pack, math.min
local now, remembers, is_settled, changed, is_new, own_id, own_list = unpack('<i8i8i8i8i8c16c16', ARGV[1])
local key, ttl_ms = KEYS[1], '31622400000'
--> clock
local found = redis.pcall('GET', key)
local id, list = own_id, own_list
if not found then
  if remembers == 0 then changed, is_new = now, 1 end
elseif type(found) == 'table' then
  return found
elseif #found ~= 48 then
  --> wrong_type
else
  local found_id, found_list, found_changed, is_found_new = unpack('<c16c16I8I8', found)
  list = found_list
  if is_found_new == 0 or remembers == 0 or is_new == 1 then
    id, changed, is_new = found_id, found_changed, is_found_new
  end
end
if list ~= own_list then
  list, changed, is_new = own_list, now, 0
elseif is_settled == 1 and is_new == 1 then
  changed, is_new = 0, 0
end
changed = min(changed, now)
local value = pack('<c16c16I8I8', id, list, changed, is_new)
--> set
return pack('<i8i8i8c16', now, changed, is_new, id)
