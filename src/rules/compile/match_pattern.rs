//! Compiles the `match` of a descriptor.
//!
//! The expressions of a file, and those of all files, have a budget of work, so that an author who exceeds it does not
//! keep the rules of others from being loaded.
//!
//! Decides: refusal of an empty list, a bad network or a bad expression in `match`.
//! Decides: how much work the expressions of a file may take (`MAX_FILE_STEPS`).

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::options::CompileOptions;
use super::value_set_files::{SetContents, SetFileText, parse_network};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::matching::{MatchSpec, OperatorSpec, SetSpec};
use crate::rules::rule::expression::{ExpressionError, measure_expression};
use crate::rules::rule::network::Network;
use crate::rules::rule::value_pattern::{MatchPattern, Operator, SetFile};
use crate::rules::yaml::{Position, Spanned};

/// Maximum work of the expressions of one file, in steps: a few seconds.
const MAX_FILE_STEPS: u64 = 1 << 30;
/// Maximum work of the expressions of all files, in steps.
const MAX_LOAD_STEPS: u64 = 2 << 30;

/// Work of the expressions of a load. It is the same whether they were compiled before or not.
#[derive(Debug, Default)]
pub(super) struct ExpressionWork {
    steps: u64,
    /// Expressions that `steps` has, so that one that many rules share counts once.
    counted: HashSet<String>,
    files: HashMap<Arc<str>, FileWork>,
    /// Nothing more is compiled.
    ended: bool,
}

/// Work of the expressions that a file is the first to have.
#[derive(Debug)]
struct FileWork {
    steps: u64,
    /// The expression that took most, with its work.
    costliest: (Position, u64),
    exceeded: bool,
}

impl ExpressionWork {
    /// Compiles an expression within the budget of its file. `None`: nothing is to be said of it, because a problem of
    /// the budget is reported already.
    fn measure(
        &mut self,
        reader: &mut DocumentReader<'_>,
        Spanned { value: text, at }: &Spanned<String>,
        options: &CompileOptions,
    ) -> Option<Result<(), String>> {
        if self.ended {
            return None;
        }
        if options.progress.is_superseded() {
            self.ended = true;
            return Some(Err("newer rules are there".to_owned()));
        }
        let new = || FileWork { steps: 0, costliest: (*at, 0), exceeded: false };
        let file = self.files.entry(Arc::clone(reader.file)).or_insert_with(new);
        if file.exceeded {
            return None;
        }
        let (steps, usable) = match measure_expression(text) {
            Ok(steps) => (steps, Ok(())),
            Err(ExpressionError::Unusable { reason, steps }) => (steps, Err(reason)),
            Err(ExpressionError::TooCostly) => {
                // Others of this file would take as long to be found too costly.
                file.exceeded = true;
                let message = format!("`{}` takes too much work to compile", escape_for_message(text));
                report_costly_file(reader.found, reader.file, *at, message);
                return None;
            }
        };
        if !self.counted.insert(text.clone()) {
            return Some(usable);
        }
        file.steps += steps;
        self.steps += steps;
        if steps > file.costliest.1 {
            file.costliest = (*at, steps);
        }
        if file.steps > MAX_FILE_STEPS {
            file.exceeded = true;
            let message = "the expressions of this file take too much work to compile; this one takes most".to_owned();
            report_costly_file(reader.found, reader.file, file.costliest.0, message);
            return None;
        }
        if self.steps > MAX_LOAD_STEPS {
            self.ended = true;
            let most = self.files.iter().max_by_key(|(name, file)| (file.steps, *name))?;
            let message = "the expressions of all files take too much work to compile; those of this file take most";
            report_costly_file(reader.found, most.0, most.1.costliest.0, message.to_owned());
            return None;
        }
        Some(usable)
    }
}

fn report_costly_file(found: &mut Diagnostics, file: &Arc<str>, at: Position, message: String) {
    let Position { line, column } = at;
    let hint = "write a list or wildcards instead, or smaller numbers in `{}` and fewer `.*`";
    let (severity, file, path) = (Severity::Error, Arc::clone(file), String::new());
    found.push_costly(Diagnostic { severity, file, line, column, path, message, hint: Some(hint.to_owned()) });
}

/// Compiles a `match`. One that cannot be used is reported, and replaced by a pattern that equals no other.
pub(super) fn compile_match(
    reader: &mut DocumentReader<'_>,
    written: Spanned<Option<MatchSpec>>,
    options: &CompileOptions,
    work: &RefCell<ExpressionWork>,
    field_path: &FieldPath<'_>,
) -> Arc<MatchPattern> {
    let Spanned { value: spec, at } = written;
    let compiled = spec.and_then(|MatchSpec { operator, negated }| {
        let outer = if negated { field_path.with_key("not") } else { *field_path };
        let operator = match operator {
            OperatorSpec::In(set) => compile_values(reader, set, options, &outer.with_key("in")),
            OperatorSpec::Cidr(set) => compile_networks(reader, set, options, &outer.with_key("cidr")),
            OperatorSpec::Regex(expression) => {
                options.progress.set_step(format!("expression in {}:{}", reader.file, expression.at.line));
                let measured = work.borrow_mut().measure(reader, &expression, options);
                compile_expression(reader, expression, measured?, &outer.with_key("regex"))
            }
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
            let parse = |path: &Arc<str>, bytes: &SetContents| options.set_cache.parse_values(path, bytes);
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
            let parse = |path: &Arc<str>, bytes: &SetContents| options.set_cache.parse_networks(path, bytes);
            Some(Operator::CidrFile(compile_set_file(reader, &name, options, field_path, parse)?))
        }
    }
}

fn compile_expression(
    reader: &mut DocumentReader<'_>,
    expression: Spanned<String>,
    measured: Result<(), String>,
    field_path: &FieldPath<'_>,
) -> Option<Operator> {
    match measured {
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
    parse: impl FnOnce(&Arc<str>, &SetContents) -> Result<Arc<T>, Vec<Diagnostic>>,
) -> Option<SetFile<T>> {
    options.progress.set_step(format!("set in {}:{}", reader.file, name.at.line));
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
