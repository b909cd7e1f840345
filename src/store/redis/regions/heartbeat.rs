//! Heartbeat of this process in the global Redis, once a second: whether it answers, and which regions are there.
//!
//! Each region writes its list of regions under its name and reads those of the others. No decision waits for this.
//!
//! Decides: when another region is missing (`SILENT_AFTER_MS`).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, sleep_until};

use super::calls::GLOBAL_REDIS_TIMEOUT;
use crate::base::sharded::lock_ignoring_poison;
use crate::limit::RegionConnection;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::deployment::Deployment;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};
use crate::store::redis::global_answers::GlobalAnswers;
use crate::store::redis::key::region_list_key;
use crate::store::stats::RegionNotice;

/// Time from one heartbeat to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time without a heartbeat after which a region is missing, in milliseconds.
const SILENT_AFTER_MS: &[u8] = b"60000";

/// Heartbeat of this process.
#[derive(Debug)]
pub(super) struct RegionHeartbeat {
    global: Arc<Deployment>,
    region: String,
    /// Names of all regions, separated by commas.
    list: String,
    /// Name of each region, and the key of its list.
    keys: Vec<(String, Bytes)>,
    answers: Arc<GlobalAnswers>,
    found: Mutex<Found>,
}

/// What the heartbeats found.
#[derive(Debug, Default)]
struct Found {
    /// Regions that have not reported for a minute.
    silent: Vec<String>,
    /// Regions with another list.
    other_lists: Vec<String>,
    /// Notices in the log.
    logged: Vec<RegionNotice>,
}

impl RegionHeartbeat {
    /// Creates the heartbeat of a process; `prefix` is `CACHE_KEY_PREFIX`.
    pub(super) fn new(
        regions: &RegionSettings,
        prefix: &str,
        global: Arc<Deployment>,
        answers: Arc<GlobalAnswers>,
    ) -> Self {
        Self {
            global,
            region: regions.own_region_name().to_owned(),
            list: regions.names.join(","),
            keys: regions.names.iter().map(|name| (name.clone(), region_list_key(prefix, name))).collect(),
            answers,
            found: Mutex::default(),
        }
    }

    /// Returns the notices that hold at `at`.
    pub(super) fn notices(&self, at: Instant) -> Vec<RegionNotice> {
        if self.answers.connection(at) == RegionConnection::CutOff {
            return vec![RegionNotice::CutOff];
        }
        let found = lock_ignoring_poison(&self.found);
        let lists = (!found.other_lists.is_empty()).then(|| RegionNotice::OtherLists(found.other_lists.clone()));
        let silent = (!found.silent.is_empty()).then(|| RegionNotice::NotSeen(found.silent.clone()));
        lists.into_iter().chain(silent).collect()
    }

    /// Reports until it is dropped.
    pub(super) async fn run(&self) {
        let reporting = async {
            loop {
                let started = Instant::now();
                self.report().await;
                sleep_until(started + INTERVAL).await;
            }
        };
        let logging = async {
            loop {
                self.log_changes(Instant::now());
                sleep(INTERVAL).await;
            }
        };
        tokio::join!(reporting, logging);
    }

    /// Writes the list of this region, and reads those of the others, all at once.
    async fn report(&self) {
        let list = self.list.as_bytes();
        let lists = join_all(self.keys.iter().map(|(name, key)| async move {
            let is_own = *name == self.region;
            let (write, read): ([&[u8]; 5], [&[u8]; 2]) = ([b"SET", key, list, b"PX", SILENT_AFTER_MS], [b"GET", key]);
            self.call(key, if is_own { &write } else { &read }).await.map(|reply| match reply_bytes(&reply) {
                _ if is_own => Some(true),
                found => found.map(|found| found == list),
            })
        }))
        .await;
        // A list that could not be read tells nothing.
        let names_with = |found: Option<bool>| {
            let names = self.keys.iter().zip(&lists).filter(|(_, read)| read.as_ref() == Ok(&found));
            names.map(|((name, _), _)| name.clone()).collect()
        };
        let mut found = lock_ignoring_poison(&self.found);
        // Regions that start together have a minute to report.
        let is_new = self.answers.us_since_start(Instant::now()) < 60_000_000;
        found.silent = if is_new { Vec::new() } else { names_with(None) };
        found.other_lists = names_with(Some(false));
    }

    async fn call(&self, key: &Bytes, words: &[&[u8]]) -> Result<Reply, RedisError> {
        let deadline = Instant::now() + GLOBAL_REDIS_TIMEOUT;
        let mut target = self.global.target_node(key, deadline).await?;
        loop {
            match target.node.call(words, target.asking, deadline).await {
                Ok(reply) => {
                    self.answers.record(Instant::now());
                    return Ok(reply);
                }
                Err(error) => target.follow_redirection(error)?,
            }
        }
    }

    /// Logs the notices that are new, and those that ended.
    fn log_changes(&self, at: Instant) {
        let now = self.notices(at);
        let logged = std::mem::replace(&mut lock_ignoring_poison(&self.found).logged, now.clone());
        let region = self.region.as_str();
        for notice in now.iter().filter(|notice| !logged.contains(notice)) {
            tracing::warn!(region, notice = notice.name(), "{notice}");
        }
        let is_over = |ended: &&RegionNotice| !now.iter().any(|notice| notice.name() == ended.name());
        for ended in logged.iter().filter(is_over) {
            tracing::warn!(region, notice = ended.name(), "{}", ended.text_of_end());
        }
    }
}
