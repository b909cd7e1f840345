-- sliding_window_counter: this window's count plus the last one's, weighted by what is left of this window.
--
-- KEYS: the counter. State, 24 bytes: last, current and previous: the counts of the window of last and of the one before
-- it, at most 2^34. Draws: limit. Rounding: the weight is rounded down. Writes: one SET with PX.
-- TTL: until the end of the next window, or, with nothing in this one, a period from c.at on; milliseconds, rounded up.

algorithms[4] = {
  open = function(c)
    local err = read(c, '<I8I8I8', 24, 17179869184, 17179869184)
    if err then return err end
    local windows = floor(c.at / c.period) - floor(c.last / c.period)
    if windows == 1 then
      c.x, c.y = 0, c.x
    elseif windows > 1 then
      c.x, c.y = 0, 0
    end
    c.left = c.period - c.at % c.period
  end,
  fits = function(c, hits, limit)
    return hits < 0 or c.x + divide(c.left, c.y, c.period) + hits <= limit
  end,
  add = function(c, hits, limit, _, debt)
    local current = c.x + hits
    -- Debt ends at the limit twice over and never lowers the count.
    if debt then current = max(c.x, min(2 * limit, current)) end
    if current < 0 then
      c.y, current = max(c.y + current, 0), 0
    end
    c.x, c.last = current, c.at
  end,
  close = function(c)
    local beyond = c.x > 0 and c.left or 0
    return pack('<I8I8I8', c.last, c.x, c.y), math.ceil((c.ahead + c.period + beyond) / 1000)
  end,
}
