//! From rule files to rules, and when to do that again.

pub mod live;
