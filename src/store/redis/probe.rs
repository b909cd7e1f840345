//! Health check of servers that keep counters: a charge like those of the rules, on keys that expire.

use bytes::{Bytes, BytesMut};

use super::key;
use super::script::{CallTime, encode_charges, script_for_countings};
use crate::base::clock::Time;
use crate::limit::algorithm::Algorithm;
use crate::limit::charge::ChargeRequest;
use crate::limit::period::{Period, Unit};
use crate::limit::request::Hits;
use crate::limit::{Limit, LimitSpec};
use crate::store::charge::{OwnedCharge, OwnedCounter};
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::health_check::{CommandWords, HealthCheck, OptionalCommands};

/// Commands that a health check tries: those that count the hits of most rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeKind {
    /// Scripts.
    Script,
    /// INCRBY and EXPIRE, for users and servers without scripts.
    Incrby,
}

/// Health check that charges hits.
#[derive(Debug)]
pub(super) struct CounterProbe {
    kind: ProbeKind,
    prefix: String,
    /// Settings that hold the credentials, for messages.
    auth_setting: &'static str,
    /// Argument of the script.
    argument: Bytes,
}

/// Algorithms of the script: one that keeps numbers, and the one that keeps a list.
const PROBED_ALGORITHMS: [Algorithm; 2] = [Algorithm::FixedWindow, Algorithm::SlidingWindowLog];

/// Number of keys that a script must see together before calls share a command: a proxy over two servers has all of
/// them on one in one of 32 768 cases.
const MERGE_CHECK_KEY_COUNT: u32 = 16;

/// Lifetime of the key of an INCRBY probe, in seconds.
const PROBE_KEY_LIFETIME_S: &[u8] = b"60";

impl CounterProbe {
    /// Creates a probe that writes to keys with `prefix`.
    pub(super) fn new(kind: ProbeKind, prefix: &str, auth_setting: &'static str) -> Self {
        let counters = PROBED_ALGORITHMS.map(|algorithm| {
            let period = Period::new(Unit::Second, 1).expect("a second is a period");
            let limit = Limit::new(&LimitSpec::new(algorithm, 1, period)).expect("so plain a limit is valid");
            OwnedCounter { limit, shadow: false, quota: false, tag: 0 }
        });
        let charge = OwnedCharge::new(counters.into_iter().collect(), ChargeRequest::new(Hits::Charge(1), 0));
        // No probed counter follows a calendar, which the time of this process would choose the window of.
        let argument = encode_charges(&[charge], CallTime::Server { about: Time::default() });
        Self { kind, prefix: prefix.to_owned(), auth_setting, argument }
    }

    /// Scripts, if most rules do not need them.
    pub(super) fn optional_commands(&self) -> Option<OptionalCommands> {
        (self.kind == ProbeKind::Incrby).then(|| OptionalCommands {
            prefix: b"EVAL",
            consequence: "cannot count rules in redis other than plain fixed windows",
            advice: self.describe_script_requirements(),
        })
    }

    /// Permissions and server version that scripts need.
    fn describe_script_requirements(&self) -> String {
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set +setrange +pexpire +@list` on all keys that begin with \
             `{}tk1:`, and the server must be Redis 5.0 or newer, which lets a script read the time before it writes",
            self.auth_setting, self.prefix
        )
    }

    fn probe_key(&self, hash_tag: u32, name: &str) -> Bytes {
        let mut key: BytesMut = key::key_head(&self.prefix);
        key.extend_from_slice(format!("{hash_tag}}}:{name}").as_bytes());
        key.freeze()
    }
}

impl HealthCheck for CounterProbe {
    fn commands(&self, hash_tag: u32) -> Vec<CommandWords> {
        let word = Bytes::from_static;
        let key = self.probe_key(hash_tag, "probe");
        match self.kind {
            ProbeKind::Script => {
                let text = Bytes::from_static(script_for_countings(PROBED_ALGORITHMS.into_iter()).text.as_bytes());
                let log_key = self.probe_key(hash_tag, "probe_log");
                vec![vec![word(b"EVAL"), text, word(b"2"), key, log_key, self.argument.clone()]]
            }
            ProbeKind::Incrby => {
                vec![
                    vec![word(b"INCRBY"), key.clone(), word(b"1")],
                    vec![word(b"EXPIRE"), key, word(PROBE_KEY_LIFETIME_S)],
                ]
            }
        }
    }

    fn keys_for_merge_check(&self) -> Vec<Bytes> {
        match self.kind {
            ProbeKind::Script => (0..MERGE_CHECK_KEY_COUNT).map(|tag| self.probe_key(tag, "merge_probe")).collect(),
            ProbeKind::Incrby => Vec::new(),
        }
    }

    fn advice(&self, error: RedisError, text: &str) -> String {
        const WITHOUT_SCRIPTS: &str = "TOLLKEEPER_KEY_FORMAT=ratelimit counts plain fixed windows without scripts";
        match error {
            RedisError::Misconfigured if text.contains("non deterministic") => {
                format!(
                    "the server is too old: a script may read the time and then write from Redis 5.0 on; \
                     {WITHOUT_SCRIPTS}"
                )
            }
            RedisError::Misconfigured if text.contains("unknown command") => {
                format!("{text}: is it a sentinel? That wants REDIS_TYPE=sentinel; {WITHOUT_SCRIPTS}")
            }
            RedisError::Misconfigured if self.kind == ProbeKind::Script => {
                format!("{text}: {}; {WITHOUT_SCRIPTS}", self.describe_script_requirements())
            }
            RedisError::Misconfigured => {
                format!("{text}: the user ({}) needs `+ping +incrby +expire +get` on all keys", self.auth_setting)
            }
            RedisError::Unauthenticated => format!("{text}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => error.to_string(),
            _ => format!("{error}: {text}"),
        }
    }
}
