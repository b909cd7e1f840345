//! Scripts that charge counters in Redis: their texts, arguments and replies.
//!
//! Sending a script and handling errors is the job of `prepared_call`.

pub mod arguments;
pub mod compose;
pub mod replay;
