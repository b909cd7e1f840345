//! What goes wrong with the hosts of a run.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep;

use super::fleet::Fleet;
use super::plan::{Fault, TimedFault};
use super::server::RedisHost;

/// Time after a failover at which the server of before comes back as a replica.
const OLD_PRIMARY_RETURNS: Duration = Duration::from_millis(500);

impl Fleet {
    /// Lets a fault begin and end at its times.
    pub async fn let_happen(self: Rc<Self>, timed: TimedFault) {
        if let Fault::RedisRestoresSnapshot(age_ms) = timed.fault {
            return self.restore_snapshot(timed, age_ms).await;
        }
        if let Fault::RedisFailsOver(lag_ms) = timed.fault {
            return self.fail_over(timed, lag_ms).await;
        }
        self.wait_until(timed.at_ms).await;
        self.trace.record(|| timed.to_string());
        let (redis, for_ms) = (&self.servers[timed.server], Duration::from_millis(timed.for_ms));
        match timed.fault {
            Fault::RedisFrozen
            | Fault::RedisRestarts
            | Fault::RedisLosesData
            | Fault::RedisRestoresSnapshot(_)
            | Fault::RedisFailsOver(_)
            | Fault::RedisRefuses(_)
            | Fault::ScriptsAreSlow(_) => self.disturb_redis(redis, timed.fault, for_ms).await,
            Fault::ScriptsAreForgotten => {
                self.trace.count("scripts were forgotten");
                redis.run_now(&[b"SCRIPT", b"FLUSH"]);
            }
            Fault::KeyIsEvicted => self.evict_key(redis),
            Fault::RedisClockJumps(by_ms) => {
                redis.clock.jump(by_ms * 1000);
                self.record_loss(self.now_ms(), None);
                self.trace.count(if by_ms > 0 {
                    "the clock of redis jumped forwards"
                } else {
                    "the clock of redis jumped back"
                });
            }
            Fault::ReplicaClockJumps(index, by_ms) => {
                self.replica_clocks[index].jump(by_ms * 1000);
                self.trace.count("the clock of a replica jumped");
            }
            Fault::LinkIsCut(index, _, _) | Fault::LinkIsSlow(index, _) => {
                self.disturb_link(timed, index).await;
            }
            Fault::ConnectionsAreReset(index) => {
                let Some(replica) = self.replica(index) else { return };
                self.trace.count("connections were reset");
                redis.reset_connections(Some(&replica.host));
            }
            Fault::ReplicaIsKilled(index) => self.kill_replica(index, for_ms).await,
            Fault::ReplicaStops(index) => {
                let Some(replica) = self.replicas.borrow_mut()[index].take() else { return };
                self.trace.count("a replica stopped");
                replica.stop().await;
                sleep(for_ms).await;
                self.start_replica(index);
            }
            // What operators do, and what happens to proxies, depends on the kind of run.
            Fault::LimitChanges(..)
            | Fault::CountersAreReset(_)
            | Fault::ReplicaStandsStill(_)
            | Fault::ProxyIsKilled(..)
            | Fault::ProxyStandsStill(_)
            | Fault::ProxyIsCutOff(..)
            | Fault::ProxyLinkIsCut(..)
            | Fault::ProxyLinkIsSlow(..)
            | Fault::ProxyStreamIsReset(_) => {}
        }
    }

    async fn restore_snapshot(&self, timed: TimedFault, age_ms: u64) {
        self.wait_until(timed.at_ms.saturating_sub(age_ms)).await;
        let redis = &self.servers[timed.server];
        let snapshot = redis.server.borrow().snapshot();
        let from_ms = self.now_ms();
        self.wait_until(timed.at_ms).await;
        self.trace.record(|| timed.to_string());
        redis.close_port();
        sleep(Duration::from_millis(timed.for_ms)).await;
        redis.server.borrow_mut().restore(&snapshot);
        redis.open_port();
        self.record_loss(from_ms, None);
        self.trace.count("redis restored a snapshot");
    }

