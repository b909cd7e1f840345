//! `proto/descriptors.bin`, the input of `build.rs`, agrees with the files of `proto/`.
//!
//! It is committed, so that builds need no `protoc` and compile no parser.
//! `BLESS=1 cargo test --test suite -- descriptors::` writes it.

use std::fs;

use prost::Message;

use crate::kit::repository;

/// The services that clients call, then those of a control plane.
const ROOTS: [&str; 4] = [
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/service/rate_limit_quota/v3/rlqs.proto",
    "envoy/service/discovery/v3/ads.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
];

#[test]
fn descriptors_are_up_to_date() {
    let proto = repository("proto");
    let mut set = protox::compile(ROOTS, [&proto]).unwrap();
    // Comments become those of the Rust code; lines and columns would make the file stale without need.
    for place in
        set.file.iter_mut().filter_map(|file| file.source_code_info.as_mut()).flat_map(|info| &mut info.location)
    {
        place.span.clear();
    }
    let expected = set.encode_to_vec();
    let committed = proto.join("descriptors.bin");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&committed, &expected).unwrap();
    }
    let is_fresh = fs::read(&committed).unwrap() == expected;
    assert!(is_fresh, "proto/descriptors.bin is stale: run BLESS=1 cargo test --test suite -- descriptors::");
}
