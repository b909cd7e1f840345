//! Generates the messages and services of `proto/` into `OUT_DIR`, and the descriptor set that clients are given.
//!
//! The input is `proto/descriptors.bin`, which `.ci/generate` makes from the files beside it: a build needs no
//! `protoc` and compiles no parser. Code and descriptor set differ in one point. The code takes `Entry.key` and
//! `Entry.value` as bytes, because Envoy puts raw header bytes there; the set says `string`, as Envoy's own files do,
//! so that requests written as text need no base64. On the wire both are the same. The service of quotas is not in the
//! set: its streams are no use to tools, and its lists of entries are maps elsewhere.
//!
//! Decides: keys and values as bytes, domains as UTF-8 (prost).
//! Decides: the messages that reflection shows, with keys and values as `string`.

use std::collections::HashSet;
use std::error::Error;
use std::path::Path;
use std::{env, fs};

use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

/// Descriptors of all files of `proto/`; each stands behind those that it imports.
const DESCRIPTORS: &str = "../proto/descriptors.bin";
/// File of the service that clients call. The other services are those of a control plane, which we call.
const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";
const ENTRY_PACKAGE: &str = "envoy.extensions.common.ratelimit.v3";
const ENTRY: [&str; 2] = ["RateLimitDescriptor", "Entry"];
/// Key and value of the id of a quota's bucket.
const BUCKET_ENTRY: &str = ".envoy.service.rate_limit_quota.v3.BucketId.BucketEntry";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={DESCRIPTORS}");
    let set = FileDescriptorSet::decode(&*fs::read(DESCRIPTORS)?)?;
    let directory = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?;
    let served = entry_as_text(with_imports(set.clone(), SERVICE)).ok_or("there is no message Entry")?;
    fs::write(Path::new(&directory).join("descriptors.bin"), served.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(format!(".{ENTRY_PACKAGE}.{}", ENTRY.join(".")))
        .bytes(BUCKET_ENTRY)
        .include_file("pb.rs")
        .emit_rerun_if_changed(false)
        .compile_fds(set)?;
    Ok(())
}

/// The file of this name and all that it imports.
fn with_imports(mut set: FileDescriptorSet, name: &str) -> FileDescriptorSet {
    let mut needed = HashSet::from([name.to_owned()]);
    for file in set.file.iter().rev() {
        if needed.contains(file.name()) {
            needed.extend(file.dependency.iter().cloned());
        }
    }
    set.file.retain(|file| needed.contains(file.name()));
    set
}

/// The set with the fields of `Entry` as strings and without comments; `None` without that message.
fn entry_as_text(mut set: FileDescriptorSet) -> Option<FileDescriptorSet> {
    for file in &mut set.file {
        file.source_code_info = None;
    }
    let [descriptor, entry] = ENTRY;
    let file = set.file.iter_mut().find(|file| file.package() == ENTRY_PACKAGE)?;
    let descriptor = named(&mut file.message_type, descriptor)?;
    for field in &mut named(&mut descriptor.nested_type, entry)?.field {
        field.set_type(Type::String);
    }
    Some(set)
}

fn named<'m>(messages: &'m mut [DescriptorProto], name: &str) -> Option<&'m mut DescriptorProto> {
    messages.iter_mut().find(|message| message.name() == name)
}
