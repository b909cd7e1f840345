//! Scripts for the counters: their texts, composed of a driver and the parts of algorithms.
//!
//! [`arguments`] encodes what a script takes, and [`replay`] computes the results of a call from what it returns.
//!
//! A line `--: NAME` in a Lua file starts a part, and a line `--> NAME` is replaced by a part. A script for one counter
//! has the parts inline in the driver: it runs without creating functions and tables, which halves its time. A script
//! for several counters has the same parts as functions.
//!
//! Comments are removed, so that the hash of a script, and the copy that servers cache, changes with its code only.

pub mod arguments;
pub mod replay;

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use crate::limit::algorithm::counting::{Counting, for_each_counting};
use crate::store::client::redis::script::Script;

/// Files of parts that any algorithm may use.
const SHARED_FILES: [&str; 7] = [
    include_str!("lua/state.lua"),
    include_str!("lua/charge_loop.lua"),
    include_str!("lua/leases.lua"),
    include_str!("lua/equal_charges.lua"),
    include_str!("lua/exact.lua"),
    include_str!("lua/leaky_level.lua"),
    include_str!("lua/log.lua"),
];

/// Parts with helper functions, in the order in which a script defines them.
const HELPERS: [&str; 2] = ["divide", "log"];

macro_rules! define_lua_files {
    ($($variant:ident, $name:ident, $lua_file:literal, $properties:expr;)*) => {
        /// Returns the text of a counting's Lua file.
        const fn lua_file(counting: Counting) -> &'static str {
            match counting {
                $(Counting::$variant => include_str!(concat!("lua/", $lua_file)),)*
            }
        }
    };
}
for_each_counting!(define_lua_files);

/// Number of countings.
const COUNTINGS: usize = Counting::ALL.len();

/// Parts by name.
type LuaParts<'t> = HashMap<&'t str, &'t str>;

/// Returns the script for counters of these countings, one for each key of the call.
pub fn script_for(countings: impl Iterator<Item = impl Into<Counting>>) -> &'static Script {
    static SINGLE: [OnceLock<Script>; COUNTINGS] = [const { OnceLock::new() }; COUNTINGS];
    static SEVERAL: [OnceLock<Script>; 1 << COUNTINGS] = [const { OnceLock::new() }; 1 << COUNTINGS];
    let (mut keys, mut set, mut first) = (0, 0, Counting::FixedWindow);
    for counting in countings.map(Into::into) {
        (keys, set, first) = (keys + 1, set | 1 << counting as usize, counting);
    }
    if keys == 1 {
        SINGLE[first as usize].get_or_init(|| single_counter(first))
    } else {
        let used = Counting::ALL.into_iter().filter(|&counting| set >> counting as usize & 1 == 1);
        SEVERAL[set].get_or_init(|| Script::new(several_counters(used)))
    }
}

