//! What proves a server fit: a write such as the rules make, on a key that expires.
//!
//! A ping says that a server lives; it also answers one as a replica, out of memory, or to a user who may not run
//! scripts. So the probe is a charge. It is made on each new connection, and again and again while a breaker is open.

use std::sync::LazyLock;

use bytes::Bytes;

use super::connect::{DialError, Entrance};
use super::failure::{RedisError, Refused};
use super::line::Line;
use super::reply::{Reply, text};
use super::script::{self, ChargeCommand, OwnedCounter};
use super::send::send_and_tell;
use super::{key, route};
use crate::algorithm::ChargeRequest;
use crate::limit::{Algorithm, Limit, LimitSpec, Period, Unit};
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
    arguments: Bytes,
}

/// What scripts write with: one algorithm that keeps numbers, and the one that keeps a list.
const WRITTEN: [Algorithm; 2] = [Algorithm::FixedWindow, Algorithm::SlidingWindowLog];

/// How long a probe's key lives.
const KEY_LIVES_S: &[u8] = b"60";

impl Probe {
    /// A probe of the servers behind `entrance`.
    pub(super) fn new(manner: Manner, clustered: bool, prefix: &str, entrance: &Entrance) -> Self {
        let counters = WRITTEN.map(|algorithm| {
            let period = Period::new(Unit::Second, 1).expect("a second is a period");
            let limit = Limit::new(&LimitSpec::new(algorithm, 1, period)).expect("so plain a limit is valid");
            OwnedCounter { limit, enforced: true, tag: 0 }
        });
        if clustered {
            // Here, because no probe has the time to work them out.
            LazyLock::force(&LABELS);
        }
        let command = ChargeCommand {
            counters: counters.into_iter().collect(),
            request: ChargeRequest::new(Hits::Charge(1), 0),
            dry_run: false,
            void_from: None,
        };
        Self {
            manner,
            clustered,
            prefix: prefix.to_owned(),
            auth_setting: super::connect::auth_setting(entrance),
            arguments: script::arguments(&[command], None),
        }
    }

    /// Whether it proves that scripts run.
    pub(super) fn runs_a_script(&self) -> bool {
        self.manner == Manner::Script
    }

    /// Writes to a key in `slot`; where there is no cluster, to keys in the first and the last.
    pub(super) async fn run(&self, line: &Line, slot: u16) -> Result<(), DialError> {
        if self.clustered {
            return self.write(line, LABELS[usize::from(slot)]).await;
        }
        // A node of a cluster has them both only if it has all.
        let [first, last] = ENDS;
        tokio::try_join!(self.write(line, first), self.write(line, last)).map(|_| ())
    }

    async fn write(&self, line: &Line, label: u32) -> Result<(), DialError> {
        let key = |name: &str| {
            let mut key = key::head(&self.prefix);
            key.extend_from_slice(format!("{label}}}:{name}").as_bytes());
            key.freeze()
        };
        let outcome = match self.manner {
            Manner::Script => self.run_script(line, [key("probe"), key("probe_log")]).await,
            Manner::Count => count(line, key("probe")).await,
        };
        match outcome {
            Ok(_) | Err((Refused::NoScript | Refused::Failed(RedisError::WrongType), _)) => Ok(()),
            // The slot has gone elsewhere; the server serves its others.
            Err((Refused::Moved(_) | Refused::ChargeRequest(_), _)) if self.clustered => Ok(()),
            Err((Refused::Moved(_) | Refused::ChargeRequest(_) | Refused::Failed(RedisError::SlotDown), _))
                if !self.clustered =>
            {
                let text = "the server is a node of a cluster: set REDIS_TYPE=cluster".to_owned();
                Err(DialError { kind: RedisError::Misconfigured, text })
            }
            Err((Refused::Moved(_) | Refused::ChargeRequest(_), text)) => {
                Err(DialError { kind: RedisError::BadReply, text })
            }
            Err((Refused::Failed(kind), text)) => Err(DialError { kind, text: self.advice(kind, &text) }),
        }
    }

    /// What scripts need.
    pub(super) fn scripts_advice(&self) -> String {
        format!(
            "the user ({}) needs `+eval +evalsha +time +get +set +pexpire +@list` on all keys that begin with `{}tk1:`, and \
             the server must be Redis 5.0 or newer, which lets a script read the time before it writes",
            self.auth_setting, self.prefix
        )
    }

    async fn run_script(&self, line: &Line, [first, second]: [Bytes; 2]) -> Result<Reply, (Refused, String)> {
        let script = script::script_for(WRITTEN.into_iter());
        send_and_tell(line, &[b"EVAL", script.text.as_bytes(), b"2", &first, &second, &self.arguments]).await
    }

    /// What the server said, and what to set.
    fn advice(&self, kind: RedisError, said: &str) -> String {
        const COUNTED: &str = "TOLLKEEPER_KEY_FORMAT=ratelimit counts plain fixed windows without scripts";
        match kind {
            RedisError::Misconfigured if said.contains("non deterministic") => {
                format!("the server is too old: a script may read the time and then write from Redis 5.0 on; {COUNTED}")
            }
            RedisError::Misconfigured if said.contains("unknown command") => {
                format!("{said}: is it a sentinel? That wants REDIS_TYPE=sentinel; {COUNTED}")
            }
            RedisError::Misconfigured if self.runs_a_script() => {
                format!("{said}: {}; {COUNTED}", self.scripts_advice())
            }
            RedisError::Misconfigured => {
                format!("{said}: the user ({}) needs `+ping +incrby +expire +get` on all keys", self.auth_setting)
            }
            RedisError::Unauthenticated => format!("{said}; look at {}", self.auth_setting),
            RedisError::Timeout | RedisError::Broken => kind.to_string(),
            _ => format!("{kind}: {said}"),
        }
    }
}

/// How the server makes room when its memory is full, if that costs counters. `None` if it does not, or does not tell.
pub(super) async fn eviction(line: &Line) -> Option<String> {
    let info = send_and_tell(line, &[b"INFO", b"memory"]).await.ok()?;
    let policy = text(&info)?.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))?.trim();
    (policy != "noeviction").then(|| policy.to_owned())
}

async fn count(line: &Line, key: Bytes) -> Result<Reply, (Refused, String)> {
    // At once, as charges do.
    let (increment, expire): ([&[u8]; 3], [&[u8]; 3]) = ([b"INCRBY", &key, b"1"], [b"EXPIRE", &key, KEY_LIVES_S]);
    let (count, expiry) = tokio::join!(biased; send_and_tell(line, &increment), send_and_tell(line, &expire));
    count.and(expiry)
}

/// Labels that fall into the first slot and into the last.
const ENDS: [u32; 2] = [3560, 39296];

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

#[cfg(test)]
mod tests {
    use super::{ENDS, LABELS};

    #[test]
    fn the_ends_are_the_first_and_the_last_label() {
        assert_eq!(Some(&ENDS[0]), LABELS.first());
        assert_eq!(Some(&ENDS[1]), LABELS.last());
    }
}
