//! Subcommands.

pub(crate) mod cli;
mod envoy_check;
pub(crate) mod simulate;
mod recommend;
mod why;
mod events;
