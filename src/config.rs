//! Rules: from their source to the compiled set that decides.
//!
//! `source` delivers rule texts (`files` is its one implementation), `compile` turns them into checked rules by way of
//! `yaml` and `document`, and `live` holds the compiled set that decides.

pub mod diagnostic;
pub mod keys;
pub mod yaml;
pub mod document;
pub mod compile;
pub mod schema;
pub mod files;
pub mod source;
pub mod live;
