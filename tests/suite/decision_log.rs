//! Decision log: the format and its schema, and reading it back.

mod reader;
mod record;
mod schema;
