-- region_bucket: a bucket of a region, refilled at the rate that the region always has and, for a term, at more.
--
-- KEYS: the counter. a, b: unused. ARGV[3]: see region_window.lua. Charges: limit (the region's own rate, in tokens per
-- period), capacity (the region's own), wait (loss allowance in a tumbling period); flags must include 2.
-- In place of the period in milliseconds: the TTL.
-- State, 120 bytes: last, tokens (whole ones that are left), part (units of which a token has as many as the period has
-- microseconds), rate and granted_capacity (of the grant, beside the region's own), term_end (global time), spent
-- (since the last grant), requested (hits asked for) and requested_since, exhausted (1: the global Redis had less than
-- was wanted), open_request (time of opening, 0: none), next_request_at, epoch, loss_start, loss_used.
-- Rounding: none, but the term ends early by 1/1000 of the time since, rounded up. Writes: one SET with PX.
-- TTL: the time in which the region's own rate fills its own capacity, plus two periods and 2 s.

--: load
local bytes = 120
--> read
local tokens, part, rate, granted_capacity, term_end, spent, requested_hits, requested_since
local exhausted, open_request, next_request_at, epoch, loss_start, loss_used
last, tokens, part, rate, granted_capacity, term_end, spent, requested_hits, requested_since,
  exhausted, open_request, next_request_at, epoch, loss_start, loss_used =
  unpack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', before)
if max(tokens, term_end, spent, requested_hits, requested_since, exhausted, open_request, next_request_at, epoch,
  loss_start, loss_used) > 9007199254740992 or part >= period or max(rate, granted_capacity) > 4294967295 then
  --> wrong_type
end
--> effective_now
local valid_from, valid_until, offset_lo, offset_hi, call_flags = unpack('<i8i8i8i8i8', ARGV[3])
local can_request, cut_off, is_usable = call_flags % 2 == 1, call_flags % 4 >= 2, call_flags < 4
local is_known = now >= valid_from and now < valid_until and now + offset_lo >= 0 and offset_lo <= offset_hi
if is_known and epoch == 0 then epoch = now + offset_hi end
-- Time of this Redis at which the term has ended at the latest.
local granted_until = 0
if is_known then
  granted_until = term_end - offset_hi
  granted_until = max(granted_until - math.ceil(max(at - granted_until, 0) / 1000), 0)
end
local is_granted = last > 0 and at < granted_until
if last == 0 then requested_since = now end
if now >= loss_start + period + floor(period / 1000) or loss_start > now + period then loss_start, loss_used = now, 0 end
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
max_tokens = own_capacity + (is_granted and granted_capacity or 0)
level, level_part = tokens, part
if last == 0 then
  level, level_part = own_capacity, 0
else
  local elapsed = max(at - last, 0)
  local granted_us = max(min(at, granted_until) - last, 0)
  add(granted_us, own_rate + rate, own_capacity + granted_capacity)
  if not is_granted then add(elapsed - granted_us, own_rate, own_capacity) end
end

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
admitted = fits or (cut_off or not is_known) and loss_used + hits <= allowance
accepted = admitted

--: apply
if hits < 0 then
  local returned = min(-hits, spent)
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
    level, spent = level - hits, min(spent + hits, 9007199254740992)
  elseif admitted then
    loss_used = loss_used + hits
  end
  if can_request and is_known and (not fits or 2 * level <= max_tokens)
    and (next_request_at <= now or next_request_at > now + max(period, 3000000)) then
    open_request, next_request_at = now, now + 3000000
  end
end
last, tokens, part = at, level, level_part

--: write
local ttl_ms = period_ms + math.ceil(period / 1000 * own_capacity / max(own_rate, 1))
local value = pack('<I8I8I8I8I8I8I8I8I8I8I8I8I8I8I8', last, tokens, part, rate, granted_capacity, term_end, spent,
  requested_hits, requested_since, exhausted, open_request, next_request_at, epoch, loss_start, loss_used)
--> set
