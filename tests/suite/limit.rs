//! Algorithms, windows and holds: the pure part.

pub(crate) mod algorithms;
pub(crate) mod textbook;
mod holds;
mod windows;
mod published_values;
mod division;
