//! DNS SRV records that name servers.

use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::proto::rr::RData;
use tokio::time::timeout;

use crate::settings::endpoint::Endpoint;

/// Upper bound on a query, its repetitions included.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of servers; each has connections and tasks.
const MAX_SERVERS: usize = 1000;

/// Queries the servers of an SRV record, sorted by their text as envoyproxy/ratelimit sorts them: the order decides
/// which server holds a key. The system's resolver configuration is read for each query.
///
/// # Errors
/// The text says why there are no servers.
pub(super) async fn query(name: &str) -> Result<Vec<Endpoint>, String> {
    let resolver = TokioResolver::builder_tokio().and_then(|builder| builder.build());
    let resolver = resolver.map_err(|error| format!("no resolver: {error}"))?;
    let lookup = timeout(QUERY_TIMEOUT, resolver.srv_lookup(name)).await.map_err(|_| "no answer in time".to_owned())?;
    let lookup = lookup.map_err(|error| error.to_string())?;
    let mut found: Vec<(String, u16)> = lookup
        .answers()
        .iter()
        .filter_map(|record| match &record.data {
            RData::SRV(srv) if srv.port != 0 && !srv.target.is_root() => Some((srv.target.to_ascii(), srv.port)),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        return Err("the record names no servers".to_owned());
    }
    if found.len() > MAX_SERVERS {
        return Err(format!("the record names {} servers; the maximum is {MAX_SERVERS}", found.len()));
    }
    sort(&mut found);
    Ok(found.into_iter().map(|(host, port)| Endpoint::Tcp { host, port }).collect())
}

/// Sorts by the text `host:port`.
fn sort(servers: &mut [(String, u16)]) {
    servers.sort_by_cached_key(|(host, port)| format!("{host}:{port}"));
}

#[cfg(test)]
mod tests {
    use super::sort;

    #[test]
    fn servers_are_sorted_as_text() {
        let mut servers = [("b.x.", 1), ("a.x.", 9), ("a.x.", 10), ("a.x.y.", 1)].map(|(h, p)| (h.to_owned(), p));
        sort(&mut servers);
        let sorted: Vec<String> = servers.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        assert_eq!(sorted, ["a.x.:10", "a.x.:9", "a.x.y.:1", "b.x.:1"]);
    }
}
