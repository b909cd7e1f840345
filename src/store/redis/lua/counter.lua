-- A counter among several: the parts of its algorithm as functions, for together.lua.
--
-- In place of the arrows stand the parts, as in driver.lua, and before the text what it is kept as: makers[kind] = ...
-- open returns an error in place of the counter; plan and write return an error or nothing.

function(key, now, period, a, b, period_ms)
  --> open
  local hits, limit, capacity, patience, flags, passes, changed
  return {
    before = before,
    -- The terms of the charges that follow.
    under = function(...)
      limit, capacity, patience, flags = ...
    end,
    -- Whether a charge of these hits is refused for all counters.
    refuses = function(charged)
      hits = charged
      --> fits
      return not passes and flags % 2 == 1
    end,
    -- Charges that charge, or enters it as debt, or leaves it; whether that changed the counter.
    adds = function(refused)
      passes = passes and (not refused or hits < 0)
      if not passes and flags < 2 or hits < 0 and patience > 0 and at >= patience then return false end
      --> add
      changed = true
      return true
    end,
    plan = function()
      if not changed then return end
      --> plan
    end,
    write = function()
      if not changed then return end
      --> write
    end,
  }
end
