//! Addresses of nodes as servers announce them.

use super::reply::{Reply, integer, text};
use crate::settings::endpoint::Endpoint;

/// Reads the `host` and `port` of a reply; `None` if they are invalid.
///
/// An empty host stands for the host of `responder`.
pub fn announced_endpoint(host: &Reply, port: &Reply, responder: &Endpoint) -> Option<Endpoint> {
    let port = u16::try_from(integer(port)?).ok().filter(|port| *port != 0)?;
    let host = match (text(host), responder) {
        (None | Some(""), Endpoint::Tcp { host, .. }) => host.clone(),
        (Some(host), _) if !host.is_empty() && host != "?" => host.to_owned(),
        _ => return None,
    };
    Some(Endpoint::Tcp { host, port })
}

/// Reads the `host:port` of a redirection; an empty host stands for the host of `responder`. `None` if it is invalid.
pub(crate) fn redirect_endpoint(address: &str, responder: &Endpoint) -> Option<Endpoint> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok().filter(|port| *port != 0)?;
    match (host, responder) {
        ("", Endpoint::Tcp { host, .. }) => Some(Endpoint::Tcp { host: host.clone(), port }),
        ("" | "?", _) => None,
        (host, _) => Some(Endpoint::Tcp { host: host.to_owned(), port }),
    }
}
