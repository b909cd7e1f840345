//! A fleet in one process: simulations, and the tests of what they are made of.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test says what it measured, its helpers too")]

mod redis_agreement;
