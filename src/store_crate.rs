//! Crate of the room `store`. It and the rooms that it uses have the paths that they have in `lib.rs`.

pub use tollkeeper_core::{base, limit, settings, telemetry};

pub mod store;
