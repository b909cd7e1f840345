-- sliding_window_log: a record for each instant at which hits were entered.
--
-- KEYS: the counter, with a and b: see log.lua, as for state, reply and cost. Charges: limit. Rounding: none.
-- Writes: LTRIM, LSET, RPUSH as needed, and PEXPIRE. TTL: a period from the counter's now on, rounded up.
-- Variables: out (elements before the window), held (hits in it as found); what is left of them lies between dropped
-- and kept, in hits, and then come those that are new.

--: open
local length = redis.pcall('LLEN', key)
if type(length) == 'table' then return length end
local log, last, top, out = {key = key, size = max(length - 1, 0), base = 0}, 0, 0, 0
if length > 0 then
  local head
  head, log.base = element(log, 0)
  last, top = element(log, log.size)
  last = max(last, head)
end
--> arrive
if void then out = log.size else out = seek(log, 0, at - period, 4503599627370496) end
if out > 0 then log.base = select(2, element(log, out)) end
local held = (top - log.base) % 4503599627370496
local dropped, kept, new = 0, held, 0
-- What is to stay: the element that becomes the first, and the newest record, if one does, with its time.
local first, final, newest, head_at, head_sum
local before = ends(log, out, held + a, b)
before = pack('<I8I8I8', last, log.base, #before / 16) .. before
if log.bad then
  --> wrong
end

--: fits
passes = hits < 0 or kept - dropped + new + hits <= limit

--: add
if hits < 0 then
  kept = max(kept + min(new + hits, 0), dropped)
  new = max(new + hits, 0)
elseif passes then
  new = new + hits
else
  -- The log keeps as many of its newest hits as it held, at least the limit.
  local size = kept - dropped + new
  local most = max(size, limit)
  local entered = min(hits, most)
  new, dropped = new + entered, dropped + max(size + entered - most, 0)
  if dropped > kept then new, dropped = new - (dropped - kept), kept end
end

--: plan
first, final = out, out
if kept > dropped then
  if dropped > 0 then first = seek(log, out, at, dropped) end
  final = log.size
  if kept < held then final = seek(log, first, at, kept - 1) + 1 end
  newest = element(log, final)
end
if length > 0 then head_at, head_sum = element(log, first) end
if log.bad then
  --> wrong
end

--: write
local failed
local function write(...)
  local done = not failed and redis.pcall(...)
  if type(done) == 'table' and done.err then failed = done end
end
if length == 0 then
  write('RPUSH', key, packed(log, new > 0 and 0 or at, 0))
else
  if first > 0 or final < log.size then write('LTRIM', key, first, final) end
  if new == 0 or head_at > at or head_sum ~= (log.base + dropped) % 4503599627370496 then
    write('LSET', key, 0, packed(log, at, dropped))
  end
end
if newest == at and new > 0 then
  write('LSET', key, -1, packed(log, at, kept + new))
else
  if newest and kept < held then write('LSET', key, -1, packed(log, newest, kept)) end
  if new > 0 then write('RPUSH', key, packed(log, at, kept + new)) end
end
write('PEXPIRE', key, ahead == 0 and period_ms or math.ceil((ahead + period) / 1000))
if failed then return failed end
