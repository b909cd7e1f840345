//! Subcommands.

mod cli;
mod envoy_check;
mod simulate;
mod recommend;
mod why;
mod events;
mod bench_command;
