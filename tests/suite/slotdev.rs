//! x
#![allow(clippy::unwrap_used, clippy::panic, dead_code, reason = "dev")]
#[path = "../kit/mod.rs"]
mod kit;
mod slots;
mod config;
mod tidy;
