//! Concurrent limits: slots that streams take and free, in a table of their own, in every store, and through the binary.

mod agreement;
mod binary;
mod protocol;
mod table;
