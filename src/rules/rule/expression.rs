//! Regular expressions, compiled so that a look-up takes one table access for each byte of the value.
//!
//! An expression matches whole values, as bytes: `.` is any byte, classes are of ASCII, and `(?u:...)` has classes of
//! characters. Many expressions become one automaton, so a thousand cost as much as ten. Automata can grow
//! exponentially, as those of many expressions with `.*` in front do: then the expressions are divided over several,
//! down to one for each. A single expression whose automaton is too large does not compile. There is no other engine
//! behind: the work of a look-up does not depend on what was looked up before, and values cannot make it slow.
//!
//! Decides: how `regex` matches; how large an expression may be.

use std::error::Error as _;

use regex_automata::dfa::{Automaton as _, StartKind, dense};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::{start, syntax};
use regex_automata::{Anchored, MatchKind};

/// Maximum length of an expression in bytes.
pub const MAX_EXPRESSION_BYTES: usize = 4096;

/// Maximum size of the automaton of one expression, in bytes.
const MAX_SINGLE_AUTOMATON_BYTES: usize = 256 << 10;
/// Maximum size of an automaton for each of its expressions, in bytes.
const MAX_AUTOMATON_BYTES_PER_EXPRESSION: usize = 16 << 10;

/// Largest number of automata of one level without a warning.
pub const MAX_AUTOMATA_WITHOUT_WARNING: usize = 8;

/// Expressions with an identifier each.
#[derive(Debug)]
pub struct Expressions<I> {
    automata: Vec<ExpressionAutomaton<I>>,
}

#[derive(Debug)]
struct ExpressionAutomaton<I> {
    automaton: dense::DFA<Vec<u32>>,
    /// Identifier of each of its expressions.
    ids: Vec<I>,
}

impl<I: Copy> Expressions<I> {
    /// Compiles expressions that [`check_expression`] accepts; leaves out others.
    pub fn new(expressions: &[(&str, I)]) -> Self {
        let mut automata = Vec::new();
        let mut waiting = vec![expressions];
        while let Some(group) = waiting.pop() {
            if group.is_empty() {
                continue;
            }
            let texts: Vec<&str> = group.iter().map(|(text, _)| *text).collect();
            match build_automaton(&texts) {
                Ok(automaton) => {
                    automata.push(ExpressionAutomaton { automaton, ids: group.iter().map(|(_, id)| *id).collect() });
                }
                Err(_) if group.len() == 1 => {}
                Err(_) => {
                    let (first, second) = group.split_at(group.len() / 2);
                    waiting.extend([second, first]);
                }
            }
        }
        Self { automata }
    }

    /// Number of automata that a look-up runs.
    pub const fn automata_count(&self) -> usize {
        self.automata.len()
    }

    /// Calls `each` with the identifier of each expression that matches the whole value.
    pub fn for_each_match(&self, value: &[u8], mut each: impl FnMut(I)) {
        for ExpressionAutomaton { automaton, ids } in &self.automata {
            let Ok(mut state) = automaton.start_state(&start::Config::new().anchored(Anchored::Yes)) else { continue };
            let mut is_dead = false;
            for byte in value {
                state = automaton.next_state(state, *byte);
                // A quit state follows a byte that a word boundary of Unicode cannot judge; building refuses those.
                if automaton.is_special_state(state)
                    && (automaton.is_dead_state(state) || automaton.is_quit_state(state))
                {
                    is_dead = true;
                    break;
                }
            }
            if is_dead {
                continue;
            }
            state = automaton.next_eoi_state(state);
            if automaton.is_match_state(state) {
                (0..automaton.match_len(state)).for_each(|at| each(ids[automaton.match_pattern(state, at).as_usize()]));
            }
        }
    }
}

/// Returns the reason why an expression cannot be used.
///
/// # Errors
/// The reason, in the words of the regex crate or as a size.
pub fn check_expression(text: &str) -> Result<(), String> {
    if text.len() > MAX_EXPRESSION_BYTES {
        return Err(format!("it has {} bytes; at most {MAX_EXPRESSION_BYTES} are allowed", text.len()));
    }
    build_automaton(&[text]).map(|_| ())
}

/// Returns `true` if the expression matches the whole value; compiles it anew, so use it only for reports.
pub fn compile_and_match_expression(text: &str, value: &[u8]) -> bool {
    let mut matches = false;
    Expressions::new(&[(text, ())]).for_each_match(value, |()| matches = true);
    matches
}

fn build_automaton(expressions: &[&str]) -> Result<dense::DFA<Vec<u32>>, String> {
    let max_bytes = MAX_SINGLE_AUTOMATON_BYTES.max(MAX_AUTOMATON_BYTES_PER_EXPRESSION * expressions.len());
    let nfa = thompson::Compiler::new()
        .syntax(syntax::Config::new().unicode(false).utf8(false).dot_matches_new_line(true))
        .configure(
            thompson::Config::new().utf8(false).nfa_size_limit(Some(max_bytes)).which_captures(WhichCaptures::None),
        )
        .build_many(expressions)
        .map_err(|error| match error.source().map(ToString::to_string) {
            Some(parsing) => describe_syntax_error(&parsing),
            None => format_too_large(max_bytes),
        })?;
    let config = dense::Config::new()
        .start_kind(StartKind::Anchored)
        // All expressions that match, not only the first.
        .match_kind(MatchKind::All)
        .accelerate(false)
        .dfa_size_limit(Some(max_bytes))
        .determinize_size_limit(Some(4 * max_bytes));
    dense::Builder::new().configure(config).build_from_nfa(&nfa).map_err(|error| match error.is_size_limit_exceeded() {
        true => format_too_large(max_bytes),
        false => error.source().map_or_else(|| error.to_string(), ToString::to_string),
    })
}

fn format_too_large(max_bytes: usize) -> String {
    format!("its automaton takes more than {} KiB", max_bytes >> 10)
}

/// Returns the last line of an error of the parser, which has the reason; the others show the place.
fn describe_syntax_error(text: &str) -> String {
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}
