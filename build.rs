//! Compiles `proto/` without protoc: to Rust for `src/pb.rs`, and to a descriptor set for reflection and JSON.
//!
//! The two differ in one point. The Rust code takes `Entry.key` and `Entry.value` as bytes, because Envoy puts raw
//! header bytes there; the descriptor set says `string`, as Envoy's own files do, so that requests written
//! as text need no base64. On the wire both are the same.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

const ROOT: &str = "envoy/service/ratelimit/v3/rls.proto";
/// Of a control plane: for the client, not for reflection.
const XDS_ROOTS: [&str; 2] = ["envoy/service/discovery/v3/ads.proto", "ratelimit/config/ratelimit/v3/rls_conf.proto"];
const ENTRY: [&str; 3] = ["envoy.extensions.common.ratelimit.v3", "RateLimitDescriptor", "Entry"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let text_set =
        entry_as_text(protox::compile([ROOT], ["proto"])?).ok_or("proto/ has no RateLimitDescriptor.Entry")?;
    fs::write(Path::new(&env::var("OUT_DIR")?).join("descriptors.bin"), text_set.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(format!(".{}", ENTRY.join(".")))
        .codec_path("crate::pb::codec::BoundedCodec")
        .include_file("pb.rs")
        .compile_fds(protox::compile([ROOT, XDS_ROOTS[0], XDS_ROOTS[1]], ["proto"])?)?;
    Ok(())
}

/// The set with `Entry`'s fields as strings and without comments; `None` if `Entry` is not in it.
fn entry_as_text(mut set: FileDescriptorSet) -> Option<FileDescriptorSet> {
    for file in &mut set.file {
        file.source_code_info = None;
    }
    let [package, descriptor, entry] = ENTRY;
    let file = set.file.iter_mut().find(|file| file.package() == package)?;
    let descriptor = named(&mut file.message_type, descriptor)?;
    for field in &mut named(&mut descriptor.nested_type, entry)?.field {
        field.set_type(Type::String);
    }
    Some(set)
}

fn named<'m>(messages: &'m mut [DescriptorProto], name: &str) -> Option<&'m mut DescriptorProto> {
    messages.iter_mut().find(|message| message.name() == name)
}
