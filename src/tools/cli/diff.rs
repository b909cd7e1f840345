//! `diff`: which limits differ between two sets of rule files.

use std::path::PathBuf;

use serde_json::json;

use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use super::rule_files::{CheckedRules, build_compile_options, read_settings_or_defaults};
use crate::rules::diagnostic::Diagnostics;
use crate::rules::rule::changes::{LimitList, RuleChanges};

pub(super) const HELP: &str = "\
Both are read as `serve` reads them; settings that change the meaning of rules come from the environment. A limit is \
known by its name in metrics. At most 100 limits are listed, and all are counted. A running server lists what its last \
load changed in /rlconfig/status and in its log.

Try it:
  tollkeeper diff config/example.yaml config/example.yaml

Exit codes: 0 compared, 1 rules have errors or the output could not be written.";

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Rule file or directory
    old: PathBuf,
    /// Rule file or directory to compare it with
    new: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the limits that differ.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let (Some(old), Some(new)) = (read_limits(&args.old), read_limits(&args.new)) else {
        return CommandOutcome::Failure;
    };
    let changes = RuleChanges::between(&old, &new);
    let text = if args.json {
        format!("{:#}\n", json!(changes))
    } else {
        let lines = changes.limits.iter().map(|limit| format!("{limit}\n"));
        lines.chain([format!("{}\n", changes.format_counts())]).collect()
    };
    fail_if_unwritten(print_to_stdout(text), CommandOutcome::Success)
}

/// Reads the limits of a file or directory; prints its problems if it has errors.
fn read_limits(path: &PathBuf) -> Option<LimitList> {
    let mut diagnostics = Diagnostics::default();
    let options = build_compile_options(&read_settings_or_defaults(), None, &mut diagnostics);
    let rules = CheckedRules::read_and_compile(std::slice::from_ref(path), &options, diagnostics);
    match &rules.set {
        Some(set) => Some(LimitList::of_rules(set)),
        None => {
            print_error(rules.format_problems().trim_end());
            None
        }
    }
}
