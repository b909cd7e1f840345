-- Health check of the global Redis: what its other scripts do, on a key that expires.
--
-- KEYS: a key for health checks. ARGV[1]: empty.
-- Writes: one SET with PX. TTL: 60 s.

local now, key, value, ttl_ms = -1, KEYS[1], '', '60000'
--> clock
local found = redis.pcall('GET', key)
--> set
return now
