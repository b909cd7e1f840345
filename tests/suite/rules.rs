//! Rules: their language, their files, xDS.

mod config;
mod rule_files;
mod watch;
mod reload;
mod matching;
mod plans;
mod rule_defaults;
mod xds;
mod patterns;
mod limit_texts;
