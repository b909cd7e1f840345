//! Key spaces: the keys that requests are for, and their distribution.

use std::fmt;
use std::str::FromStr;

use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Zipf};

/// A set of keys, which are numbers from 0, and how often each is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeySpace {
    /// A single key, the hottest possible.
    One,
    /// This many keys, all equally likely.
    Uniform(u64),
    /// A Zipf distribution: the n-th key has a frequency proportional to n to the power of minus the exponent, as
    /// names, addresses and URLs do.
    Zipf {
        /// Number of keys.
        count: u64,
        /// Exponent, from 0 (uniform) to 10.
        exponent: f64,
    },
}

/// Maximum number of keys: the integers that an `f64` represents exactly.
const MAX_KEYS: u64 = 1 << 53;
/// Default exponent: that of words in texts, and approximately of URLs in access logs.
const DEFAULT_ZIPF_EXPONENT: f64 = 1.0;

impl KeySpace {
    /// Returns a sampler of keys.
    pub fn build_sampler(self) -> KeySampler {
        match self {
            Self::One => KeySampler::One,
            Self::Uniform(count) => KeySampler::Uniform(count),
            Self::Zipf { count, exponent } => match Zipf::new(count as f64, exponent) {
                Ok(zipf) => KeySampler::Zipf(zipf),
                // Unreachable: parsing bounds the count and the exponent.
                Err(_) => KeySampler::One,
            },
        }
    }
}

/// Sampler of keys.
#[derive(Clone, Copy, Debug)]
pub enum KeySampler {
    /// Always 0.
    One,
    /// Uniform below this number.
    Uniform(u64),
    /// Zipf-distributed ranks.
    Zipf(Zipf<f64>),
}

impl KeySampler {
    /// Samples the key of the next request.
    pub fn sample_key(&self, random: &mut SmallRng) -> u64 {
        match self {
            Self::One => 0,
            Self::Uniform(count) => random.random_range(0..*count),
            // Ranks are whole numbers from 1.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank, from 1 to the count")]
            Self::Zipf(zipf) => (zipf.sample(random) as u64).saturating_sub(1),
        }
    }
}

/// `one`, `uniform:COUNT`, `zipf:COUNT` or `zipf:COUNT:EXPONENT`.
impl FromStr for KeySpace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write one, uniform:COUNT or zipf:COUNT:EXPONENT, such as zipf:1000000:1.1".to_owned();
        let count = |text: &str| match text.replace('_', "").parse() {
            Ok(count @ 1..=MAX_KEYS) => Ok(count),
            _ => Err(format!("`{text}` is not a number of keys; write 1 to {MAX_KEYS}")),
        };
        let parts: Vec<&str> = text.split(':').collect();
        Ok(match parts[..] {
            ["one"] => Self::One,
            ["uniform", number] => Self::Uniform(count(number)?),
            ["zipf", number] => Self::Zipf { count: count(number)?, exponent: DEFAULT_ZIPF_EXPONENT },
            ["zipf", number, exponent] => match exponent.parse() {
                Ok(exponent @ 0.0..=10.0) => Self::Zipf { count: count(number)?, exponent },
                _ => return Err(format!("`{exponent}` is not an exponent; write 0 to 10, such as 1.1")),
            },
            _ => return Err(wrong()),
        })
    }
}

impl fmt::Display for KeySpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One => f.write_str("one"),
            Self::Uniform(count) => write!(f, "uniform:{count}"),
            Self::Zipf { count, exponent } => write!(f, "zipf:{count}:{exponent}"),
        }
    }
}
