//! What proves a server fit: a write such as the rules make, on a key that expires.
//!
//! A ping says that a server lives; it also answers one as a replica, out of memory, or to a user who may not run
//! scripts. So the probe is a draw. It is made on each new connection, and again and again while a breaker is open.

use std::sync::LazyLock;

use fred::clients::Client;
use fred::types::Value;
use smallvec::SmallVec;

use super::connect::{DialError, Entrance};
use super::failure::{RedisError, Refused};
use super::node::send;
use super::script::{self, Counted, Drawing};
use super::{key, route};
use crate::algorithm::Ask;
use crate::limit::{Algorithm, Limit, Period, Terms, Unit};
use crate::request::Hits;

/// How the rules write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// By scripts.
    Script,
    /// By INCRBY and EXPIRE, where a user or a server has no scripts.
    Count,
}

/// A write such as the rules make.
#[derive(Debug)]
pub(super) struct Probe {
    manner: Manner,
    /// Whether the servers are nodes of a cluster: then a redirection is no surprise.
    clustered: bool,
    prefix: String,
    auth_setting: &'static str,
}

/// How long a probe's key lives.
const KEY_LIVES_S: i64 = 60;

impl Probe {
    /// A probe of the servers behind `entrance`.
    pub(super) fn new(manner: Manner, clustered: bool, prefix: &str, entrance: &Entrance) -> Self {
        Self { manner, clustered, prefix: prefix.to_owned(), auth_setting: super::connect::auth_setting(entrance) }
    }

    /// Whether it proves that scripts run.
    pub(super) fn runs_a_script(&self) -> bool {
        self.manner == Manner::Script
    }

    /// Writes to a key in `slot`.
    pub(super) async fn run(&self, client: &Client, slot: u16) -> Result<(), DialError> {
        let mut key = key::head(&self.prefix);
        key.extend_from_slice(format!("{}}}:probe", LABELS[usize::from(slot)]).as_bytes());
        let key = Value::Bytes(key.freeze());
        let outcome = match self.manner {
            Manner::Script => run_script(client, key).await,
            Manner::Count => count(client, key).await,
        };
        match outcome {
            Ok(_) | Err(Refused::NoScript | Refused::Failed(RedisError::WrongType)) => Ok(()),
            // The slot has gone elsewhere; the server serves its others.
            Err(Refused::Moved(_) | Refused::Ask(_)) if self.clustered => Ok(()),
            Err(Refused::Moved(_) | Refused::Ask(_)) => {
                let text = "the server is a node of a cluster: set REDIS_TYPE=cluster".to_owned();
                Err(DialError { kind: RedisError::Misconfigured, text })
            }
            Err(Refused::Failed(kind)) => Err(DialError { kind, text: self.advice(kind) }),
        }
    }

    /// What scripts need.
    pub(super) fn scripts_advice(&self) -> String {
        format!(
            "its user ({}) must be allowed `+eval +evalsha +time +get +set +pexpire +@list` on the keys, and the server \
             must be Redis 5.0 or newer, which lets a script read the time before it writes",
            self.auth_setting
        )
    }

    fn advice(&self, kind: RedisError) -> String {
        match kind {
            RedisError::Misconfigured if self.runs_a_script() => format!(
                "{kind}: {}; TOLLKEEPER_KEY_FORMAT=ratelimit needs no scripts for plain fixed windows; sentinels want \
                 REDIS_TYPE=sentinel",
                self.scripts_advice()
            ),
            RedisError::Misconfigured => {
                format!("{kind}: its user ({}) must be allowed `+incrby +expire +get` on the keys", self.auth_setting)
            }
            RedisError::Unauthenticated => format!("{kind}; look at {}", self.auth_setting),
            kind => kind.to_string(),
        }
    }
}

/// How the server makes room when its memory is full, if that costs counters. `None` if it does not, or does not tell.
pub(super) async fn eviction(client: &Client) -> Option<String> {
    let info = send(client, "INFO", vec![Value::from("memory")], false).await.ok()?;
    let info = info.as_str()?;
    let policy = info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?.trim();
    (policy != "noeviction").then(|| policy.to_owned())
}

async fn run_script(client: &Client, key: Value) -> Result<Value, Refused> {
    let period = Period::new(Unit::Second, 1).expect("a second is a period");
    let limit = Limit::new(&Terms::new(Algorithm::FixedWindow, 1, period)).expect("so plain a limit is valid");
    let counted = Counted { limit, enforced: true, tag: 0 };
    let drawing = Drawing { counters: SmallVec::from([counted]), ask: Ask::new(Hits::Take(1), 0), trial: false };
    let script = script::script_for([Algorithm::FixedWindow].into_iter());
    let text = Value::from(script.text.as_str());
    let arguments = Value::Bytes(script::arguments(&[drawing], None));
    send(client, "EVAL", vec![text, Value::Integer(1), key, arguments], false).await
}

async fn count(client: &Client, key: Value) -> Result<Value, Refused> {
    send(client, "INCRBY", vec![key.clone(), Value::Integer(1)], false).await?;
    send(client, "EXPIRE", vec![key, Value::Integer(KEY_LIVES_S)], false).await
}

/// For each slot a label that falls into it.
static LABELS: LazyLock<Box<[u32]>> = LazyLock::new(|| {
    let mut labels = vec![u32::MAX; usize::from(route::SLOTS)];
    let mut missing = labels.len();
    for label in 0.. {
        let place = &mut labels[usize::from(key::slot(label.to_string().as_bytes()))];
        if *place == u32::MAX {
            *place = label;
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    labels.into()
});
