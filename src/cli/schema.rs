//! `schema`: the JSON Schema of a rule file, for editors.

use super::Outcome;
use super::print::{ended, print};
use crate::config::schema;

pub(super) const HELP: &str = "\
The schema is that of this very version. For an editor with a YAML language server, keep it beside the rules and begin \
each rule file with a line that names it:

  tollkeeper schema > rules.schema.json
  # yaml-language-server: $schema=rules.schema.json

A file called *.schema.json is not read as rules when its directory is. The schema knows keys and types, not what they \
mean to each other: `tollkeeper check` has the last word.

Exit codes: 0 printed, 1 the output could not be written.";

/// Prints it.
pub(super) fn run() -> Outcome {
    ended(print(format_args!("{:#}\n", schema::json_schema())), Outcome::Done)
}
