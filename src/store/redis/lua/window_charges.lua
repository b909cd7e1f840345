-- Charges and refunds on one counter in the key format of envoyproxy/ratelimit, as one atomic step.
--
-- KEYS[1]: the counter. ARGV[1]: lifetime of the counter in seconds. ARGV[2] and on: hits of each charge in order;
-- negative: a refund. Returns: the count before, as text. A refund lowers the count to 0 at most. Writes: INCRBY with
-- the sum, EXPIRE. O(charges). Sums are below 2^42, so they are exact; a larger count is rounded only for the
-- comparison.

local max, min = math.max, math.min
local before = redis.call('GET', KEYS[1]) or '0'
-- If the value is not a number, INCRBY returns the error.
local count, change = tonumber(before) or 0, 0
for i = 2, #ARGV do
  local hits = tonumber(ARGV[i])
  if hits < 0 then hits = -min(-hits, max(count, 0)) end
  count, change = count + hits, change + hits
end
redis.call('INCRBY', KEYS[1], string.format('%.0f', change))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return before