/// Declares the getter of each script that stands alone, with its Lua file and the function that expands it.
macro_rules! define_scripts {
    ($($(#[$doc:meta])* $getter:ident = $file:literal, $expand:ident;)*) => {$(
        $(#[$doc])*
        pub fn $getter() -> &'static Script {
            static SCRIPT: LazyLock<Script> =
                LazyLock::new(|| Script::new($expand(include_str!(concat!("lua/", $file, ".lua")))));
            &SCRIPT
        }
    )*};
}

define_scripts! {
    /// Returns the script that assigns slots to replicas; `replicas::claim` encodes its argument and decodes its reply.
    replicas_script = "replicas", with_shared_parts;
    /// Returns the script that gives a grant to a region's counter of windows, or takes unused hits from it;
    /// `regions::grant_calls` encodes its argument.
    region_grant_script = "regions/region_grant", with_shared_parts;
    /// Returns the script that gives a grant to a region's bucket; `regions::grant_calls` encodes its argument.
    region_bucket_grant_script = "regions/region_bucket_grant", with_region_bucket_parts;
    /// Returns the script that lets a region's counter follow a reset; `regions::grant_calls` encodes its argument.
    region_reset_script = "regions/region_reset", with_shared_parts;
    /// Returns the script that keeps the list of resets; `regions::resets` encodes its argument and decodes its reply.
    global_resets_script = "regions/global_resets", with_shared_parts;
    /// Returns the script that grants hits of a window to regions; `regions::grant_calls` encodes its argument and
    /// decodes its reply.
    global_window_script = "regions/global_window", with_shared_parts;
    /// Returns the script that divides a token bucket over regions; `regions::grant_calls` encodes its argument and
    /// decodes its reply.
    global_bucket_script = "regions/global_bucket", with_shared_parts;
    /// Returns the script that keeps the identity of a region's Redis; `regions::registry` encodes its argument and
    /// decodes its reply.
    region_identity_script = "regions/region_identity", with_shared_parts;
    /// Returns the script that keeps the registry of regions; `regions::registry` encodes its argument and decodes its
    /// reply.
    global_members_script = "regions/global_members", with_shared_parts;
    /// Returns the script that the health check of the global Redis runs.
    global_probe_script = "regions/global_probe", with_shared_parts;
    /// Returns the script that charges and refunds a counter in the key format of envoyproxy/ratelimit.
    window_charges_script = "window_charges", without_parts;
}

/// Returns a text that refers to no part, without its comments.
fn without_parts(text: &str) -> String {
    expand(text, &LuaParts::new())
}

fn with_region_bucket_parts(text: &str) -> String {
    with_parts_of(Counting::RegionBucket, text)
}

/// Returns a text with the parts that any algorithm may use.
fn with_shared_parts(text: &str) -> String {
    expand(text, &shared_parts())
}

fn single_counter(counting: Counting) -> Script {
    let merged = Script::new(with_parts_of(counting, include_str!("lua/merged.lua")));
    Script { merged: Some(Box::new(merged)), ..Script::new(with_parts_of(counting, include_str!("lua/driver.lua"))) }
}

/// Returns a text with the parts of a counting and its helper functions.
fn with_parts_of(counting: Counting, text: &str) -> String {
    let helpers = helpers(&[counting].into_iter());
    let mut parts = parts_of(counting);
    parts.insert("helpers", &helpers);
    expand(text, &parts)
}

fn several_counters(countings: impl Iterator<Item = Counting> + Clone) -> String {
    let helpers = helpers(&countings);
    let constructors: String = countings
        .map(|counting| {
            let constructor = expand(include_str!("lua/counter.lua"), &parts_of(counting));
            format!("constructors[{}] = {constructor}", counting.properties().wire_id)
        })
        .collect();
    let mut parts = shared_parts();
    parts.extend([("helpers", helpers.as_str()), ("constructors", &constructors)]);
    expand(include_str!("lua/together.lua"), &parts)
}

/// Returns the helper functions that these countings call.
fn helpers(countings: &(impl Iterator<Item = Counting> + Clone)) -> String {
    let shared = shared_parts();
    let is_used = |name: &&str| countings.clone().any(|counting| counting.properties().lua_helpers.contains(name));
    HELPERS.into_iter().filter(is_used).map(|name| shared[name]).collect()
}

fn shared_parts() -> LuaParts<'static> {
    SHARED_FILES.iter().flat_map(|file| split(file)).collect()
}

/// Returns the parts of a counting's file and the shared parts that it does not replace.
fn parts_of(counting: Counting) -> LuaParts<'static> {
    let mut parts = shared_parts();
    // Optional: only a log reads more before it writes.
    parts.insert("plan", "");
    parts.extend(split(lua_file(counting)));
    parts
}

/// Splits a file into its named parts; the text before the first part is the header.
fn split(file: &str) -> impl Iterator<Item = (&str, &str)> {
    file.split("\n--: ").skip(1).filter_map(|part| part.split_once('\n'))
}

/// Replaces the references in a text by their parts, and removes comments.
fn expand(text: &str, parts: &LuaParts<'_>) -> String {
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
