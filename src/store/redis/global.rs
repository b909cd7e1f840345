//! Limits over several regions.

pub mod bucket_grants;
pub mod window_grants;
