//! What the limits did, told to the people who set them: which keys they refuse, and whether they are the right ones.
//!
//! Everything here is worked out when somebody asks, from what was counted anyway. Each report is data that goes out as
//! JSON, and has one form as text, which the debug listener and the command line share.

pub mod rules;
pub mod text;
pub mod top;

use serde::{Deserialize, Serialize};

/// How a report is written.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// For programs.
    #[default]
    Json,
    /// For people.
    Text,
}
