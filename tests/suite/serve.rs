//! The process: sockets, protocols, pages, and clients, an Envoy among them.

mod wire;
mod grpc_protocol;
mod http_protocol;
mod http2_headers;
mod hostile;
mod floods;
mod client_limits;
mod tls;
mod process;
mod rolling;
mod admin;
mod reports;
mod debug_pages;
mod console;
mod fleet;
mod level_webhook;
mod quota;
pub(crate) mod envoy;
mod connections;
mod inbound_frames;
