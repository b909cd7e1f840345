-- region_bucket: a small bucket that a region always has, and prepaid hits beside it.
--
-- KEYS: the counter. a, b: unused. ARGV[3]: see region_window.lua. Charges: limit (the region's own rate, in tokens per
-- period), capacity (the region's own), wait (cut-off allowance per tumbling period, see region_window.lua); flags must
-- include 2, and 4 times the uncertainty of global time in microseconds that needs no smaller capacity.
-- In place of the period in milliseconds: the TTL.
-- State, 144 bytes: last, tokens (whole ones of the region's own that are left), part (units of which a token has as
-- many as the period has microseconds), granted and granted_until (hits of the last grant, and their end in global
-- time), earlier and earlier_until (those of the grants before), low (open a request when at most these are left, while
-- a grant lasts), refilled_until (global time up to which tokens have refilled, 0: unknown), spent (since the last
-- grant), requested (hits asked for) and requested_since, exhausted (1: the global Redis had no tokens), open_request
-- (time of opening, 0: none), next_request_at, epoch, cut_off_start, cut_off_used. src/limit/algorithm/region_bucket.rs
-- has a table of them. A state of 128 bytes is of an earlier version, and counts as none.
-- Rounding: tokens down, the uncertainty of global time up. Writes: one SET with PX or SETRANGE.
-- TTL: the time in which the region's own rate fills its own capacity, plus two periods, at least a minute, and 2 s.

--: load
local bytes = 144
local before, last = redis.pcall('GET', key)
if not before or #before == 128 then
  before = string.rep('\0', bytes)
elseif type(before) == 'table' then
  return before
elseif #before ~= bytes then
  --> wrong_type
end
local tokens, part, granted, granted_until, earlier, earlier_until, low, refilled_until, spent, requested_hits
local requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used
last, tokens, part, granted, granted_until, earlier, earlier_until, low, refilled_until, spent, requested_hits,
  requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
if max(tokens, granted, granted_until, earlier, earlier_until, low, refilled_until, spent, requested_hits,
  requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used) > 9007199254740992
  or part >= period then
  --> wrong_type
end
--> effective_now
local valid_from, valid_until, offset_lo, offset_hi, call_flags = unpack('<i8i8i8i8i8', global_view)
local can_request, cut_off, is_usable = call_flags % 2 == 1, call_flags % 4 >= 2, call_flags < 4
local is_in_time = now >= valid_from and now < valid_until
local is_known = is_in_time and now + offset_lo >= 0 and offset_lo <= offset_hi
-- A call at a time at which it cannot run gets no allowance: a clock has jumped.
local is_outside_validity = valid_until ~= 0 and not is_in_time
local first, final, from, is_granted = 0, 0, 0, false
if is_known then
  first, final = now + offset_lo, now + offset_hi
  if epoch == 0 then epoch = final end
  from = refilled_until == 0 and final or refilled_until
  refilled_until, is_granted = max(from, first), final < granted_until
  if not is_granted then granted = 0 end
  if final >= earlier_until then earlier = 0 end
end
if last == 0 then requested_since = now end
-- The first charge in each half of a period sets the expiry; what it adds to the time to fill outlasts the half.
local keeps_expiry = ahead == 0 and last > 0 and last >= at - at % (period / 2)
if now >= cut_off_start + period + floor(period / 1000) or cut_off_start > now + period then
  cut_off_start, cut_off_used = now, 0
end
-- The bucket under the limit of each charge, until a charge changes the state.
local level, level_part, own_rate, own_capacity, max_tokens, allowance, prepaid, fits, accepted

--: refill
own_rate, own_capacity, allowance = limit, capacity, wait < 0 and -1 - wait or is_usable and wait or 0
if is_outside_validity then allowance = 0 end
if not is_usable then own_rate, own_capacity = 0, 0 end
max_tokens = own_capacity
level, level_part = tokens, part
if last == 0 then level, level_part = own_capacity, 0 end
if level >= own_capacity then level, level_part = own_capacity, 0 end
if is_known then
  if level < own_capacity then
    local refilled, rest = divide(refilled_until - from, own_rate, period)
    level, level_part = level + refilled, level_part + rest
    if level_part >= period then level, level_part = level + 1, level_part - period end
    if level >= own_capacity then level, level_part = own_capacity, 0 end
  end
  local unsure_us = final - refilled_until - floor(flags / 4)
  if unsure_us > 0 then
    local unsure, rest = divide(unsure_us, own_rate, period)
    max_tokens = max(max_tokens - unsure - (rest > 0 and 1 or 0), 0)
  end
end
if level >= max_tokens then level, level_part = max_tokens, 0 end
prepaid = is_known and earlier + granted or 0

--: equal_charges
-- Equal charges that the hits admit as one, they also admit one by one, with the same result.
if times > 1 and hits > 0 then
  local each = hits
  hits = each * times
  --> decide
  if fits then times = 1 else hits = each end
end

--: decide
--> refill
fits = hits <= level + prepaid
admitted = fits or (cut_off or not is_known) and cut_off_used + hits <= allowance
accepted = admitted

--: apply
if hits < 0 then
  local returned = min(-hits, max(spent - lent, 0))
  local own = min(returned, max_tokens - level)
  spent, level = spent - returned, level + own
  if level >= max_tokens then level, level_part = max_tokens, 0 end
  if is_granted then granted = min(granted + returned - own, 9007199254740992) end
elseif admitted or not accepted then
  -- Demand of more than 4 s ago fades.
  if now - requested_since > 8000000 then
    requested_hits, requested_since = 0, now
  elseif now - requested_since > 4000000 then
    requested_hits, requested_since = floor(requested_hits / 2), now - 2000000
  end
  requested_hits = min(requested_hits + hits, 9007199254740992)
  if fits then
    if not is_known and hits > 0 then refilled_until = 0 end
    spent = min(spent + hits, 9007199254740992)
    local rest = hits
    if is_known then
      local of_earlier = min(rest, earlier)
      local of_granted = min(rest - of_earlier, granted)
      earlier, granted, rest = earlier - of_earlier, granted - of_granted, rest - of_earlier - of_granted
    end
    level = level - rest
  elseif admitted then
    cut_off_used = cut_off_used + hits
  end
  local left = level + (is_known and earlier + granted or 0)
  if can_request and is_known and (not fits or left <= (is_granted and low or floor(own_capacity / 2)))
    and (next_request_at <= now or next_request_at > now + max(period, 3000000)) then
    open_request, next_request_at = now, now + 3000000
  end
end
last, tokens, part, from = at, level, level_part, refilled_until

--: write
local ttl_ms = period_ms
local value = pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, tokens, part, granted, granted_until, earlier,
  earlier_until, low, refilled_until, spent, requested_hits, requested_since, exhausted, open_request, next_request_at,
  epoch, cut_off_start, cut_off_used)
--> set_or_overwrite
