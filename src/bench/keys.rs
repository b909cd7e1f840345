//! Which keys requests are for.

use std::fmt;
use std::str::FromStr;

use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Zipf};

/// A key space. Keys are numbers from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keys {
    /// One key, the hottest there can be.
    One,
    /// So many, each as likely as another.
    Uniform(u64),
    /// So many, of which the n-th is met in proportion to n to the power of minus the exponent: as names, addresses and
    /// URLs are.
    Zipf {
        /// How many.
        count: u64,
        /// From 0 (uniform) to 10.
        exponent: f64,
    },
}

/// The most keys: what a float counts exactly.
const MOST_KEYS: u64 = 1 << 53;
/// The exponent of words in texts and, near enough, of pages in a server's log.
const USUAL_EXPONENT: f64 = 1.0;

impl Keys {
    /// What draws keys.
    pub fn sampler(self) -> Sampler {
        match self {
            Self::One => Sampler::One,
            Self::Uniform(count) => Sampler::Uniform(count),
            Self::Zipf { count, exponent } => match Zipf::new(count as f64, exponent) {
                Ok(zipf) => Sampler::Zipf(zipf),
                // Nothing that was read from text comes here.
                Err(_) => Sampler::One,
            },
        }
    }
}

/// Draws keys.
#[derive(Clone, Copy, Debug)]
pub enum Sampler {
    /// Always 0.
    One,
    /// Below this number.
    Uniform(u64),
    /// By rank.
    Zipf(Zipf<f64>),
}

impl Sampler {
    /// The key of the next request.
    pub fn draw(&self, random: &mut SmallRng) -> u64 {
        match self {
            Self::One => 0,
            Self::Uniform(count) => random.random_range(0..*count),
            // Ranks begin at 1 and are whole numbers.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank, from 1 to the count")]
            Self::Zipf(zipf) => (zipf.sample(random) as u64).saturating_sub(1),
        }
    }
}

/// `one`, `uniform:COUNT`, `zipf:COUNT` or `zipf:COUNT:EXPONENT`.
impl FromStr for Keys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write one, uniform:COUNT or zipf:COUNT:EXPONENT, such as zipf:1000000:1.1".to_owned();
        let count = |text: &str| match text.replace('_', "").parse() {
            Ok(count @ 1..=MOST_KEYS) => Ok(count),
            _ => Err(format!("`{text}` is no number of keys; write 1 to {MOST_KEYS}")),
        };
        let parts: Vec<&str> = text.split(':').collect();
        Ok(match parts[..] {
            ["one"] => Self::One,
            ["uniform", number] => Self::Uniform(count(number)?),
            ["zipf", number] => Self::Zipf { count: count(number)?, exponent: USUAL_EXPONENT },
            ["zipf", number, exponent] => match exponent.parse() {
                Ok(exponent @ 0.0..=10.0) => Self::Zipf { count: count(number)?, exponent },
                _ => return Err(format!("`{exponent}` is no exponent; write 0 to 10, such as 1.1")),
            },
            _ => return Err(wrong()),
        })
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One => f.write_str("one"),
            Self::Uniform(count) => write!(f, "uniform:{count}"),
            Self::Zipf { count, exponent } => write!(f, "zipf:{count}:{exponent}"),
        }
    }
}
