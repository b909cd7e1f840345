//! Exact fractions for the reference model, rounded only on request.

use std::cmp::Ordering;

/// `top / bottom`, with `bottom` > 0; not reduced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio {
    top: i128,
    bottom: i128,
}

impl Ratio {
    pub(crate) const ZERO: Self = Self::whole(0);

    pub(crate) const fn new(top: i128, bottom: i128) -> Self {
        Self { top, bottom }
    }

    pub(crate) const fn whole(number: i128) -> Self {
        Self::new(number, 1)
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        let (a, b, bottom) = self.align(other);
        Self::new(a + b, bottom)
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        self.plus(Self::new(-other.top, other.bottom))
    }

    pub(crate) fn floor(self) -> i128 {
        self.top.div_euclid(self.bottom)
    }

    pub(crate) fn ceil(self) -> i128 {
        -(-self.top).div_euclid(self.bottom)
    }

    /// Both numerators over one denominator.
    fn align(self, other: Self) -> (i128, i128, i128) {
        if self.bottom % other.bottom == 0 {
            (self.top, other.top * (self.bottom / other.bottom), self.bottom)
        } else if other.bottom % self.bottom == 0 {
            (self.top * (other.bottom / self.bottom), other.top, other.bottom)
        } else {
            (self.top * other.bottom, other.top * self.bottom, self.bottom * other.bottom)
        }
    }
}

impl PartialEq for Ratio {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ratio {}

impl PartialOrd for Ratio {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ratio {
    fn cmp(&self, other: &Self) -> Ordering {
        let (a, b, _) = self.align(*other);
        a.cmp(&b)
    }
}
