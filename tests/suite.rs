//! All black-box tests, as one binary: one link, one run.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "suite/proto.rs"]
mod proto;
#[path = "suite/wire.rs"]
mod wire;
//! The black-box suites, as one binary.
#[path = "suite/logs.rs"]
mod logs;
#[path = "suite/settings.rs"]
mod settings;
