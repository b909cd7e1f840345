//! Limits over several regions.

mod bucket_grants;
