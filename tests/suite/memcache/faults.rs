//! Responses while memcached misbehaves: in time and by policy, and strict again soon after it recovers.
