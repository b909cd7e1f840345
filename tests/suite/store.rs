//! Counters in memory, in Redis, in memcached and over regions.

mod stores;
mod memory;
mod fallback;
mod redis;
mod memcache;
mod regions;
mod reservations;
mod slots;
