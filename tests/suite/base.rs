//! Messages of protobuf, and texts.

mod proto;
mod proto_json;
mod descriptors;
mod text;
mod text_table;
