//! What the five algorithms promise, as properties over random histories.
//!
//! - `agreement`: every answer is that of a slow reference model written from the documentation
//! - `promises`: what an answer says of the future comes true to the microsecond; what must leave no trace leaves none
//! - `bounds`: never more than the limit, spoken about whole histories, with nothing said about states
//! - `together`: several limits are charged all or none
//! - `found`: bugs that these found, as single cases
//!
//! `PROPTEST_CASES=20000 cargo test --test suite algorithms` looks harder. What failed once is kept beside the source.

#[path = "algorithms/agreement.rs"]
mod agreement;
#[path = "algorithms/bounds.rs"]
mod bounds;
#[path = "algorithms/found.rs"]
mod found;
#[path = "algorithms/model.rs"]
mod model;
#[path = "algorithms/promises.rs"]
mod promises;
#[path = "algorithms/ratio.rs"]
mod ratio;
#[path = "algorithms/scenario.rs"]
pub(crate) mod scenario;
#[path = "algorithms/together.rs"]
mod together;
