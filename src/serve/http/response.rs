//! Responses that several pages share, and the low-priority thread that renders large ones.

use std::thread;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use tokio::sync::{Semaphore, oneshot};

use crate::base::printable_text::to_pretty_json;
use crate::base::threads;

/// Plain text.
pub(super) fn respond_text(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body.into()).into_response()
}

/// JSON that is encoded already.
pub(super) fn respond_json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Indented JSON of a value, with status 200.
pub(super) fn respond_pretty_json(value: &impl Serialize) -> Response {
    to_pretty_json(value).map_or_else(|_| respond_internal_error(), |page| respond_json(StatusCode::OK, page))
}

/// An error in the form of Go's `http.Error`, as envoyproxy/ratelimit sends it.
pub(super) fn respond_error(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = respond_text(status, body);
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Status 500 without a body.
pub(super) fn respond_internal_error() -> Response {
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// Status 400 with the reason why the query string is invalid.
pub(super) fn respond_bad_query(rejection: &QueryRejection) -> Response {
    respond_text(StatusCode::BAD_REQUEST, format!("{}\n", rejection.body_text()))
}

/// Status 503: no rules are loaded.
pub(super) fn respond_no_rules() -> Response {
    respond_text(StatusCode::SERVICE_UNAVAILABLE, "no rate limit configuration loaded\n")
}

/// Renders a page on a thread of its own, one page at a time; `None` if no thread could be started.
///
/// A page about ten thousand rules takes tens of milliseconds, which must not delay decisions.
pub(super) async fn render_off_thread<T: Send + 'static>(render: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
    let _permit = ONE_AT_A_TIME.acquire().await.ok()?;
    let (sender, page) = oneshot::channel();
    let work = move || {
        threads::lower_thread_priority();
        let _ = sender.send(render());
    };
    thread::Builder::new().name("metrics".to_owned()).spawn(work).ok()?;
    page.await.ok()
}
