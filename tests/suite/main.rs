//! All black-box tests, as one binary: one link, one run. Each module tests tollkeeper through what its users see.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test says what it measured, its helpers too")]

#[path = "../kit/mod.rs"]
mod kit;

#[path = "../generated.rs"]
#[allow(dead_code, reason = "the tests of `deploy/` and `.ci/generate` use the rest")]
mod generated;

mod admin;
mod algorithms;
mod bench_command;
mod check_env;
mod blocks;
mod calling;
mod candidates;
mod cli;
mod client_limits;
mod config;
mod console;
mod cookbook;
mod debug_pages;
mod decide;
mod decision_log;
mod descriptors;
mod doc_examples;
mod doc_links;
mod envoy;
mod envoy_check;
mod events;
mod example_rules;
mod failure_policies;
mod fallback;
mod fleet;
mod floods;
mod fuzz_corpus;
mod grpc_protocol;
mod help_examples;
mod holds;
mod hostile;
mod http2_headers;
mod http_protocol;
mod logs;
mod matching;
mod mapper_file;
mod memcache;
mod memory;
mod metrics;
mod plans;
mod process;
mod proto;
mod proto_json;
mod quota;
mod recommend;
mod redis;
mod reload;
mod reports;
mod request_headers;
mod reservations;
mod rolling;
mod regions;
mod rule_defaults;
mod rule_files;
mod settings;
mod simulate;
mod slots;
mod stores;
mod text;
mod textbook;
mod tidy;
mod times;
mod tls;
mod traces;
mod unmatched;
mod vectors;
mod watch;
mod why;
mod windows;
mod wire;
mod xds;
