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

use std::fmt::Write as _;

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

/// Pages of the debug listener with their descriptions, by path.
const DEBUG_PAGE_DESCRIPTIONS: [(&str, &str); 25] = [
    ("/", "the console in a browser, this list elsewhere"),
    ("/alarms", "what is wrong now, with this process and between replicas, as JSON"),
    ("/counters?domain=D&rule=R", "counters of a rule as JSON; `most=N` (default 100); needs the token"),
    ("/explain", "rules and counters that a request (as for /json) matches, as JSON; charges nothing"),
    ("/fleet", "all replicas, their limits, rejected keys and findings as JSON; `format=text`, as for /top and /rules"),
    ("/healthcheck", "200 if the process accepts traffic, as on the HTTP listener"),
    ("/history", "the last hour by minute as JSON: requests, or decisions of the limits of `rule=NAME`"),
    ("/live", "requests, verdicts, latency, store and rules as server-sent events, one a second"),
    ("/livez", "200 while the process runs"),
    ("/log_level", "current log level; PUT a level's name to change it until the process ends, needs the token"),
    (
        "/problems",
        "last warnings and errors of the log, errors in rule files with their lines, failures of the store as JSON",
    ),
    ("/quota", "streams of quotas, and what each proxy has of each key as JSON; `format=text`, `rule=NAME`, `most=N`"),
    ("/readyz", "200 if the process can decide requests, otherwise the reason"),
    (
        "/rejections",
        "rejections of the last hour by minute and key as JSON; `format=text`, `key=TEXT`, `at=14:05`, `rule=NAME`, `most=N`",
    ),
    ("/reset", "POST a request (as for /json) to delete its counters; needs the token"),
    ("/rlconfig", "print out the currently loaded configuration for debugging"),
    ("/rlconfig/status", "version, files and last error of the configuration as JSON"),
    ("/rule_text?origin=FILE:LINE:COLUMN", "limits of a loaded rule as a rule file has them, as JSON"),
    (
        "/rules",
        "decisions and findings by limit as JSON; `format=text`, `rule=NAME`, `search=WORDS`, `rejecting=true`, `finding=KIND`, `order=recent|rejected|matched|share|near|keys|name|file`, `most=N`, `offset=N`",
    ),
    ("/settings", "effective settings as JSON, secrets masked"),
    ("/stats", "all metrics as text, under their statsd names, or else their Prometheus names"),
    ("/store", "store statistics as JSON: failed charges, failure policies, leases, replicas"),
    (
        "/tap",
        "decisions as they are made, as lines of the decision log, 100 a second at most; `domain=NAME`, `entry=KEY=VALUE`, `verdict=VERDICT`; needs the token",
    ),
    (
        "/top",
        "most rejected and busiest keys as JSON; `format=text` (`show=busiest`), `minutes=1..10`, `rule=NAME`, `most=N`",
    ),
    ("/unmatched", "descriptors without a rule and the nearest rule, as JSON; `format=text`, `domain=NAME`, `most=N`"),
];

/// `/`: the console for a browser, otherwise the list of pages.
pub(super) async fn show_index(headers: HeaderMap) -> Response {
    let mut page = match prefers_html(&headers) {
        true => respond_static_file("text/html; charset=utf-8", CONSOLE_HTML),
        false => respond_text(StatusCode::OK, format_debug_page_list()),
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

/// Status 404, with the list of pages.
pub(super) async fn respond_page_not_found() -> Response {
    respond_error(StatusCode::NOT_FOUND, format!("404 page not found\n\n{}", format_debug_page_list()))
}

fn format_debug_page_list() -> String {
    DEBUG_PAGE_DESCRIPTIONS.iter().fold(String::new(), |mut page, (path, description)| {
        let _ = writeln!(page, "{path}: {description}");
        page
    })
}
