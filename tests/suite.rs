//! All black-box tests, as one binary: one link, one run. Each module tests tollkeeper through what its users see.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test says what it measured, its helpers too")]

#[path = "suite/admin.rs"]
mod admin;
#[path = "suite/algorithms.rs"]
mod algorithms;
#[path = "suite/bench.rs"]
mod bench;
#[path = "suite/cli.rs"]
mod cli;
#[path = "suite/config.rs"]
mod config;
#[path = "suite/decide.rs"]
mod decide;
#[path = "suite/documents.rs"]
mod documents;
#[path = "suite/deploy.rs"]
mod deploy;
#[path = "suite/envoy.rs"]
mod envoy;
#[path = "suite/example.rs"]
mod example;
#[path = "suite/fuzz_corpus.rs"]
mod fuzz_corpus;
#[path = "suite/harness.rs"]
mod harness;
#[path = "suite/hostile.rs"]
mod hostile;
#[path = "suite/limits.rs"]
mod limits;
#[path = "suite/logs.rs"]
mod logs;
#[path = "suite/mapper.rs"]
mod mapper;
#[path = "suite/memory.rs"]
mod memory;
#[path = "suite/metrics.rs"]
mod metrics;
#[path = "suite/process.rs"]
mod process;
#[path = "suite/proto.rs"]
mod proto;
#[path = "suite/redis_agreement.rs"]
mod redis_agreement;
#[path = "suite/redis_combining.rs"]
mod redis_combining;
#[path = "suite/redis_eventual.rs"]
mod redis_eventual;
#[path = "suite/redis_eventual_model.rs"]
mod redis_eventual_model;
#[path = "suite/redis_faults.rs"]
mod redis_faults;
#[path = "suite/redis_harness.rs"]
mod redis_harness;
#[path = "suite/redis_keys.rs"]
mod redis_keys;
#[path = "suite/redis_over.rs"]
mod redis_over;
#[path = "suite/redis_ratelimit.rs"]
mod redis_ratelimit;
#[path = "suite/redis_replicas.rs"]
mod redis_replicas;
#[path = "suite/redis_replies.rs"]
mod redis_replies;
#[path = "suite/redis_requests.rs"]
mod redis_requests;
#[path = "suite/redis_slots.rs"]
mod redis_slots;
#[path = "suite/reload.rs"]
mod reload;
#[path = "suite/reports.rs"]
mod reports;
#[path = "suite/rolling.rs"]
mod rolling;
#[path = "suite/settings.rs"]
mod settings;
#[path = "suite/source.rs"]
mod source;
#[path = "suite/store_local.rs"]
mod store_local;
#[path = "suite/store_policies.rs"]
mod store_policies;
#[path = "suite/stores.rs"]
mod stores;
#[path = "suite/textbook.rs"]
mod textbook;
#[path = "suite/tidy.rs"]
mod tidy;
#[path = "suite/traces.rs"]
mod traces;
#[path = "suite/tls.rs"]
mod tls;
#[path = "suite/vectors.rs"]
mod vectors;
#[path = "suite/vectors_config.rs"]
mod vectors_config;
#[path = "suite/watch.rs"]
mod watch;
#[path = "suite/wire.rs"]
mod wire;
