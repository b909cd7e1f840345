-- Parts of slots.lua and reservations.lua, whose hashes have a field for each stream and one of an empty name for sums.
--
-- A walk looks for streams that are over, or whose holder is dead: up to 2000 fields in a step. The next step may
-- follow after 20 ms, the next walk after a second. The file that walks has `walked` (time of the last step), `cursor`
-- (of the next one), and a part `walked_stream` for each `field` and its value `of`, which knows by `is_freed_by_death` what a
-- dead holder began.
--
-- Decides: in Redis: the walk that finds slots and reservations that are over.

--: stream_of_request
local slot = ARGV[3]
local id, token, holder = string.sub(slot, 1, 16), string.sub(slot, 17, 24), string.sub(slot, 25, 32)
local is_unanswered = string.byte(slot, 33) == 3

--: walk_is_due
local is_due = now - walked >= (cursor == '0' and 1000000 or 20000) or now < walked

--: walk_streams
-- Streams of dead holders that began until `freed_if_begun_by` are over; later ones are of an Envoy that is back. Those that
-- seem to begin after now are of before the clock was set back.
local dead, freed_if_begun_by, steps = {}, 0, 0
local function is_freed_by_death(of, began)
  return dead[string.sub(of, 9, 16)] and (began <= freed_if_begun_by or began > now)
end
if #slot > 33 then freed_if_begun_by = now - unpack('<I8', slot, 34) end
for i = 42, #slot, 8 do dead[string.sub(slot, i, i + 7)] = true end
repeat
  local page = redis.pcall('HSCAN', key, cursor, 'COUNT', 1000)
  if page.err then return page end
  cursor = page[1]
  local pairs_of_page = page[2]
  for i = 1, #pairs_of_page, 2 do
    local field, of = pairs_of_page[i], pairs_of_page[i + 1]
    --> walked_stream
  end
  steps = steps + #pairs_of_page / 2
until cursor == '0' or steps >= 2000
walked = now

--: keep_streams
-- Lets the hash live for `ttl_us` and a second more, unless it lives longer.
local ttl_ms = math.ceil(ttl_us / 1000) + 1000
if redis.call('PTTL', key) < ttl_ms then
  done = redis.pcall('PEXPIRE', key, ttl_ms)
  if type(done) == 'table' then return done end
end
