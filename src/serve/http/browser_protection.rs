//! Protection of the HTTP listeners against web pages that somebody's browser has open.
//!
//! - A site whose DNS name is made to point at this process is same-origin to the browser. So the `Host` must be an IP
//!   address, a name that no such site can have, or a name from `TOLLKEEPER_DEBUG_HOSTS`. On the debug listener the check
//!   applies to all clients, because a script can hide that it runs in a browser: it may set `User-Agent` and `Accept`,
//!   and a browser sends `Origin` and `Sec-Fetch-Site` not always. On the listener of `/json`, which has any name, it
//!   applies to requests with one of these headers: without `Origin` a browser sends GET and HEAD only, without a body.
//! - Another site can send requests without reading the response. They are refused by the headers that the browser adds
//!   and no script can change.
//! - Response headers forbid other sites to frame or embed a page, and the console to load anything else.
//!
//! Decides: who may open a debug page, or send `/json`: `Host`, other sites, embedding; security headers.
//! Decides: that no page is cached (`SECURITY_HEADERS`).

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::response::respond_error;

/// Names by which requests may address the debug listener, in lower case.
#[derive(Clone, Debug)]
pub struct AllowedHosts(pub Arc<[String]>);

const SECURITY_HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri \
         'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Relation of the requesting site to this one, as browsers tell it to `https:` and local addresses.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Refuses requests that another site may have caused; adds the security headers to every response.
pub(super) async fn protect_from_other_sites(
    State(allowed): State<AllowedHosts>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match find_reason_against_request(&allowed, &request) {
        Some(refusal) => refusal,
        None => next.run(request).await,
    };
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Refuses requests that a browser sends for another site; those without a sign of a browser pass, whatever their `Host`.
pub(super) async fn refuse_other_sites(State(allowed): State<AllowedHosts>, request: Request, next: Next) -> Response {
    let is_of_browser = [header::ORIGIN, SEC_FETCH_SITE].iter().any(|name| request.headers().contains_key(name));
    match find_reason_against_request(&allowed, &request).filter(|_| is_of_browser) {
        Some(refusal) => refusal,
        None => next.run(request).await,
    }
}

/// Response to a request that another site may have caused.
fn find_reason_against_request(allowed: &AllowedHosts, request: &Request) -> Option<Response> {
    if !allowed.allows_request(request) {
        let what = "the Host is neither an IP address nor localhost nor the name of a Kubernetes service (as protection \
                    against DNS rebinding; add it to TOLLKEEPER_DEBUG_HOSTS)\n";
        return Some(respond_error(StatusCode::MISDIRECTED_REQUEST, what));
    }
    let what = "another site caused this request; open the page itself\n";
    is_cross_site(request).then(|| respond_error(StatusCode::FORBIDDEN, what))
}

impl AllowedHosts {
    /// True if every host that the request names is allowed. HTTP/1.0 may name none, which no browser does.
    fn allows_request(&self, request: &Request) -> bool {
        let hosts =
            request.headers().get_all(header::HOST).iter().map(|host| Authority::try_from(host.as_bytes()).ok());
        hosts
            .chain(request.uri().authority().map(|authority| Some(authority.clone())))
            .all(|authority| authority.is_some_and(|authority| self.allows_host(authority.host())))
    }

    fn allows_host(&self, host: &str) -> bool {
        let ipv6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if let Some(address) = ipv6 {
            return address.parse::<Ipv6Addr>().is_ok();
        }
        if host.parse::<Ipv4Addr>().is_ok() {
            return true;
        }
        let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        // A site on the internet hardly has a name of one label, or one below `localhost` or `svc`. A machine of the
        // same network or cluster may, and it reaches the listener itself.
        let is_private =
            !name.contains('.') || [".localhost", ".svc", ".svc.cluster.local"].iter().any(|end| name.ends_with(end));
        is_private || self.0.contains(&name)
    }
}

/// True if the browser says that another site caused the request; a link to a page may be followed.
fn is_cross_site(request: &Request) -> bool {
    let headers = request.headers();
    let is = |name: HeaderName, value: &str| {
        let mut values = headers.get_all(name).iter();
        values.next().is_some_and(|first| first == value) && values.next().is_none()
    };
    let is_own_site = headers.get_all(SEC_FETCH_SITE).iter().all(|site| site == "same-origin" || site == "none");
    let is_link = matches!(*request.method(), Method::GET | Method::HEAD)
        && is(SEC_FETCH_MODE, "navigate")
        && is(SEC_FETCH_DEST, "document");
    !has_no_foreign_origin(headers) || !is_own_site && !is_link
}

/// True if the request has no `Origin`, or that of the host it is sent to.
fn has_no_foreign_origin(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    headers.get_all(header::ORIGIN).iter().all(|origin| {
        let origin = origin.as_bytes();
        let own = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
        own.zip(host).is_some_and(|(own, host)| own.eq_ignore_ascii_case(host))
    })
}
