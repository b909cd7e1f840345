-- Shortcut for equal charges in a row. An algorithm for which it is wrong replaces it with a part of the same name.

--: equal_charges
-- Equal charges that fit as one also fit one by one, with the same result: a hot key costs little more than an idle
-- one.
if times > 1 and hits > 0 then
  local each = hits
  hits = each * times
  --> decide
  if admitted then times = 1 else hits = each end
end
