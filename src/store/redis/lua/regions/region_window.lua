-- region_window: hits of a window of global time that the region was granted, and its reserve.
--
-- KEYS: the counter. a, b: unused. Charges: limit (reserve of the region), wait (cut-off allowance of a period; one
-- that is no part of the limit as -1 less the hits); flags must include 2: rejected hits are counted as requested. In
-- place of the period in milliseconds: the TTL.
-- ARGV[3]: view of the global Redis, signed numbers as in ARGV[1]: valid_from and valid_until (times of this Redis
-- between which the offsets hold), offset_lo and offset_hi (bounds on global time minus the time of this Redis, in
-- microseconds), flags: 1 if a grant request may be opened, plus 2 if the region is cut off, plus 4 if reserve and
-- cut-off allowance must not be used; an allowance that is no part of the limit may be.
-- State, 120 bytes: last, window (its number in global time), granted (hits left), reserve_used, requested (hits asked
-- for), low (open a request when at most these are left; half of the reserve if nothing is granted); then the rest,
-- which most charges neither need nor change: granted_total, next_reserve_used (in the next window),
-- previous_requested, exhausted (1: the global Redis has none left), open_request (time of opening, 0: none),
-- next_request_at, epoch, cut_off_start, cut_off_used.
-- Rounding: none. Writes: one SET with PX, or one SETRANGE of the first numbers. TTL: two periods plus 2 s from the
-- last SET.

--: load
local bytes = 120
--> read
local window, granted, reserve_used, requested_hits, low
last, window, granted, reserve_used, requested_hits, low = unpack('<I8I8I8I8I8I8', before)
if max(window, granted, reserve_used, requested_hits, low) > 9007199254740992 then
  --> wrong_type
end
--> effective_now
local valid_from, valid_until, offset_lo, offset_hi, call_flags = unpack('<i8i8i8i8i8', global_view)
local can_request, cut_off, is_usable = call_flags % 2 == 1, call_flags % 4 >= 2, call_flags < 4
-- A call at a time at which it cannot run gets no allowance: a clock has jumped.
local is_outside_validity = valid_until ~= 0 and (now < valid_from or now >= valid_until)
local granted_total, next_reserve_used, previous_requested, exhausted, open_request, next_request_at, epoch
local cut_off_start, cut_off_used, cut_off_from, cut_off_now
-- Global time lies in `window` or, if spans_two, in the next one. It is unknown if it may lie in others.
local is_known, spans_two = false, false
local first, final = now + offset_lo, now + offset_hi
if now >= valid_from and now < valid_until and first >= 0 and first <= final then
  local start = window * period
  if window > 0 and not cut_off and start <= first and final < start + period then
    is_known = true
  else
    --> rest
    --> check_rest
    first, final = floor(first / period), floor(final / period)
    if window <= final + 1 then first = max(first, window) end
    if first <= final and final <= first + 1 then
      is_known, spans_two = true, final > first
      if epoch == 0 then epoch = now + offset_hi end
      if first == window + 1 then
        reserve_used, previous_requested = next_reserve_used, requested_hits
      elseif first ~= window then
        reserve_used, previous_requested = 0, 0
      end
      if first ~= window then
        window, granted, granted_total, next_reserve_used, requested_hits, low, exhausted = first, 0, 0, 0, 0, 0, 0
      end
    end
  end
else
  --> rest
  --> check_rest
end
-- Set by each charge: reserve that it may use; hits left of it and of the grants; true if they admit it; true if this
-- counter admits it, whatever others say.
local reserve, left, fits, accepted

--: rest
granted_total, next_reserve_used, previous_requested, exhausted, open_request, next_request_at, epoch, cut_off_start,
  cut_off_used = unpack('<I8I8I8I8I8I8I8I8I8', before, 49)
cut_off_from, cut_off_now = cut_off_start, cut_off_used
if now >= cut_off_start + period + floor(period / 1000) or cut_off_start > now + period then
  cut_off_from, cut_off_now = now, 0
end

--: check_rest
if max(granted_total, next_reserve_used, previous_requested, exhausted, open_request, next_request_at, epoch,
  cut_off_start, cut_off_used) > 9007199254740992 then
  --> wrong_type
end

--: equal_charges
-- Equal charges that fit as one also fit one by one, with the same result, if they are spent from one source.
if times > 1 and hits > 0 then
  local each = hits
  hits = each * times
  --> decide
  if fits or admitted and not is_known then times = 1 else hits = each end
end

--: decide
reserve, left = is_usable and limit or 0, granted
if reserve > reserve_used then left = left + reserve - reserve_used end
fits = hits < 0 or is_known and hits <= left
if fits and spans_two and hits > 0 then fits = hits <= max(reserve - next_reserve_used, 0) end
admitted = fits
if not fits and (cut_off or not is_known) then 
  admitted = cut_off_now + hits <= (is_outside_validity and 0 or wait < 0 and -1 - wait or is_usable and wait or 0)
end
accepted = admitted

--: apply
last = at
if fits and admitted and hits >= 0 then
  if hits <= granted then
    granted = granted - hits
  else
    granted, reserve_used = 0, reserve_used + hits - granted
  end
  left = left - hits
  if spans_two then next_reserve_used = next_reserve_used + hits end
end
if hits >= 0 and (admitted or not accepted) then
  requested_hits = min(requested_hits + hits, 9007199254740992)
end
if not fits or granted == 0 or left <= low or hits < 0 then
  if not epoch then
    --> rest
  end
  if hits < 0 then
    if is_known then
      local back = min(-hits, max(max(granted_total - granted, 0) + reserve_used - lent, 0))
      local returned = min(back, reserve_used)
      reserve_used = reserve_used - returned
      granted = max(min(granted + back - returned, granted_total), granted)
    end
  elseif admitted or not accepted then
    if admitted and not fits then
      cut_off_now = cut_off_now + hits
      cut_off_start, cut_off_used = cut_off_from, cut_off_now
    end
    if can_request and is_known and (not fits or left <= (granted_total == 0 and floor(reserve / 2) or low))
      and (next_request_at <= now or next_request_at > now + max(period, 3000000)) then
      open_request, next_request_at = now, now + 3000000
    end
  end
end

--: write
local ttl_ms, value = period_ms, pack('<I8I8I8I8I8I8', last, window, granted, reserve_used, requested_hits, low)
-- The life that the first charge of the window gave the key lasts beyond the next window. A user who may not run
-- SETRANGE writes all.
if epoch or type(redis.pcall('SETRANGE', key, '0', value)) == 'table' then
  if epoch then
    value = value .. pack('<I8I8I8I8I8I8I8I8I8', granted_total, next_reserve_used, previous_requested, exhausted,
      open_request, next_request_at, epoch, cut_off_start, cut_off_used)
  else
    value = value .. string.sub(before, 49)
  end
  --> set
end
