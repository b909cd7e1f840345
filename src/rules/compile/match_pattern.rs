//! Compiles the `match` of a descriptor.
//!
//! Decides: refusal of an empty list, a bad network or a bad expression in `match`.

use std::sync::Arc;

use super::options::CompileOptions;
use super::value_set_files::{SetFileText, parse_network};
use crate::rules::diagnostic::{Diagnostic, escape_for_message};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::matching::{MatchSpec, OperatorSpec, SetSpec};
use crate::rules::rule::expression::check_expression;
use crate::rules::rule::network::Network;
use crate::rules::rule::value_pattern::{MatchPattern, Operator, SetFile};
use crate::rules::yaml::{Position, Spanned};

/// Compiles a `match`. One that cannot be used is reported, and replaced by a pattern that equals no other.
pub(super) fn compile_match(
    reader: &mut DocumentReader<'_>,
    written: Spanned<Option<MatchSpec>>,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
) -> Arc<MatchPattern> {
    let Spanned { value: spec, at } = written;
    let compiled = spec.and_then(|MatchSpec { operator, negated }| {
        let outer = if negated { field_path.with_key("not") } else { *field_path };
        let operator = match operator {
            OperatorSpec::In(set) => compile_values(reader, set, options, &outer.with_key("in")),
            OperatorSpec::Cidr(set) => compile_networks(reader, set, options, &outer.with_key("cidr")),
            OperatorSpec::Regex(expression) => compile_expression(reader, expression, &outer.with_key("regex")),
        };
        Some(MatchPattern::new(operator?, negated))
    });
    let placeholder = || MatchPattern::new(Operator::Regex(format!("{}:{}", at.line, at.column).into()), true);
    Arc::new(compiled.unwrap_or_else(placeholder))
}

fn compile_values(
    reader: &mut DocumentReader<'_>,
    set: SetSpec,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
) -> Option<Operator> {
    match set {
        SetSpec::List(list) => {
            let list = require_elements(reader, list, field_path)?;
            let mut values: Vec<Box<str>> = list.into_iter().map(|value| value.value.into()).collect();
            values.sort_unstable();
            values.dedup();
            Some(Operator::In(values.into()))
        }
        SetSpec::File(name) => {
            let parse = |path: &Arc<str>, bytes: &[u8]| options.set_cache.parse_values(path, bytes);
            Some(Operator::InFile(compile_set_file(reader, &name, options, field_path, parse)?))
        }
    }
}

fn compile_networks(
    reader: &mut DocumentReader<'_>,
    set: SetSpec,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
) -> Option<Operator> {
    match set {
        SetSpec::List(list) => {
            let list = require_elements(reader, list, field_path)?;
            let count = list.len();
            let mut networks: Vec<Network> = Vec::with_capacity(count);
            for (index, Spanned { value, at }) in list.into_iter().enumerate() {
                match parse_network(&value) {
                    Ok(network) => networks.push(network),
                    Err((message, hint)) => reader.report_error(at, &field_path.with_index(index), message, hint),
                }
            }
            let is_whole = networks.len() == count;
            networks.sort_unstable();
            networks.dedup();
            is_whole.then(|| Operator::Cidr(networks.into()))
        }
        SetSpec::File(name) => {
            let parse = |path: &Arc<str>, bytes: &[u8]| options.set_cache.parse_networks(path, bytes);
            Some(Operator::CidrFile(compile_set_file(reader, &name, options, field_path, parse)?))
        }
    }
}

fn compile_expression(
    reader: &mut DocumentReader<'_>,
    expression: Spanned<String>,
    field_path: &FieldPath<'_>,
) -> Option<Operator> {
    match check_expression(&expression.value) {
        Ok(()) => Some(Operator::Regex(expression.value.into())),
        Err(reason) => {
            let message = format!("`{}` cannot be used: {reason}", escape_for_message(&expression.value));
            let hint = match reason.contains("Unicode not allowed") {
                true => "it matches bytes: write (?u:[...]) for a class of characters",
                false => "mend or simplify it; lists and wildcards may do as well",
            };
            reader.report_error(expression.at, field_path, message, hint);
            None
        }
    }
}

fn require_elements(
    reader: &mut DocumentReader<'_>,
    list: Spanned<Vec<Spanned<String>>>,
    field_path: &FieldPath<'_>,
) -> Option<Vec<Spanned<String>>> {
    if list.value.is_empty() {
        reader.report_error(
            list.at,
            field_path,
            "an empty list matches nothing",
            "add an element, or leave the rule out",
        );
        return None;
    }
    Some(list.value)
}

/// Returns the file that the rule names, or reports why there is none.
fn find_set_file<'o>(
    reader: &mut DocumentReader<'_>,
    name: &Spanned<String>,
    options: &'o CompileOptions,
    field_path: &FieldPath<'_>,
) -> Option<&'o SetFileText> {
    let found = options.set_files.find(reader.file, &name.value);
    let problem = match found {
        Some(SetFileText { contents: Ok(_), .. }) => return found,
        Some(SetFileText { contents: Err(problem), .. }) => problem.as_str(),
        None => "only rules that are read from a file can name one",
    };
    let message = format!("the file `{}` cannot be read: {problem}", escape_for_message(&name.value));
    let hint = "name a .txt or .list file in or below the directory of the rule file, or write a list";
    reader.report_error(name.at, &field_path.with_key("file"), message, hint);
    None
}

/// Compiles the set of the file that the rule names; reports its bad lines, and where it is named. `parse` gets the
/// path and the contents.
fn compile_set_file<T>(
    reader: &mut DocumentReader<'_>,
    name: &Spanned<String>,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
    parse: impl FnOnce(&Arc<str>, &[u8]) -> Result<Arc<T>, Vec<Diagnostic>>,
) -> Option<SetFile<T>> {
    let file = find_set_file(reader, name, options, field_path)?;
    let bytes = file.contents.as_ref().ok()?;
    match parse(&file.path, bytes) {
        Ok(set) => Some(SetFile { name: Arc::clone(&file.name), set }),
        Err(problems) => {
            problems.into_iter().for_each(|problem| reader.found.push(problem));
            let Position { line, column } = name.at;
            let message = format!("the file `{}` has bad lines", escape_for_message(&name.value));
            reader.report_error(
                Position { line, column },
                &field_path.with_key("file"),
                message,
                "mend them; see above",
            );
            None
        }
    }
}
