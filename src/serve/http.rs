//! Pages over HTTP: decisions as JSON, health, debug pages and metrics.

mod strict_json;
pub mod proto_json;
mod response;
pub mod page_builder;
pub mod token_attempts;
pub mod browser_protection;
pub mod live_events;
pub mod app_state;
mod page_query;
pub mod admin_token;
mod decision_pages;
mod status_pages;
mod report_pages;
pub mod inspection_pages;
pub mod metrics_pages;
mod admin_pages;
pub(crate) mod block_pages;
mod console_pages;
pub mod routes;
