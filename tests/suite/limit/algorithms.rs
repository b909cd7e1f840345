//! Properties of the algorithms over random histories.
//!
//! - `agreement`: every result equals that of a slow reference model written from the documentation
//! - `promises`: reported times come true to the microsecond; peeks and rejections change nothing
//! - `bounds`: never more than the limit, checked over whole histories without knowledge of states
//! - `limit_changes`: limits in turn on one counter: how long a client waits, and what passes in all
//! - `all_or_none`: several limits are charged all or none
//! - `overflow`: limits that overflow into each other divide the hits of a charge
//! - `regressions`: bugs that these found, as single cases
//!
//! `PROPTEST_CASES=20000 cargo test --test suite algorithms::` runs more cases. Failed seeds are kept beside the
//! source.

mod agreement;
mod bounds;
mod limit_changes;
mod regressions;
mod model;
mod overflow;
mod promises;
mod fraction;
pub(crate) mod scenario;
mod all_or_none;
