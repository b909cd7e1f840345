-- Exact multiply-and-divide: quotient and remainder of a x b / m, for integers a < 2^53, b < 2^56 and 0 < m < 2^45.
--
-- 1. A product below 2^53 is exact, and so is floor(p / m) for an integer p < 2^53: the exact quotient is further from
--    the next integer than rounding can move it.
-- 2. Otherwise a long division takes 7 bits of b at a time; no step exceeds 128 x (m - 1) + 127 x (m - 1) < 2^53.
-- 3. A quotient above 2^53 is rounded. Callers compare such a quotient with smaller numbers only.

--: divide
local function divide(a, b, m)
  local whole = 0
  if a >= m then
    whole = floor(a / m)
    a = a - whole * m
  end
  local product = a * b
  if product < 9007199254740992 then
    local quotient = floor(product / m)
    return whole * b + quotient, product - quotient * m
  end
  local quotient, rest = 0, 0
  for shift = b < 34359738368 and 28 or 49, 0, -7 do
    rest = rest * 128 + a * (floor(b / 2 ^ shift) % 128)
    local digit = floor(rest / m)
    quotient, rest = quotient * 128 + digit, rest - digit * m
  end
  return whole * b + quotient, rest
end
