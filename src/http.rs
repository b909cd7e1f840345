//! What tollkeeper serves over HTTP/1.1.

pub mod admin;
pub mod json;
pub mod metrics_pages;
pub mod report_pages;
pub mod routes;
