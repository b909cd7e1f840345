//! Counters in Redis: the client, the scripts, the store, and processes that share one Redis.
//!
//! All of it needs `redis-server`.

mod agreement;
mod coalescing;
mod eventual;
mod eventual_model;
pub(crate) mod faults;
mod identities;
mod keys;
mod lease_record;
mod over_limit_cache;
mod ratelimit_key_format;
mod pool_agreement;
mod replica_places;
mod replicas;
mod replies;
mod merged_calls;
mod round_trips;
mod test_kit;
mod time_agreement;
mod connection;
mod hash_slots;
mod tokens;
