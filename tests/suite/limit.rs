//! Algorithms, windows and holds: the pure part.

mod algorithms;
mod textbook;
mod holds;
mod windows;
