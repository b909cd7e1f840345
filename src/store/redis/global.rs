//! Limits over several regions.

pub mod bucket_grants;
