-- Level that drains at `limit` hits per period: parts that token_bucket and leaky_bucket share.
--
-- State: whole hits, and part: the rest, in units of which a hit has as many as the period has microseconds. In t
-- microseconds t x limit units drain: an integer, so nothing is ever rounded.
-- TTL: the time to drain under the limit of the last charge plus one period, rounded down; at most 285 years.

--: level
-- Drained level. Until a charge changes the state, the level drains from `last` on, under the limit of each charge.
local level_whole, level_part, charged_limit
local found = last

--: drain
level_whole, level_part = whole, part
if at > last and limit > 0 then
  local drained, drained_part = divide(at - last, limit, period)
  level_whole, level_part = whole - drained, part - drained_part
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
whole, part, last, charged_limit = level_whole + entered, level_part, at, limit
if whole < 0 then whole, part = 0, 0 end

--: level_ttl
local ttl_us = ahead + period
if charged_limit > 0 then ttl_us = ttl_us + (whole * period + part) / charged_limit end
-- The first charge in each half of a period sets the expiry, at least a period ahead. If the level has drained by then,
-- the others keep it; 2 ms allow for rounding.
local half = at - at % (period / 2)
local keeps_expiry = ahead == 0 and found >= half and found > 0 and charged_limit > 0
  and at + ttl_us + 2000 <= half + 2 * period
local ttl_ms = floor(min(ttl_us, 9007199254740991) / 1000)
