//! Check of a server that tells whether calls on several keys may share a command.
//!
//! Behind a proxy that divides keys over servers, a script with several keys would run on the server of the first one,
//! and create the others there. So the check writes keys one by one, and a script must then see all of them.

use bytes::Bytes;
use futures_util::future::join_all;

use super::connection::Connection;
use super::reply::integer;

/// Lifetime of the keys in milliseconds. Their values never change, so several replicas may check at once.
const LIFETIME_MS: &[u8] = b"10000";
const SCRIPT: &[u8] = b"local found = 0
for _, key in ipairs(KEYS) do if redis.call('GET', key) == '1' then found = found + 1 end end
return found";

/// Returns true if a script over `connection` sees all of these keys.
pub(crate) async fn sees_all(connection: &Connection, keys: &[Bytes]) -> bool {
    let set = |key| async move { connection.call(&[b"SET", key, b"1", b"PX", LIFETIME_MS], false, None).await };
    join_all(keys.iter().map(|key| set(&**key))).await;
    let key_count = keys.len().to_string();
    let mut words: Vec<&[u8]> = vec![b"EVAL", SCRIPT, key_count.as_bytes()];
    words.extend(keys.iter().map(|key| &**key));
    let found = connection.call(&words, false, None).await;
    !keys.is_empty() && found.ok().and_then(|found| integer(&found)) == i64::try_from(keys.len()).ok()
}
