-- A level that drains at `limit` a period: what token_bucket and leaky_bucket have in common.
--
-- State: x whole hits and y parts of one more, of which a hit has as many as the period has microseconds. What drains
-- in t microseconds is t x limit parts, a whole number: never rounded.
-- TTL: the time to empty under the limit of the last charge, and a period beyond, rounded down; 285 years at most.

--: level
-- Until a charge changes it the level drains from last on, under the limit of whoever asks.
local level_x, level_y, charged_limit

--: drain
level_x, level_y = x, y
if at > last and limit > 0 then
  local whole, parts = divide(at - last, limit, period)
  level_x, level_y = x - whole, y - parts
  if level_y < 0 then level_x, level_y = level_x - 1, level_y + period end
  if level_x < 0 then level_x, level_y = 0, 0 end
end

--: lend
-- Whether `beyond` whole hits and the parts of the level, if that is more than none, drain while the caller waits.
if beyond < 0 or beyond == 0 and level_y == 0 then
  passes = true
elseif patience > ahead then
  local whole, parts = divide(patience - ahead, limit, period)
  passes = beyond < whole or beyond == whole and level_y <= parts
end

--: fill
-- Enters hits, or takes them out; never more than are in.
x, y, last, charged_limit = level_x + entered, level_y, at, limit
if x < 0 then x, y = 0, 0 end

--: life
local life_us = ahead + period
if charged_limit > 0 then life_us = life_us + (x * period + y) / charged_limit end
local life_ms = floor(min(life_us, 9007199254740991) / 1000)
