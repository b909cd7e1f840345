//! Messages of protobuf, and texts.

mod proto;
mod descriptors;
mod text;
mod text_table;
mod threads;
