//! `schema`: prints the JSON Schema of rule files, for editors.

use super::outcome::CommandOutcome;
use super::print::{finish, print};
use crate::config::schema;

pub(super) const HELP: &str = "\
The schema matches this version. For an editor with a YAML language server, store it beside the rules and begin each \
rule file with a line that names it:

  tollkeeper schema > rules.schema.json
  # yaml-language-server: $schema=rules.schema.json

Files named *.schema.json are not loaded as rules. The schema covers keys and types; `tollkeeper check` also finds \
contradictions between them.

Exit codes: 0 printed, 1 the output could not be written.";

/// Prints the schema.
pub(super) fn run() -> CommandOutcome {
    finish(print(format_args!("{:#}\n", schema::json_schema())), CommandOutcome::Success)
}
