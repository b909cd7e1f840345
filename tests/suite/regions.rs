//! Limits over several regions.

mod bucket_grants;
mod region_grants;
mod window_grants;
