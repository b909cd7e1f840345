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
//! The black-box suites, one binary: each module tests tollkeeper through what its users see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]
#[path = "suite/source.rs"]
mod source;
#[path = "suite/watch.rs"]
mod watch;
//! The black-box suites, one binary: a module each.
#[path = "suite/config.rs"]
mod config;
#[path = "suite/vectors_config.rs"]
mod vectors_config;
