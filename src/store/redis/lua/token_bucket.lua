-- token_bucket: tokens that are out come back at `limit` a period.
--
-- KEYS: the counter. State, 24 bytes: last, used whole tokens, parts of one more (see drain.lua).
-- Draws: limit, capacity (tokens in the bucket), patience (us; how long may be waited for tokens that are lacking).
-- Rounding: none. Writes: one SET with PX. TTL: see drain.lua.

algorithms[0] = {
  open = function(c)
    return read(c, '<I8I8I8', 24, 9007199254740991, c.period - 1)
  end,
  fits = function(c, hits, limit, capacity, patience)
    local used, part = drained(c, limit)
    if hits < 0 then return true end
    if hits > capacity or limit == 0 then return false end
    return drains(c, used + hits - capacity, part, limit, patience)
  end,
  add = function(c, hits, limit, capacity, debt)
    local used, part = c.level_x, c.level_y
    if debt then
      -- Debt ends at one period's worth of tokens below an empty bucket, and never lowers what is out.
      local most = capacity + limit
      if used >= most then
        hits = 0
      elseif used + hits >= most then
        hits, part = most - used, 0
      end
    end
    fill(c, used + hits, part, limit)
  end,
  close = function(c)
    return pack('<I8I8I8', c.last, c.x, c.y), drain_ttl(c)
  end,
}
