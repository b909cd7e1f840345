//! Crate of the room `rules`. It uses nothing of `store`, so the two crates are compiled at the same time.

pub use tollkeeper_core::{base, limit, settings, telemetry};

pub mod rules;
