-- token_bucket: used tokens refill at `limit` per period.
--
-- KEYS: the counter. a, b: unused. State, 24 bytes: last, used (whole tokens), part (see leaky_level.lua). A mark
-- follows, after a hold, in the form of a hold that takes nothing and ended at 0: 1 if it is cut, its size as limit.
-- Charges: limit, capacity (tokens in a full bucket), wait (longest delay for missing tokens, in microseconds).
-- Rounding: none. Writes: one SET with PX or SETRANGE. TTL: see leaky_level.lua.
--
-- Decides: when the key of a token bucket expires (TTL).

--: load
local bytes, hold, held_hits, held_capacity, held_limit, held_until = 24
local whole, part, size, was_resized, bucket, never_cuts_level, settled_limit
--> read
last, whole, part = unpack('<I8I8I8', before)
if whole >= 9007199254740992 or part >= period then
  --> wrong_type
end
if hold and held_until == 0 then size, was_resized, hold = held_limit, held_hits > 0, nil end
local was_marked = size
--> effective_now
if void then last, whole, part, size, was_resized = at, 0, 0, nil, nil end
--> level
--> end_hold

--: lower_limit
if hold then
  bucket, never_cuts_level = capacity, limit == held_limit
  limit, capacity = max(limit - held_hits, 0), max(capacity - held_capacity, 0)
elseif settled_limit then
  if settled_limit == limit and not was_resized and (whole > capacity or whole == capacity and part > 0) then size = capacity end
  settled_limit = nil
end

--: wrong_size
-- A hold, a mark, or both.
if #before == bytes + 48 then
  local is_cut, _, _, cut_size = unpack('<I4c4I4I4', before, bytes + 25)
  size, was_resized = cut_size, is_cut > 0
elseif #before ~= bytes + 24 then
  --> wrong_type
end
--> read_total_hold

--: end_hold
if hold and held_until - at > 3600000000 + 2 * period then
  -- Its bytes go with the next SET.
  hold, found = nil, 0
elseif hold and at >= held_until then
  -- The held capacity counts as used at the end of the hold. Until then the bucket was refilled by what holds left.
  local at, limit = held_until, held_limit - held_hits
  level_whole, level_part = whole, part
  --> drain
  whole, part, last, found, hold = level_whole + held_capacity, level_part, max(last, held_until), 0
  settled_limit = held_limit
  if not was_resized then size = nil end
end

--: decide
admitted = false
--> fit_size
--> drain
if hits < 0 then
  admitted = true
elseif hits <= capacity and limit > 0 then
  local excess = level_whole + hits - capacity
  --> fits_in_time
end

--: apply
local entered = hits
if hits < 0 and level_whole + hits < leased then
  entered = 0
  if level_whole >= leased then entered, level_part = leased - level_whole, 0 end
elseif not admitted then
  -- Debt ends one period's worth of tokens below an empty bucket, and never lowers the used tokens.
  local room = capacity + limit - level_whole
  if room <= 0 then
    entered = 0
  elseif hits >= room then
    entered, level_part = room, 0
  end
end
--> fill

--: keep_hold
-- Until the end of the hold, then until what was held has been refilled.
if hold then
  local refill_ms = math.ceil((whole + held_capacity + 1) * period / max(held_limit, 1) / 1000)
  value, ttl_ms = value .. hold, min(ttl_ms + math.ceil((held_until - now) / 1000) + refill_ms, 9007199254740)
end
if size then
  value = value .. pack('<I4c4I4I4I8', was_resized and 1 or 0, 'hold', 0, size, 0)
end

--: write
--> level_ttl
keeps_expiry = keeps_expiry and not size and not was_marked
local value = pack('<I8I8I8', last, whole, part)
--> set_or_overwrite

--: current_hits
return level_whole + min(level_part, 1)

--: reservation_mark
return at, whole + given_back

--: refundable
local refilled, refilled_part = divide(at - charged_at, max(limit, highest_rate), period)
if refilled_part > 0 then refilled = refilled + 1 end
-- A bucket refills at most the hits of the reservation; those of others, which were in it before, come first.
return max(max(base - given_back, reserved) - refilled, 0)
