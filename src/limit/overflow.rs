//! Overflow of a limit into the next one of its list.
//!
//! A *chain* is a limit whose hits overflow and, in order, the limits that take them. A charge is admitted if the limits
//! of a chain have room for its hits together: the first takes what it has room for, the second what is left, and so on.
//! `algorithm::joint_charge` divides the hits.

/// Place of a limit in a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChainPosition {
    /// In none: the limit must admit all hits.
    #[default]
    NotInChain,
    /// First: hits that it has no room for go to the next limit of the list.
    First,
    /// It takes the hits that the limits before it have no room for.
    After,
}

impl ChainPosition {
    /// Returns `true` if the limit takes only what the limits before it have no room for.
    pub const fn takes_overflow(self) -> bool {
        matches!(self, Self::After)
    }
}

/// Returns the ranges of limits that admit a charge together: a chain, or one limit. `places` are those of all limits.
pub fn split_into_overflow_chains(
    places: impl Iterator<Item = ChainPosition>,
) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut places = places.peekable();
    let mut start = 0;
    std::iter::from_fn(move || {
        places.next()?;
        let mut end = start + 1;
        while places.next_if(|place| place.takes_overflow()).is_some() {
            end += 1;
        }
        Some(std::mem::replace(&mut start, end)..end)
    })
}
