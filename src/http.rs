//! What tollkeeper serves over HTTP/1.1.

pub mod admin;
pub mod json;
pub mod metrics;
pub mod reports;
pub mod routes;
