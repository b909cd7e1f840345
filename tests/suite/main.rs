//! All black-box tests, as one binary: one link, one run. The modules are those of `src/lib.rs`, and `docs`. Each tests
//! tollkeeper through what its users see.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test says what it measured, its helpers too")]

#[path = "../generated.rs"]
#[allow(dead_code, reason = "the tests of `deploy/` and `.ci/generate` use the rest")]
mod generated;

mod base;
mod telemetry;
mod limit;
mod settings;
mod store;
mod rules;
mod decide;
mod serve;
mod tools;
mod docs;
