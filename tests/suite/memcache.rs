//! Counters in memcache: processes that share one memcached or several.
//!
//! All of it needs `memcached`.

mod test_kit;
