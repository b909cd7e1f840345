//! The command line and what its subcommands compute: replays, simulations, recommendations, time lines.
//!
//! Nothing outside this module knows it, except `main.rs`.

pub mod replay;
pub mod simulate;
pub mod recommend;
pub mod why;
pub mod envoy_check;
pub mod cli;
