//! `schema`: prints the JSON Schema of rule files, or of files of defaults, for editors.

use super::print::{CommandOutcome, fail_if_unwritten, print_to_stdout};
use crate::rules::schema;

pub(super) const HELP: &str = "\
The schema matches this version. For an editor with a YAML language server, store it beside the rules and begin each \
rule file with a line that names it:

  tollkeeper schema > rules.schema.json
  # yaml-language-server: $schema=rules.schema.json

--defaults prints the schema of another file: the one that TOLLKEEPER_RULE_DEFAULTS names.

Files named *.schema.json are not loaded as rules. A schema covers keys and types; `tollkeeper check` \
also finds contradictions between them.

Exit codes: 0 printed, 1 the output could not be written.";

/// Arguments of `schema`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print the schema of a file of defaults
    #[arg(long)]
    defaults: bool,
}

/// Prints the schema.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let schema = if args.defaults { schema::defaults_file_schema() } else { schema::rule_file_schema() };
    fail_if_unwritten(print_to_stdout(format_args!("{schema:#}\n")), CommandOutcome::Success)
}
