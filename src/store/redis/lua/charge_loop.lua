-- Decides and applies the charges of one counter, in order: parts that driver.lua and merged.lua share.
--
-- Variables: the next run of equal charges as driver.lua describes it, times nil after the last; position of the one
-- after it. `decide` sets admitted; `apply` charges the hits, or enters rejected hits as debt.

--: next_run
times = nil
if position < #args then
  times, hits, limit, capacity, wait, flags, position = unpack('<i8i8i8i8i8i8', args, position)
end

--: charge_loop
local admitted, changed
while times do
  --> equal_charges
  repeat
    --> decide
    -- A charge that changed nothing would change nothing when repeated. `wait` of a refund: the time it is void from.
    if not admitted and flags < 2 or hits < 0 and wait > 0 and at >= wait then break end
    --> apply
    changed = true
    times = times - 1
  until times == 0
  --> next_run
end
