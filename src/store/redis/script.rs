//! The scripts that draw from counters in Redis.
