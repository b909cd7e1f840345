-- Limits of a descriptor that overflow into each other: parts of together.lua, for a call with such limits.
-- src/limit/algorithm/joint_charge.rs does the same, and says what it is.
--
-- ARGV[1] also has, after the numbers of each counter, of its pool, ban and reservations: 1 if the limit takes the hits
-- that the counters before it have no room for, else 0. `current_hits` of an algorithm returns its hits after `decide`.
--
-- Decides: in Redis: how the limits of an overflow divide the hits of a charge.

--: overflow_of_counter
local takes_overflow
takes_overflow, position = unpack('<i8', args, position)
counter.takes_overflow = takes_overflow > 0

--: overflow_methods
-- Decides a charge of as many hits as the limit admits, `most` at most; returns their number. Of none, `apply` then does
-- nothing.
admit_up_to = function(most)
  local function fits(some)
    hits = some
    --> decide
    return admitted
  end
  if most > 0 and fits(most) then return most end
  local fitting, too_many = 0, most
  while too_many - fitting > 1 do
    local middle = fitting + floor((too_many - fitting) / 2)
    if fits(middle) then fitting = middle else too_many = middle end
  end
  admitted = fitting > 0 and fits(fitting)
  return fitting
end,
-- Leaves the counter as it is.
skip = function() admitted = false end,
current_hits = function()
  hits = -1
  --> decide
  --> current_hits
end,
is_enforced = function() return flags % 2 == 1 end,

--: decide_counters
local first = 1
while first <= count do
  local last = first
  while last < count and counters[last + 1].takes_overflow do last = last + 1 end
  local rest = math.abs(hits)
  if last == first then
    if counters[first].rejects(hits) then rejected = true end
  elseif hits < 0 then
    for place = last, first, -1 do
      local counter = counters[place]
      local given = place > first and min(rest, counter.current_hits()) or rest
      if given > 0 then counter.rejects(-given) else counter.skip() end
      rest = rest - given
    end
  else
    for place = first, last do rest = rest - counters[place].admit_up_to(rest) end
    if rest > 0 then
      for place = first, last do counters[place].skip() end
      rejected = rejected or counters[first].is_enforced()
    end
  end
  first = last + 1
end
