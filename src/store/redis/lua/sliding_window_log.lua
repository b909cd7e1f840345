-- sliding_window_log: a record for each instant at which hits were entered.
--
-- KEYS: the counter, with a and b: see log.lua, as for state, reply and cost. Draws: limit. Rounding: none.
-- Writes: LTRIM, LSET, RPUSH as needed, and PEXPIRE. TTL: a period from c.at on, in milliseconds rounded up.

algorithms[3] = {
  -- The log lies between dropped and kept, in hits after base; then come those that are new at c.at.
  open = function(c)
    local length = redis.pcall('LLEN', c.key)
    if type(length) == 'table' then return length end
    local head, top = 0, 0
    c.n, c.last, c.base, c.dropped, c.new = max(length - 1, 0), 0, 0, 0, 0
    if length > 0 then
      head, c.base = record(c, 0)
      c.last, top = record(c, c.n)
      c.last = max(c.last, head)
    end
    c.fresh = length == 0
    c.out = arrive(c) and c.n or seek(c, 0, c.at - c.period, 4503599627370496)
    local _
    if c.out > 0 then _, c.base = record(c, c.out) end
    c.held = (top - c.base) % 4503599627370496
    c.kept = c.held
    c.before = ends(c)
    if c.bad then return wrong() end
  end,
  fits = function(c, hits, limit)
    return hits < 0 or c.kept - c.dropped + c.new + hits <= limit
  end,
  add = function(c, hits, limit, _, debt)
    if hits < 0 then
      c.new = c.new + hits
      c.kept, c.new = max(c.kept + min(c.new, 0), c.dropped), max(c.new, 0)
      return
    end
    local held = c.kept - c.dropped + c.new
    local keep = max(held, limit)
    if debt then hits = min(hits, keep) end
    c.new = c.new + hits
    if debt then c.dropped = c.dropped + max(held + hits - keep, 0) end
    if c.dropped > c.kept then
      c.new, c.dropped = c.new - (c.dropped - c.kept), c.kept
    end
  end,
  close = function(c)
    local commands, key = {}, c.key
    local function write(...) commands[#commands + 1] = {...} end
    local first, last = c.out, c.out
    if c.kept > c.dropped then
      if c.dropped > 0 then first = seek(c, first, c.at, c.dropped) end
      last = c.n
      if c.kept < c.held then last = seek(c, first, c.at, c.kept - 1) + 1 end
    end
    local function sum(hits) return (c.base + hits) % 4503599627370496 end
    local function element(at, hits) return pack('<I8I8', at, sum(hits)) end
    if c.fresh then
      write('RPUSH', key, element(c.new > 0 and 0 or c.at, 0))
    else
      if first > 0 or last < c.n then write('LTRIM', key, first, last) end
      local at, hits = record(c, first)
      if c.new == 0 or at > c.at or hits ~= sum(c.dropped) then write('LSET', key, 0, element(c.at, c.dropped)) end
    end
    local newest = last > first and record(c, last)
    if newest and (newest == c.at or c.kept < c.held) then
      write('LSET', key, -1, element(newest, c.kept + (newest == c.at and c.new or 0)))
    end
    if c.new > 0 and newest ~= c.at then write('RPUSH', key, element(c.at, c.kept + c.new)) end
    write('PEXPIRE', key, math.ceil((c.ahead + c.period) / 1000))
    c.commands = commands
  end,
}
