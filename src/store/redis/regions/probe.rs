//! Health check of the servers of the global Redis.

use bytes::Bytes;

use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck};
use crate::store::redis::key;
use crate::store::redis::script::compose::global_probe_script;

/// Health check that runs a script as grants do.
#[derive(Debug)]
pub(super) struct GlobalProbe {
    pub(super) prefix: String,
    /// Settings that hold the credentials, for messages.
    pub(super) auth_setting: &'static str,
    /// True if grants wait for replicas.
    pub(super) waits_for_replicas: bool,
}

impl GlobalProbe {
    fn requirements(&self) -> String {
        let wait = if self.waits_for_replicas { " +wait" } else { "" };
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set{wait}` on all keys that begin with `{}tk1:`, and the \
             server must be Redis 5.0 or newer, or Valkey",
            self.auth_setting, self.prefix
        )
    }
}

impl HealthCheck for GlobalProbe {
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        let mut key = key::head(&self.prefix);
        key.extend_from_slice(format!("{hash_tag}}}:global_probe").as_bytes());
        let text = Bytes::from_static(global_probe_script().text.as_bytes());
        let script = vec![word(b"EVAL"), text, word(b"1"), key.freeze(), Bytes::new()];
        // Waits for nothing.
        let wait = vec![word(b"WAIT"), word(b"0"), word(b"1")];
        if self.waits_for_replicas { vec![script, wait] } else { vec![script] }
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        match error {
            RedisError::Misconfigured => format!("{text}: {}", self.requirements()),
            RedisError::Unauthenticated => format!("{text}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => error.to_string(),
            _ => format!("{error}: {text}"),
        }
    }
}
