//! Discovery of the primary that sentinels watch.

use tokio::task::JoinSet;

use super::topology_source::{TopologySource, with_hint};
use crate::settings::endpoint::Endpoint;
use crate::store::client::redis::error::{RedisConnectError, RedisError};
use crate::store::client::redis::node_address::announced_endpoint;
use crate::store::client::redis::reply::Reply;

/// Queries all sentinels at once, and returns the primary that most of them name.
///
/// A sentinel that was partitioned may not know of a failover yet. A tie keeps the `current` primary.
///
/// # Errors
/// No sentinel names a primary.
pub(super) async fn query_primary(
    sentinels: &mut Vec<TopologySource>,
    name: &str,
    current: Option<&Endpoint>,
) -> Result<Endpoint, RedisConnectError> {
    let mut queries = JoinSet::new();
    for mut sentinel in sentinels.drain(..) {
        let name = name.to_owned();
        queries.spawn(async move {
            let reply = sentinel.query(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.as_bytes()]).await;
            (sentinel, reply)
        });
    }
    let mut votes: Vec<(Endpoint, usize)> = Vec::new();
    let mut last_error = RedisConnectError { kind: RedisError::Unreachable, text: "no sentinel answers".to_owned() };
    for (sentinel, reply) in queries.join_all().await {
        let reply = reply.map_err(|error| with_hint(error, "is it a sentinel, as REDIS_TYPE=sentinel says?"));
        match reply.and_then(|reply| parse_primary(&reply, &sentinel, name)) {
            Ok(endpoint) => match votes.iter_mut().find(|(voted, _)| *voted == endpoint) {
                Some((_, count)) => *count += 1,
                None => votes.push((endpoint, 1)),
            },
            Err(error) => last_error = error,
        }
        sentinels.push(sentinel);
    }
    votes
        .into_iter()
        .max_by_key(|(endpoint, count)| (*count, current == Some(endpoint)))
        .map(|(endpoint, _)| endpoint)
        .ok_or(last_error)
}

fn parse_primary(reply: &Reply, sentinel: &TopologySource, name: &str) -> Result<Endpoint, RedisConnectError> {
    match reply {
        Reply::Null => Err(RedisConnectError::misconfigured(format!(
            "the sentinel {} knows no master `{name}`; the first word of the URL is its name",
            sentinel.endpoint
        ))),
        Reply::Array(parts) => match &**parts {
            [host, port] => announced_endpoint(host, port, &sentinel.endpoint),
            _ => None,
        }
        .ok_or_else(|| sentinel.invalid_reply()),
        _ => Err(sentinel.invalid_reply()),
    }
}
