//! The rate limit quota service (RLQS): proxies decide by themselves, from assignments, and report what they did.
//!
//! A *stream* is one call of `StreamRateLimitQuotas`: of one proxy, for one domain. A *bucket* is what the proxy counts
//! for itself, named by pairs of keys and values. `limit::division` divides the limits of each key among the streams
//! that report a bucket of it; `divisions` keeps one division for each key, and its hold in the store; `stream` reads
//! reports and sends assignments, in a task of its own for each stream, so that a large report delays no decision.
//!
//! Everything has a bound: buckets and their ids (`room`), pairs and bytes of an id, responses that wait for a proxy that
//! does not read (one), and their bytes.

pub mod stats;
pub mod evidence;
pub mod messages;
mod room;
mod bucket;
mod stream_end;
mod stream_handle;
mod divisions;
pub mod service;
pub mod page;
pub mod stream;
pub mod method;
