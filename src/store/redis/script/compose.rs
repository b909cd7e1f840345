//! The texts of the scripts, put together from a driver and the parts of its algorithms.
//!
//! A Lua file is divided into parts by lines `--: NAME`, and a line `--> NAME` stands for a part. With the parts in the
//! driver's own text a call of one counter runs from top to bottom, without functions to make and tables to fill: that
//! is half of its time. Several counters have the same parts as functions.
//!
//! Comments are left out: a script's hash, and with it what servers keep, changes with the code alone.

use std::collections::HashMap;

use crate::limit::algorithm::Algorithm;

/// Parts that any algorithm may use.
const SHARED: [&str; 4] = [
    include_str!("../lua/state.lua"),
    include_str!("../lua/exact.lua"),
    include_str!("../lua/drain.lua"),
    include_str!("../lua/log.lua"),
];

/// Texts by name.
type Parts<'t> = HashMap<&'t str, &'t str>;

/// The script for one counter.
pub(super) fn alone(algorithm: Algorithm) -> String {
    let helpers = helpers(&[algorithm].into_iter());
    let mut parts = parts_of(algorithm);
    parts.insert("helpers", &helpers);
    expand(include_str!("../lua/driver.lua"), &parts)
}

/// The script for counters of these algorithms.
pub(super) fn together(algorithms: impl Iterator<Item = Algorithm> + Clone) -> String {
    let helpers = helpers(&algorithms);
    let makers: String = algorithms
        .map(|algorithm| {
            let maker = expand(include_str!("../lua/counter.lua"), &parts_of(algorithm));
            format!("makers[{}] = {maker}", algorithm as u8)
        })
        .collect();
    let mut parts = shared_parts();
    parts.extend([("helpers", helpers.as_str()), ("makers", &makers)]);
    expand(include_str!("../lua/together.lua"), &parts)
}

/// The script that keeps the table of processes.
pub(super) fn replicas() -> String {
    expand(include_str!("../lua/replicas.lua"), &shared_parts())
}

/// The functions that these algorithms call.
fn helpers(algorithms: &(impl Iterator<Item = Algorithm> + Clone)) -> String {
    let has = |wanted: &[Algorithm]| algorithms.clone().any(|algorithm| wanted.contains(&algorithm));
    let divide = has(&[Algorithm::TokenBucket, Algorithm::LeakyBucket, Algorithm::SlidingWindowCounter]);
    let log = has(&[Algorithm::SlidingWindowLog]);
    let shared = shared_parts();
    [(divide, "divide"), (log, "log")].into_iter().filter(|(needed, _)| *needed).map(|(_, name)| shared[name]).collect()
}

fn shared_parts() -> Parts<'static> {
    SHARED.iter().flat_map(|file| split(file)).collect()
}

fn parts_of(algorithm: Algorithm) -> Parts<'static> {
    let file = match algorithm {
        Algorithm::TokenBucket => include_str!("../lua/token_bucket.lua"),
        Algorithm::LeakyBucket => include_str!("../lua/leaky_bucket.lua"),
        Algorithm::FixedWindow => include_str!("../lua/fixed_window.lua"),
        Algorithm::SlidingWindowLog => include_str!("../lua/sliding_window_log.lua"),
        Algorithm::SlidingWindowCounter => include_str!("../lua/sliding_window_counter.lua"),
    };
    let mut parts = shared_parts();
    // Only a log has something to look up before it is written.
    parts.insert("plan", "");
    parts.extend(split(file));
    parts
}

/// The named parts of a file; what stands before the first is its header.
fn split(file: &str) -> impl Iterator<Item = (&str, &str)> {
    file.split("\n--: ").skip(1).filter_map(|part| part.split_once('\n'))
}

/// A text with its parts in their places and without comments.
fn expand(text: &str, parts: &Parts<'_>) -> String {
    let mut expanded = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("--> ") {
            expanded.push_str(&expand(parts[name], parts));
        } else if !line.is_empty() && !line.starts_with("--") {
            expanded.push_str(line);
            expanded.push('\n');
        }
    }
    expanded
}
