//! What the five algorithms promise, as properties over random histories.
//!
//! - `agreement`: every answer is that of a slow reference model written from the documentation
//! - `promises`: what an answer says of the future comes true to the microsecond; what must leave no trace leaves none
//! - `bounds`: never more than the limit, spoken about whole histories, with nothing said about states
//! - `all_or_none`: several limits are charged all or none
//! - `regressions`: bugs that these found, as single cases
//!
//! `PROPTEST_CASES=20000 cargo test --test suite algorithms::` looks harder. What failed once is kept beside the source.

mod agreement;
mod bounds;
mod regressions;
mod model;
mod promises;
mod fraction;
pub(crate) mod scenario;
mod all_or_none;
