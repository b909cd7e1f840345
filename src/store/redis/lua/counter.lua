-- Constructor of one counter among several: the parts of its algorithm as functions, for together.lua.
--
-- The arrows are replaced as in driver.lua. The text is prefixed with the table entry: constructors[algorithm_id] = ...
-- Returns the counter, or an error reply in its place. `plan` and `write` return an error reply or nothing.

function(key, now, period, a, b, period_ms)
  --> load
  local hits, limit, capacity, wait, flags, admitted, changed
  return {
    before = before,
    --> reservation_methods
    --> overflow_methods
    -- Sets the limit of the charges that follow.
    set_limit = function(...)
      limit, capacity, wait, flags = ...
      --> lower_limit
    end,
    -- Decides a charge; returns true if it rejects the charge for all counters.
    rejects = function(charged)
      hits = charged
      --> decide
      return not admitted and flags % 2 == 1
    end,
    -- Charges the hits, enters them as debt, or does nothing; returns true if the counter changed.
    apply = function(rejected)
      admitted = admitted and (not rejected or hits < 0)
      if not admitted and flags % 4 < 2 or hits < 0 and wait > 0 and at >= wait then return false end
      --> apply
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
