//! Limits over several regions.

mod bucket_grants;
mod clocks;
mod demand;
mod division;
mod grants;
mod leases;
mod membership;
mod model;
mod parts_model;
mod pools;
mod processes;
mod region_counters;
mod region_grants;
mod resets;
mod standing;
mod window_grants;
