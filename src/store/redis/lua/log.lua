-- A log of hits as a list: what sliding_window_log reads of it, and what it replies.
--
-- State: each element is 16 bytes, two numbers as in counter.lua: a time, and the hits ever entered up to and with it,
-- modulo 2^52; a record has as many hits as that grows by. Element 0 is no record: the hits that have left the log, and a
-- time up to that of the last charge, which is the latest in the list. So the oldest leave by an LTRIM alone, and a
-- search by halves finds when they do: O(log n) look-ups.
-- Replies: last, the hits before the first record, how many records, and these: the oldest of as many hits as held + a,
-- the newest of as many as b and one more, and before that one which stands for the middle. O(hits drawn).
-- No draw of the call can tell them from all: a is the hits of all draws and the most of one whose refusal counts, less
-- the lowest limit, and neither what gives way nor what is waited for lies further; b is all hits given back.

local function record(c, index)
  local raw = redis.call('LINDEX', c.key, index)
  if raw and #raw == 16 then
    local at, sum = unpack('<I8I8', raw)
    if at < 9007199254740992 and sum < 4503599627370496 then return at, sum end
  end
  c.bad = true
  return 0, 0
end

-- The last element from `index` on, of which it is true, for which time and hits after c.base are still up to these.
local function seek(c, index, time, hits)
  local step = 1
  local function upto(next)
    if next > c.n then return false end
    local at, sum = record(c, next)
    return at <= time and (sum - c.base) % 4503599627370496 <= hits
  end
  while upto(index + step) do index, step = index + step, step * 2 end
  while step > 1 do
    step = step / 2
    if upto(index + step) then index = index + step end
  end
  return index
end

local function records(c, from, to)
  if from > to then return '' end
  local raw = table.concat(redis.call('LRANGE', c.key, from, to))
  c.bad = c.bad or #raw ~= (to - from + 1) * 16
  return raw
end

-- The records that are in the window, as far as a draw can tell them apart.
local function ends(c)
  local first, from_end = c.out + 1, c.n - c.b - 1
  local front = c.out + max(c.held + c.a, 0)
  local raw
  if front + 1 >= from_end then
    raw = records(c, first, c.n)
  else
    raw = records(c, first, front) .. records(c, from_end, c.n)
  end
  return pack('<I8I8I8', c.last, c.base, #raw / 16) .. raw
end
