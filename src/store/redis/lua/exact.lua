-- The quotient and the remainder of a x b / m, exactly, for whole a < 2^53, b < 2^35 and 0 < m < 2^45.
--
-- A product below 2^53 is exact as it is. Else a long division, 7 bits of b at a time: no step passes
-- 128 x (m - 1) + 127 x (m - 1) < 2^53. floor(p / m) is exact for whole p < 2^53, as the quotient of two numbers whose
-- product is that small lies further from the next whole number than rounding goes. A quotient past 2^53 is rounded,
-- which is no harm where it is only compared with what is smaller.

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
  local quotient, left = 0, 0
  for shift = 28, 0, -7 do
    left = left * 128 + a * (floor(b / 2 ^ shift) % 128)
    local digit = floor(left / m)
    quotient, left = quotient * 128 + digit, left - digit * m
  end
  return whole * b + quotient, left
end
