//! Enums whose variants have a word each, in rule files, settings, logs and metrics.

/// Declares an enum with the word of each variant, and further words that are accepted for it.
///
/// ```text
/// named_enum! {
///     /// Severity of a log line.
///     #[derive(Clone, Copy, Debug, PartialEq, Eq)]
///     pub enum Level {
///         /// Errors.
///         Error = "error",
///         /// Warnings.
///         Warn = "warn" | "warning",
///     }
/// }
/// ```
///
/// The enum must be `Copy`. It gets `ALL` and `NAMES` in the order of the variants, `ACCEPTED_WORDS` with the further
/// words too, `name()`, and `from_name()`, which compares exactly.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident {
            $($(#[$variant_attribute:meta])* $variant:ident = $word:literal $(| $other:literal)*,)+
        }
    ) => {
        $(#[$attribute])*
        $visibility enum $name {
            $($(#[$variant_attribute])* $variant,)+
        }

        #[allow(dead_code, reason = "an enum may need only some of them")]
        impl $name {
            /// All values, in the order of their declaration.
            $visibility const ALL: [Self; Self::NAMES.len()] = [$(Self::$variant),+];

            /// Words of all values, in the same order.
            $visibility const NAMES: &'static [&'static str] = &[$($word),+];

            /// All words that are accepted, each with its value; the first word of a value is its name.
            $visibility const ACCEPTED_WORDS: &'static [(&'static str, Self)] =
                &[$(($word, Self::$variant), $(($other, Self::$variant),)*)+];

            /// Word of the value.
            $visibility const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }

            /// Returns the value of a word.
            $visibility fn from_name(name: &str) -> Option<Self> {
                Self::ACCEPTED_WORDS.iter().find(|(word, _)| *word == name).map(|(_, value)| *value)
            }
        }
    };
}
pub use named_enum;

/// Implements serde's traits by `name()` and `from_name()`.
#[macro_export]
macro_rules! serialize_by_name {
    ($($type:ty),* $(,)?) => {$(
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                Self::from_name(&name)
                    .ok_or_else(|| serde::de::Error::custom(format_args!("unknown name '{name}'")))
            }
        }
    )*};
}
pub use serialize_by_name;