    async fn fail_over(&self, timed: TimedFault, lag_ms: u64) {
        self.wait_until(timed.at_ms.saturating_sub(lag_ms)).await;
        let (from_ms, shard) = (self.now_ms(), timed.server);
        let Some((primary, replica)) = self.primary_and_replica(shard) else { return };
        let snapshot = primary.server.borrow().snapshot();
        self.wait_until(timed.at_ms).await;
        self.trace.record(|| timed.to_string());
        primary.close_port();
        sleep(Duration::from_millis(timed.for_ms)).await;
        // Another failover may have come first.
        if !self.primary_and_replica(shard).is_some_and(|(now, _)| Rc::ptr_eq(now, primary)) {
            return;
        }
        replica.server.borrow_mut().restore(&snapshot);
        self.promote_replica(shard);
        self.record_loss(from_ms, None);
        self.trace.count("redis failed over");
        sleep(OLD_PRIMARY_RETURNS).await;
        primary.open_port();
    }

    async fn disturb_redis(&self, redis: &Rc<RedisHost>, fault: Fault, for_ms: Duration) {
        match fault {
            Fault::RedisFrozen => {
                self.trace.count("redis was frozen");
                redis.set_running(false);
                sleep(for_ms).await;
                redis.set_running(true);
            }
            Fault::RedisLosesData => {
                redis.close_port();
                redis.server.borrow_mut().crash();
                let from_ms = self.now_ms();
                sleep(for_ms).await;
                redis.open_port();
                self.record_loss(from_ms, None);
                self.trace.count("redis lost its data");
            }
            Fault::RedisRefuses(refusal) => {
                self.trace.count("redis refused commands");
                redis.server.borrow_mut().set_refusal(Some(refusal));
                sleep(for_ms).await;
                redis.server.borrow_mut().set_refusal(None);
            }
            Fault::ScriptsAreSlow(milliseconds) => {
                self.trace.count("scripts were slow");
                redis.set_script_time(milliseconds);
                sleep(for_ms).await;
                redis.set_script_time(0);
            }
            _ => {
                self.trace.count("redis restarted");
                redis.close_port();
                sleep(for_ms).await;
                redis.open_port();
            }
        }
    }

    fn evict_key(&self, redis: &RedisHost) {
        let now_us = redis.clock.now().as_micros();
        let key = redis.server.borrow().live_keys(now_us).first().map(|(key, _)| (*key).clone());
        if let Some(key) = key {
            redis.server.borrow_mut().evict(&key);
            self.record_loss(self.now_ms(), None);
            self.trace.count("a key was evicted");
        }
    }

    async fn disturb_link(&self, timed: TimedFault, index: usize) {
        let Some(link) = self.link_of(index, timed.server) else { return };
        let for_ms = Duration::from_millis(timed.for_ms);
        match timed.fault {
            Fault::LinkIsSlow(_, milliseconds) => {
                self.trace.count("a link was slow");
                self.links.change(&link, |link| link.latency_ms += milliseconds);
                sleep(for_ms).await;
                self.links.change(&link, |link| link.latency_ms -= milliseconds);
            }
            Fault::LinkIsCut(_, to_server, to_host) => {
                self.trace.count("a link was cut");
                let cut = |is_cut: bool| {
                    self.links.change(&link, |link| {
                        link.is_cut_to_server = to_server && is_cut;
                        link.is_cut_to_host = to_host && is_cut;
                    });
                };
                cut(true);
                sleep(for_ms).await;
                cut(false);
            }
            _ => {}
        }
    }

    async fn kill_replica(&self, index: usize, for_ms: Duration) {
        let Some(replica) = self.replicas.borrow_mut()[index].take() else { return };
        self.trace.count("a replica was killed");
        for server in &self.servers {
            let link = (replica.host.clone(), server.address.clone());
            self.links.change(&link, |link| (link.is_cut_to_server, link.is_cut_to_host) = (true, true));
        }
        replica.kill();
        drop(replica);
        sleep(for_ms).await;
        self.start_replica(index);
    }
}
