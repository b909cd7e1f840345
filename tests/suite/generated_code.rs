//! Rust code and descriptors in `proto/generated/` agree with the files of `proto/`.
//!
//! They are committed, so that builds compile no generator. `BLESS=1 cargo test --test suite -- generated_code::`
//! writes them. Code and descriptors differ in one point. The Rust code takes `Entry.key` and `Entry.value` as bytes,
//! because Envoy puts raw header bytes there; the descriptor set says `string`, as Envoy's own files do, so that
//! requests written as text need no base64. On the wire both are the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

use crate::kit::repository;

const ROOT: &str = "envoy/service/ratelimit/v3/rls.proto";
/// Of a control plane: for the client, not for reflection.
const XDS_ROOTS: [&str; 2] = ["envoy/service/discovery/v3/ads.proto", "ratelimit/config/ratelimit/v3/rls_conf.proto"];
const ENTRY: [&str; 3] = ["envoy.extensions.common.ratelimit.v3", "RateLimitDescriptor", "Entry"];

#[test]
fn generated_code_is_up_to_date() {
    let generated = tempfile::tempdir().unwrap();
    generate(generated.path());
    let committed = repository("proto/generated");
    let expected = files(generated.path());
    if std::env::var_os("BLESS").is_some() {
        fs::remove_dir_all(&committed).unwrap();
        fs::create_dir(&committed).unwrap();
        for (name, content) in &expected {
            fs::write(committed.join(name), content).unwrap();
        }
    }
    let actual = files(&committed);
    assert!(actual.keys().eq(expected.keys()), "{:?}, expected {:?}", actual.keys(), expected.keys());
    let stale: Vec<_> = expected.iter().filter(|(name, content)| actual[*name] != **content).collect();
    let names: Vec<_> = stale.iter().map(|(name, _)| name).collect();
    assert!(stale.is_empty(), "stale in proto/generated: {names:?}: run with BLESS=1");
}

/// Compiles `proto/` into `directory`.
fn generate(directory: &Path) {
    let proto = repository("proto");
    let text_set = entry_as_text(protox::compile([ROOT], [&proto]).unwrap());
    fs::write(directory.join("descriptors.bin"), text_set.encode_to_vec()).unwrap();
    tonic_prost_build::configure()
        .out_dir(directory)
        .bytes(format!(".{}", ENTRY.join(".")))
        .codec_path("crate::base::pb::codec::BoundedCodec")
        .include_file("pb.rs")
        .emit_rerun_if_changed(false)
        .compile_fds(protox::compile([ROOT, XDS_ROOTS[0], XDS_ROOTS[1]], [&proto]).unwrap())
        .unwrap();
}

/// The set with `Entry`'s fields as strings and without comments.
fn entry_as_text(mut set: FileDescriptorSet) -> FileDescriptorSet {
    for file in &mut set.file {
        file.source_code_info = None;
    }
    let [package, descriptor, entry] = ENTRY;
    let file = set.file.iter_mut().find(|file| file.package() == package).unwrap();
    let descriptor = named(&mut file.message_type, descriptor);
    for field in &mut named(&mut descriptor.nested_type, entry).field {
        field.set_type(Type::String);
    }
    set
}

fn named<'m>(messages: &'m mut [DescriptorProto], name: &str) -> &'m mut DescriptorProto {
    messages.iter_mut().find(|message| message.name() == name).unwrap()
}

/// The files of a directory by name.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}
