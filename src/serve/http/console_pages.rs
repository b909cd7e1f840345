//! The console: one HTML page with its style and script, embedded in the binary.
//!
//! A browser gets it at `/`, by its `Accept` header; other clients get the list of pages as text.
//!
//! Decides: who gets the console at `/`, and who the list of pages.
//!
//! In `console/`, whose files browsers load, so that the lines stand here:
//!
//! Decides: `console.js`: when a view is old (grey), how often it asks again; when live figures are opened again (3 s), how
//! many points they have (`MAX_POINTS`); where the theme is kept.
//! Decides: `dom.js`: how the console writes times (UTC) and numbers; how a view changes in place.
//! Decides: `fleet.js`, `keys.js`, `limits.js`: how the views look, and how often they ask (`every`); order of replicas; what
//! can be pasted into the sandbox; lengths of blocks (10m, 1h, 24h).
//! Decides: `server.js`: where the admin token is kept, when it is asked for; the question before a reset.

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use super::response::{respond_error, respond_text};

const CONSOLE_HTML: &str = include_str!("console/index.html");
const CONSOLE_CSS: &str = include_str!("console/console.css");

/// Script that the page names.
const CONSOLE_JS: &str = include_str!("console/console.js");

/// Modules that it imports, by name.
const CONSOLE_MODULES: [(&str, &str); 6] = [
    ("dom.js", include_str!("console/dom.js")),
    ("server.js", include_str!("console/server.js")),
    ("charts.js", include_str!("console/charts.js")),
    ("keys.js", include_str!("console/keys.js")),
    ("limits.js", include_str!("console/limits.js")),
    ("fleet.js", include_str!("console/fleet.js")),
];

/// `/`: the console for a browser, otherwise the list of pages.
pub(super) async fn show_index(headers: HeaderMap, list: &'static str) -> Response {
    let mut page = match prefers_html(&headers) {
        true => respond_static_file("text/html; charset=utf-8", CONSOLE_HTML),
        false => respond_text(StatusCode::OK, list),
    };
    page.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    page
}

/// `/console.css`
pub(super) async fn show_style() -> Response {
    respond_static_file("text/css; charset=utf-8", CONSOLE_CSS)
}

/// `/console.js`
pub(super) async fn show_script() -> Response {
    respond_static_file("text/javascript; charset=utf-8", CONSOLE_JS)
}

/// `/console/NAME.js`
pub(super) async fn show_module(Path(name): Path<String>) -> Response {
    match CONSOLE_MODULES.iter().find(|(module, _)| *module == name) {
        Some((_, text)) => respond_static_file("text/javascript; charset=utf-8", text),
        None => respond_error(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

fn respond_static_file(content_type: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

/// True if `Accept` names HTML with at least the weight of plain text, as browsers do and curl's `*/*` does not.
fn prefers_html(headers: &HeaderMap) -> bool {
    let accepted: Vec<&str> = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .collect();
    let weight = |media_type: &str| {
        accepted.iter().filter_map(|range| parse_accept_weight(range, media_type)).fold(0.0, f32::max)
    };
    let html = weight("text/html");
    html > 0.0 && html >= weight("text/plain")
}

/// Weight of a media range of `Accept`, 0 to 1, if it is this type.
fn parse_accept_weight(range: &str, media_type: &str) -> Option<f32> {
    let mut parts = range.split(';').map(str::trim);
    parts.next()?.eq_ignore_ascii_case(media_type).then_some(())?;
    let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
    Some(weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0)))
}
