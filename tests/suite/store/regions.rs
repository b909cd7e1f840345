//! Limits over several regions.

mod division;
mod grants;
mod pools;
mod processes;
