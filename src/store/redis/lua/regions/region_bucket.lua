-- region_bucket: a bucket of a region, refilled at the rate that the region always has and, for a term, at more.
--
-- KEYS: the counter. a, b: unused. ARGV[3]: see region_window.lua. Charges: limit (the region's own rate, in tokens per
-- period), capacity (the region's own), wait (cut-off allowance per tumbling period); flags must include 2, and 4 times
-- the uncertainty of global time in microseconds that needs no smaller capacity.
-- In place of the period in milliseconds: the TTL.
-- State, 128 bytes: last, tokens (whole ones that are left), part (units of which a token has as many as the period has
-- microseconds), rate and granted_capacity (of the grant, beside the region's own), term_end (global time),
-- refilled_until (global time up to which tokens have refilled, 0: unknown), spent (since the last grant), requested
-- (hits asked for) and requested_since, exhausted (1: the global Redis had less than was wanted), open_request (time of
-- opening, 0: none), next_request_at, epoch, cut_off_start, cut_off_used. src/limit/algorithm/region_bucket.rs has a
-- table of them.
-- Rounding: tokens down, the uncertainty of global time up. Writes: one SET with PX or SETRANGE.
-- TTL: the time in which the region's own rate fills its own capacity, plus two periods and 2 s.

--: load
local bytes = 128
--> read
local tokens, part, rate, granted_capacity, term_end, refilled_until, spent, requested_hits
local requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used
last, tokens, part, rate, granted_capacity, term_end, refilled_until, spent, requested_hits, requested_since,
  exhausted, open_request, next_request_at, epoch, cut_off_start, cut_off_used =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
if max(tokens, term_end, refilled_until, spent, requested_hits, requested_since, exhausted, open_request,
  next_request_at, epoch, cut_off_start, cut_off_used) > 9007199254740992 or part >= period
  or max(rate, granted_capacity) > 4294967295 then
  --> wrong_type
end
--> effective_now
local valid_from, valid_until, offset_lo, offset_hi, call_flags = unpack('<i8i8i8i8i8', global_view)
local can_request, cut_off, is_usable = call_flags % 2 == 1, call_flags % 4 >= 2, call_flags < 4
local is_known = now >= valid_from and now < valid_until and now + offset_lo >= 0 and offset_lo <= offset_hi
local first, final, from, is_granted = 0, 0, 0, false
if is_known then
  first, final = now + offset_lo, now + offset_hi
  if epoch == 0 then epoch = final end
  from = refilled_until == 0 and final or refilled_until
  refilled_until, is_granted = max(from, first), final < term_end
end
if last == 0 then requested_since = now end
-- The first charge in each half of a period sets the expiry; what it adds to the time to fill outlasts the half.
local keeps_expiry = ahead == 0 and last > 0 and last >= at - at % (period / 2)
if now >= cut_off_start + period + floor(period / 1000) or cut_off_start > now + period then
  cut_off_start, cut_off_used = now, 0
end
-- The bucket under the limit of each charge, until a charge changes the state.
local level, level_part, own_rate, own_capacity, max_tokens, allowance, fits, accepted
-- Adds what refills in `us` microseconds at a rate, up to a capacity that may be smaller than before.
local function add(us, at_rate, most)
  if level >= most then
    level, level_part = most, 0
  else
    local refilled, rest = divide(us, at_rate, period)
    level, level_part = level + refilled, level_part + rest
    if level_part >= period then level, level_part = level + 1, level_part - period end
    if level >= most then level, level_part = most, 0 end
  end
end

--: refill
own_rate, own_capacity, allowance = limit, capacity, wait
if not is_usable then own_rate, own_capacity, allowance = 0, 0, 0 end
max_tokens = own_capacity
level, level_part = tokens, part
if last == 0 then level, level_part = own_capacity, 0 end
if is_known then
  local granted_us = max(min(refilled_until, term_end) - from, 0)
  add(granted_us, own_rate + rate, own_capacity + granted_capacity)
  if is_granted then
    max_tokens = max_tokens + granted_capacity
  else
    add(refilled_until - from - granted_us, own_rate, own_capacity)
  end
  local unsure_us = final - refilled_until - floor(flags / 4)
  if unsure_us > 0 then
    local unsure, rest = divide(unsure_us, own_rate + (refilled_until < term_end and rate or 0), period)
    max_tokens = max(max_tokens - unsure - (rest > 0 and 1 or 0), 0)
  end
end
if level >= max_tokens then level, level_part = max_tokens, 0 end

--: equal_charges
-- Equal charges that the tokens admit as one, they also admit one by one, with the same result.
if times > 1 and hits > 0 then
  local each = hits
  hits = each * times
  --> decide
  if fits then times = 1 else hits = each end
end

--: decide
--> refill
fits = hits <= level
admitted = fits or (cut_off or not is_known) and cut_off_used + hits <= allowance
accepted = admitted

--: apply
if hits < 0 then
  local returned = min(-hits, max(spent - lent, 0))
  spent, level = spent - returned, level + returned
  if level >= max_tokens then level, level_part = max_tokens, 0 end
elseif admitted or not accepted then
  -- The demand of more than a period ago fades.
  if now - requested_since > 2 * period then
    requested_hits, requested_since = 0, now
  elseif now - requested_since > period then
    requested_hits, requested_since = floor(requested_hits / 2), now - floor(period / 2)
  end
  requested_hits = min(requested_hits + hits, 9007199254740992)
  if fits then
    if not is_known and hits > 0 then refilled_until = 0 end
    level, spent = level - hits, min(spent + hits, 9007199254740992)
  elseif admitted then
    cut_off_used = cut_off_used + hits
  end
  if can_request and is_known and (not fits or 2 * level <= max_tokens)
    and (next_request_at <= now or next_request_at > now + max(period, 3000000)) then
    open_request, next_request_at = now, now + 3000000
  end
end
last, tokens, part, from = at, level, level_part, refilled_until

--: write
local ttl_ms = period_ms + math.ceil(period / 1000 * own_capacity / max(own_rate, 1))
local value = pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, tokens, part, rate, granted_capacity, term_end,
  refilled_until, spent, requested_hits, requested_since, exhausted, open_request, next_request_at, epoch, cut_off_start,
  cut_off_used)
--> set_or_overwrite
