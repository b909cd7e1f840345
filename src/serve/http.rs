//! Pages over HTTP: decisions as JSON, health, debug pages and metrics.

pub mod admin_token;
pub mod app_state;
pub mod browser;
pub mod json;
pub mod live_events;
pub mod metrics_pages;
pub mod routes;
pub mod token_attempts;

mod admin_pages;
mod console_pages;
mod decision_pages;
mod report_pages;
mod response;
mod status_pages;
