//! Messages of protobuf, and texts.

mod proto;
mod proto_json;
mod protobuf;
mod text;
mod text_table;
