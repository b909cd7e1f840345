-- leaky_bucket: requests leave at `limit` a period, those that wait are held.
--
-- KEYS: the counter. State, 32 bytes: last, queued whole places, parts of one more (see drain.lua), and the tail: places
-- of the request admitted last, which alone a refund may take.
-- Draws: limit, capacity (places), patience (us; how long a request may stand in the queue).
-- Rounding: none. Writes: one SET with PX. TTL: see drain.lua.

algorithms[1] = {
  open = function(c)
    local err = read(c, '<I8I8I8I8', 32, 4294967295, c.period - 1)
    if not err and c.z > 4294967295 then return wrong() end
    return err
  end,
  fits = function(c, hits, limit, capacity, patience)
    local queued, part = drained(c, limit)
    if hits < 0 then return true end
    if hits > capacity or limit == 0 then return false end
    local over = queued + hits - capacity
    -- There must be room now, and the request leaves when all that stood before it has left.
    return (over < 0 or over == 0 and part == 0) and drains(c, queued, part, limit, patience)
  end,
  add = function(c, hits, limit)
    if hits > 0 then
      c.z = hits
    else
      hits = -min(c.z, -hits)
      c.z = c.z + hits
    end
    fill(c, c.level_x + hits, c.level_y, limit)
  end,
  close = function(c)
    return pack('<I8I8I8I8', c.last, c.x, c.y, c.z), drain_ttl(c)
  end,
}
