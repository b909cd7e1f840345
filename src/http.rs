//! Pages over HTTP: decisions as JSON, health, debug pages and metrics.

pub mod admin_token;
pub mod app_state;
pub mod json;
pub mod metrics_pages;
pub mod routes;

mod admin_pages;
mod decision_pages;
mod off_thread;
mod report_pages;
mod response;
mod status_pages;
