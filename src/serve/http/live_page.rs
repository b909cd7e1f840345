//! `/live`: what the replica does, as server-sent events.
//!
//! The stream of a slow listener skips events instead of queueing them. It ends when the process begins to stop.

use std::convert::Infallible;
use std::net::Ipv4Addr;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;

use super::admin_token::ClientAddress;
use super::app_state::AppState;
use super::report_pages::metrics_are_off;
use super::response::text;

/// `/live`
pub(super) async fn live(State(state): State<AppState>, address: Option<Extension<ClientAddress>>) -> Response {
    if state.collector.service.decider.metrics.is_off() {
        return metrics_are_off();
    }
    let peer = address.map_or(Ipv4Addr::LOCALHOST.into(), |Extension(ClientAddress(address))| address.ip());
    let listener = match state.live.listen(peer) {
        Ok(listener) => listener,
        Err(too_many) => {
            let what = format!("/live has {too_many} already (close a console and retry)\n");
            return text(StatusCode::SERVICE_UNAVAILABLE, what);
        }
    };
    let events = stream::unfold(listener, |mut listener| async move {
        let event = listener.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(&*event)), listener))
    });
    Sse::new(events).into_response()
}
