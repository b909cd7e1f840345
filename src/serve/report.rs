//! Reports for the people who set limits: the keys that are rejected most, and findings about the limits.
//!
//! A report is computed on demand from statistics that are kept anyway. It is data, encoded as JSON, with one text form
//! that the debug listener and the command line share. The reports here are about this process; the one about all
//! replicas is in `fleet/report`.

pub mod domain_names;
pub mod live;
pub mod history;
pub mod problems;
pub mod rules;
pub mod rule_text;
pub mod top;
pub mod what_if;
pub mod unmatched;

use serde::{Deserialize, Serialize};

/// Format of a report.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// JSON, for programs.
    #[default]
    Json,
    /// Tables, for people.
    Text,
}
