//! Health, pages, metrics and logs of a process that counts in memcache.
