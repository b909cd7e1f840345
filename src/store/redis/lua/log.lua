-- Log of hits as a list: reading, searching and the reply of sliding_window_log.
--
-- State: a list; each element is 16 bytes, two numbers as in driver.lua: a time, and the running sum: the number of
-- hits ever entered up to and including this element, modulo 2^52. A record's hits are the growth of that sum.
-- Element 0 is not a record: its sum is the number of hits that have left the log, and its time is at most that of the
-- last charge, which is the latest time in the list. So old records leave with one LTRIM, and a binary search finds
-- them in O(log n) look-ups.
-- Reply: last, the sum before the first record, the number of records, then the records: the oldest `held + a` hits,
-- the newest b hits, and before these one record that merges the middle. O(hits charged).
-- No charge of the call can distinguish this from the whole log: a is the sum of all hits, plus the largest charge
-- whose rejected hits count, less the lowest limit, and no hit further from the oldest leaves the log or is waited for;
-- b is the sum of all refunds.

--: log
-- Returns an element as it is stored, from the server once. `log` has key, size (elements after element 0), base (the
-- sum before the window) and read (the elements read so far, by their index plus one). Known indices are strings,
-- because redis.call takes 0.2 us to format a number.
local function stored(log, index)
  local raw = log.read[index + 1]
  if not raw then
    raw = redis.call('LINDEX', log.key, index == log.size and '-1' or index)
    log.read[index + 1] = raw
  end
  return raw
end

-- Returns the time and the sum of an element; sets log.bad if it has a form that no charge writes.
local function element(log, index)
  local raw = stored(log, index)
  if raw and #raw == 16 then
    local at, sum = unpack('<I8I8', raw)
    if at < 9007199254740992 and sum < 4503599627370496 then return at, sum end
  end
  log.bad = true
  return 0, 0
end

-- Returns true if an element exists, its time is at most `time`, and it ends at most `hits` after log.base.
local function is_within(log, index, time, hits)
  if index > log.size then return false end
  local at, sum = element(log, index)
  return at <= time and (sum - log.base) % 4503599627370496 <= hits
end

-- Returns the last element from `index` on whose time is at most `time` and that ends at most `hits` after log.base.
local function seek(log, index, time, hits)
  local step = 1
  while is_within(log, index + step, time, hits) do index, step = index + step, step * 2 end
  while step > 1 do
    step = step / 2
    if is_within(log, index + step, time, hits) then index = index + step end
  end
  return index
end

local function elements(log, from, to)
  if from > to then return '' end
  local raw = from == to and stored(log, from) or table.concat(redis.call('LRANGE', log.key, from, to))
  if #raw ~= (to - from + 1) * 16 then log.bad = true end
  return raw
end

-- Returns the records after element `expired`, as far as a charge can distinguish them.
local function ends(log, expired, to_front, to_back)
  local front, back = expired + max(to_front, 0), log.size - to_back
  if front + 1 >= back then return elements(log, expired + 1, log.size) end
  return elements(log, expired + 1, front) .. elements(log, back, log.size)
end

-- Returns an element at time `at`, with `hits` hits of the window up to it.
local function packed(log, at, hits)
  return pack('<I8I8', at, (log.base + hits) % 4503599627370496)
end
