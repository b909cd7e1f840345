-- sliding_window_log: a record for each instant at which hits were entered.
--
-- KEYS: the counter. a, b, state, reply and cost: see log.lua. Charges: limit. Rounding: none.
-- Writes: LTRIM, LSET and RPUSH as needed, and PEXPIRE. TTL: one period after the counter's now, rounded up.
-- Variables: expired (number of elements before the window), held (hits in the window as found). Of the held hits,
-- those from `dropped` to `kept` remain; `new` hits follow them.
--
-- Decides: when the key of a sliding window log expires (TTL).

--: load
local read = redis.pcall('LRANGE', key, '0', '1')
local length = #read
if length == 2 then
  length = redis.call('LLEN', key)
elseif length == 0 and read.err then
  return read
end
local log, last, top, expired = {key = key, size = max(length - 1, 0), base = 0, read = read}, 0, 0, 0
local head_at, head_sum, last_at
if length > 0 then
  head_at, head_sum = element(log, 0)
  last_at, top = element(log, log.size)
  last, log.base = max(last_at, head_at), head_sum
end
--> effective_now
if void then expired = log.size else expired = seek(log, 0, at - period, 4503599627370496) end
if expired > 0 then log.base = select(2, element(log, expired)) end
local held = (top - log.base) % 4503599627370496
local dropped, kept, new = 0, held, 0
-- Elements that stay: first becomes element 0, at time head_at and with the sum head_sum, and final is the newest
-- record that stays, at time newest.
local first, final, newest
local before = ends(log, expired, held + a, b)
before = pack('<I8I8I8', last, log.base, #before / 16) .. before
if log.bad then
  --> wrong_type
end

--: decide
admitted = hits < 0 or kept - dropped + new + hits <= limit

--: apply
if hits < 0 and (leased > 0 or flags >= 4) then
  -- The newest hits may be leased, and must then stay for a period. Those of a reservation may be followed by others.
  dropped = dropped + min(-hits, max(kept - dropped + new - leased, 0))
  if dropped > kept then new, dropped = new - (dropped - kept), kept end
elseif hits < 0 then
  kept = max(kept + min(new + hits, 0), dropped)
  new = max(new + hits, 0)
elseif admitted then
  new = new + hits
else
  -- Debt: the log keeps as many of its newest hits as it held, or the limit if that is more.
  local size = kept - dropped + new
  local most = max(size, limit)
  local entered = min(hits, most)
  new, dropped = new + entered, dropped + max(size + entered - most, 0)
  if dropped > kept then new, dropped = new - (dropped - kept), kept end
end

--: plan
first, final = expired, expired
if kept > dropped then
  if dropped > 0 then first = seek(log, expired, at, dropped) end
  final, newest = log.size, last_at
  if kept < held then
    final = seek(log, first, at, kept - 1) + 1
    newest = element(log, final)
  end
end
if first > 0 then head_at, head_sum = element(log, first) end
if log.bad then
  --> wrong_type
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
    write('LSET', key, '0', packed(log, at, dropped))
  end
end
if newest == at and new > 0 then
  write('LSET', key, '-1', packed(log, at, kept + new))
else
  if newest and kept < held then write('LSET', key, '-1', packed(log, newest, kept)) end
  if new > 0 then write('RPUSH', key, packed(log, at, kept + new)) end
end
write('PEXPIRE', key, ahead == 0 and period_ms or math.ceil((ahead + period) / 1000))
if failed then return failed end

--: current_hits
return kept - dropped + new

--: reservation_mark
return at, 0

--: refundable
return at - charged_at < period and 9007199254740992 or 0
