-- Level that drains at `limit` hits per period: parts that token_bucket and leaky_bucket share.
--
-- Decides: in Redis: what a changed size does to a bucket (`fit_size`).
--
-- State: whole hits, and part: the rest, in units of which a hit has as many as the period has microseconds. In t
-- microseconds t x limit units drain: an integer, so nothing is ever rounded.
-- TTL: the time to drain under the limit of the last charge plus one period, rounded down; at most 285 years.

--: level
-- Drained level. Until a charge changes the state, the level drains from `last` on, under the limit of each charge.
local level_whole, level_part, level_size, level_was_resized, full, charged_limit
local found = last

--: fit_size
-- The level as that of a bucket of the limit's size (full): see leaky_level.rs. size: the mark of the state, nil without
-- one, and was_resized its flag; bucket: the capacity, if holds lower it.
full, level_whole, level_part, level_size, level_was_resized = bucket or capacity, whole, part, size, was_resized
if (size or whole > full or whole == full and part > 0) and full > 0 and not never_cuts_level then
  if not size then
    level_whole, level_part, level_size, level_was_resized = full, 0, full, true
  elseif size > full or size < full and was_resized then
    level_whole, level_size, level_was_resized = whole + full - size, full, true
  end
  if level_whole < 0 then
    level_whole, level_part = 0, 0
  else
    local most, most_part = full + limit, 0
    if size == full and flags >= 8 then
      local max_wait = floor(flags / 8)
      local advance, advance_part = divide(max_wait, limit, period)
      if max_wait == 2 ^ 50 - 1 then advance = math.huge end
      if advance >= limit then most, most_part = full + advance, advance_part end
    end
    if level_whole > most or level_whole == most and level_part > most_part then
      level_whole, level_part = most, most_part
    end
  end
end

--: drain
if at > last and limit > 0 then
  local drained, drained_part = divide(at - last, limit, period)
  level_whole, level_part = level_whole - drained, level_part - drained_part
  if level_part < 0 then level_whole, level_part = level_whole - 1, level_part + period end
  if level_whole < 0 then level_whole, level_part = 0, 0 end
end

--: fits_in_time
-- Admits if `excess` whole hits plus level_part are zero or less, or drain within the longest delay.
if excess < 0 or excess == 0 and level_part == 0 then
  admitted = true
elseif wait > ahead then
  local drained, drained_part = divide(wait - ahead, limit, period)
  admitted = excess < drained or excess == drained and level_part <= drained_part
end

--: fill
-- Adds `entered` hits, negative to remove; the level does not fall below zero.
whole, part, last, charged_limit, size, was_resized = level_whole + entered, level_part, at, limit, level_size, level_was_resized
if whole < 0 then whole, part = 0, 0 end
if not was_resized and full > 0 then size = (whole > full or whole == full and part > 0) and full or nil end

--: level_ttl
local ttl_us = ahead + period
if charged_limit > 0 then ttl_us = ttl_us + (whole * period + part) / charged_limit end
-- The first charge in each half of a period sets the expiry, at least a period ahead. If the level has drained by then,
-- the others keep it; 2 ms allow for rounding.
local half = at - at % (period / 2)
local keeps_expiry = ahead == 0 and found >= half and found > 0 and charged_limit > 0
  and at + ttl_us + 2000 <= half + 2 * period
local ttl_ms = floor(min(ttl_us, 9007199254740991) / 1000)
