-- A log of hits as a list: what sliding_window_log reads of it, and what it replies.
--
-- State: each element is 16 bytes, two numbers as in state.lua: a time, and the hits ever entered up to and with it,
-- modulo 2^52; a record has as many hits as that grows by. Element 0 is no record: the hits that have left the log, and
-- a time up to that of the last charge, which is the latest in the list. So the oldest leave by an LTRIM alone, and a
-- search by halves finds them: O(log n) look-ups.
-- Replies: last, the hits before the first record, how many records, and these: the oldest of as many hits as held + a,
-- the newest of as many as b, and before these one with its time and all hits of the middle: O(hits charged).
-- No charge of the call can tell them from all: a is the hits of all charges and the most of one whose refusal counts, less
-- the lowest limit, and neither what gives way nor what is waited for lies further; b is all hits given back.

--: log
-- An element's numbers. `log`: key, size (elements after the first), base (hits before the window); bad once one was
-- read that no charge wrote.
local function element(log, index)
  local raw = redis.call('LINDEX', log.key, index)
  if raw and #raw == 16 then
    local at, sum = unpack('<I8I8', raw)
    if at < 9007199254740992 and sum < 4503599627370496 then return at, sum end
  end
  log.bad = true
  return 0, 0
end

-- The last element from `index` on whose time and whose hits after log.base are still up to these.
local function seek(log, index, time, hits)
  local step = 1
  local function upto(next)
    if next > log.size then return false end
    local at, sum = element(log, next)
    return at <= time and (sum - log.base) % 4503599627370496 <= hits
  end
  while upto(index + step) do index, step = index + step, step * 2 end
  while step > 1 do
    step = step / 2
    if upto(index + step) then index = index + step end
  end
  return index
end

local function elements(log, from, to)
  if from > to then return '' end
  local raw = table.concat(redis.call('LRANGE', log.key, from, to))
  if #raw ~= (to - from + 1) * 16 then log.bad = true end
  return raw
end

-- The records after element `out`, as far as a charge can tell them apart.
local function ends(log, out, to_front, to_back)
  local front, back = out + max(to_front, 0), log.size - to_back
  if front + 1 >= back then return elements(log, out + 1, log.size) end
  return elements(log, out + 1, front) .. elements(log, back, log.size)
end

-- An element of that time with so many hits of the window up to it.
local function packed(log, at, hits)
  return pack('<I8I8', at, (log.base + hits) % 4503599627370496)
end
