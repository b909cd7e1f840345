//! The table of countings: the state and the script that count a limit in one store.
//!
//! Each algorithm is a counting of the same name. A global limit is counted in the Redis of a region by another one,
//! which spends what the region was granted: see [`Limit::in_region`](crate::limit::Limit::in_region).

use super::{Algorithm, for_each_algorithm};

/// Applies a macro to all rows of the table.
///
/// A row is the variant, the module (also the name in keys of counters), the Lua file in `src/store/redis/lua/`, and
/// its [`CountingProperties`].
macro_rules! for_each_counting {
    ($callback:ident) => {
        $callback! {
            TokenBucket, token_bucket, "token_bucket.lua",
                CountingProperties { wire_id: 0, lua_helpers: &["divide"] };
            LeakyBucket, leaky_bucket, "leaky_bucket.lua",
                CountingProperties { wire_id: 1, lua_helpers: &["divide"] };
            FixedWindow, fixed_window, "fixed_window.lua",
                CountingProperties { wire_id: 2, lua_helpers: &[] };
            SlidingWindowLog, sliding_window_log, "sliding_window_log.lua",
                CountingProperties { wire_id: 3, lua_helpers: &["log"] };
            SlidingWindowCounter, sliding_window_counter, "sliding_window_counter.lua",
                CountingProperties { wire_id: 4, lua_helpers: &["divide"] };
            RegionWindow, region_window, "regions/region_window.lua",
                CountingProperties { wire_id: 5, lua_helpers: &[] };
            RegionBucket, region_bucket, "regions/region_bucket.lua",
                CountingProperties { wire_id: 6, lua_helpers: &["divide"] };
        }
    };
}
pub(crate) use for_each_counting;

/// Properties of a counting that scripts need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountingProperties {
    /// Number of the counting in script arguments. Part of the wire format: replicas of all versions must agree.
    pub wire_id: u8,
    /// Helper functions that the Lua file calls, by the names of their parts.
    pub lua_helpers: &'static [&'static str],
}

macro_rules! define_counting {
    ($($variant:ident, $name:ident, $lua_file:literal, $properties:expr;)*) => {
        /// State and script that count a limit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Counting {
            $(
                #[doc = concat!("Counts with the state of ", stringify!($name), ".")]
                $variant,
            )*
        }

        impl Counting {
            /// All countings.
            pub const ALL: [Self; [$(stringify!($name)),*].len()] = [$(Self::$variant),*];

            /// Name in keys of counters.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                }
            }

            /// Properties from the table.
            pub const fn properties(self) -> CountingProperties {
                match self {
                    $(Self::$variant => $properties,)*
                }
            }
        }
    };
}
for_each_counting!(define_counting);

macro_rules! define_conversion {
    ($($(#[$attribute:meta])* $variant:ident, $name:ident, $properties:expr;)*) => {
        impl From<Algorithm> for Counting {
            fn from(algorithm: Algorithm) -> Self {
                match algorithm {
                    $(Algorithm::$variant => Self::$variant,)*
                }
            }
        }
    };
}
for_each_algorithm!(define_conversion);

#[cfg(test)]
mod tests {
    use super::{Algorithm, Counting};

    #[test]
    fn wire_ids_of_released_versions_stay() {
        let released = [
            ("token_bucket", 0),
            ("leaky_bucket", 1),
            ("fixed_window", 2),
            ("sliding_window_log", 3),
            ("sliding_window_counter", 4),
        ];
        for (name, id) in released {
            let counting = Counting::ALL.into_iter().find(|counting| counting.name() == name).expect(name);
            assert_eq!(counting.properties().wire_id, id, "{name}");
        }
    }

    #[test]
    fn no_two_countings_share_a_wire_id() {
        let mut ids = Counting::ALL.map(|counting| counting.properties().wire_id);
        ids.sort_unstable();
        assert!(ids.is_sorted_by(|id, next| id < next), "{ids:?}");
    }

    #[test]
    fn counting_of_an_algorithm_has_its_name() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Counting::from(algorithm).name(), algorithm.name());
        }
    }
}
