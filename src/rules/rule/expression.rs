//! Regular expressions, compiled so that a look-up takes one table access for each byte of the value.
//!
//! An expression matches whole values, as bytes: `.` is any byte, classes are of ASCII, and `(?u:...)` has classes of
//! characters. Many expressions become one automaton, so a thousand cost as much as ten. Automata can grow
//! exponentially, as those of many expressions with `.*` in front do: then the expressions are divided over several,
//! down to one for each. A single expression whose automaton is too large does not compile. There is no other engine
//! behind: the work of a look-up does not depend on what was looked up before, and values cannot make it slow.
//!
//! The work of compiling is bounded too, in steps rather than in time, so that all replicas refuse the same rules. A
//! build ends when it has taken the steps it was allowed; an expression is tried with few, then with more. A group may
//! take twice what its expressions took one by one. What was compiled is kept while rules use it, so a reload compiles
//! only what is new.
//!
//! Decides: how `regex` matches; how large an expression may be, and how much work it may take to compile.

use std::collections::HashMap;
use std::error::Error as _;
use std::sync::{Arc, LazyLock, Mutex};

use regex_automata::dfa::{Automaton as _, StartKind, dense};
use regex_automata::nfa::thompson::{self, NFA, State, WhichCaptures};
use regex_automata::util::{start, syntax};
use regex_automata::{Anchored, MatchKind};

use crate::base::sharded::lock_ignoring_poison;

/// Maximum length of an expression in bytes.
pub const MAX_EXPRESSION_BYTES: usize = 4096;

/// Maximum size of the automaton of one expression, in bytes.
const MAX_SINGLE_AUTOMATON_BYTES: usize = 256 << 10;
/// Maximum size of an automaton for each of its expressions, in bytes.
const MAX_AUTOMATON_BYTES_PER_EXPRESSION: usize = 16 << 10;

/// Maximum work of compiling one expression, in steps: about 0.1 s.
pub const MAX_EXPRESSION_STEPS: u64 = 32 << 20;
/// Work with which an expression is tried first, and which a group may take beyond twice that of its expressions, in
/// steps.
const MIN_STEPS: u64 = 32 << 10;
/// Maximum work of an expression that is compiled together with others, in steps.
const MAX_STEPS_IN_GROUP: u64 = 4 << 20;
/// Maximum number of states visited to judge an expression.
const MAX_VISITED_STATES: u64 = 4 << 20;
/// Number of parts into which a group is divided if its automaton is too large.
const PARTS_OF_GROUP: usize = 8;

/// Largest number of automata of one level without a warning.
pub const MAX_AUTOMATA_WITHOUT_WARNING: usize = 8;
/// Maximum number of automata for one key of a level: with these a value of 60 kB, the longest that Envoy takes as a
/// header by default, takes about 10 ms.
pub const MAX_AUTOMATA_PER_KEY: usize = 256;

/// Expressions with an identifier each.
#[derive(Debug)]
pub struct Expressions<I> {
    automata: Vec<ExpressionAutomaton<I>>,
}

#[derive(Debug)]
struct ExpressionAutomaton<I> {
    automaton: Arc<Dfa>,
    /// Identifier of each of its expressions.
    ids: Vec<I>,
}

type Dfa = dense::DFA<Vec<u32>>;

impl<I: Copy> Expressions<I> {
    /// Compiles expressions that [`measure_expression`] accepts; leaves out others.
    pub fn new(expressions: &[(&str, I)]) -> Self {
        let usable = |(text, id): &(&str, I)| {
            let steps = measure_expression(text).ok()?;
            Some(MeasuredExpression { text: (*text).to_owned(), steps, id: *id })
        };
        let usable = expressions.iter().filter_map(usable);
        let (alone, together): (Vec<_>, Vec<_>) = usable.partition(|one| one.steps > MAX_STEPS_IN_GROUP);
        let mut automata = Vec::new();
        let mut waiting: Vec<&[MeasuredExpression<I>]> = alone.chunks(1).collect();
        waiting.push(&together);
        while let Some(group) = waiting.pop() {
            if group.is_empty() {
                continue;
            }
            match find_or_build_group(group) {
                Some(automaton) => {
                    automata.push(ExpressionAutomaton { automaton, ids: group.iter().map(|one| one.id).collect() });
                }
                None if group.len() == 1 => {}
                None => waiting.extend(group.chunks(group.len().div_ceil(PARTS_OF_GROUP)).rev()),
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

/// Reason why an expression cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// It is invalid, in the words of the regex crate, or too large.
    #[error("{reason}")]
    Unusable {
        /// The reason, for people.
        reason: String,
        /// Work of finding that out, in steps.
        steps: u64,
    },
    /// It takes more work than [`MAX_EXPRESSION_STEPS`].
    #[error("it takes too much work to compile")]
    TooCostly,
}

/// An expression with the work that it takes to compile.
struct MeasuredExpression<I> {
    text: String,
    steps: u64,
    id: I,
}

/// Compiles an expression, or finds that it was compiled before. Returns the work of that, in steps.
///
/// # Errors
/// The reason why it cannot be used.
pub fn measure_expression(text: &str) -> Result<u64, ExpressionError> {
    if text.len() > MAX_EXPRESSION_BYTES {
        let reason = format!("it has {} bytes; at most {MAX_EXPRESSION_BYTES} are allowed", text.len());
        return Err(ExpressionError::Unusable { reason, steps: MIN_STEPS });
    }
    if let Some(known) = lock_ignoring_poison(&COMPILED).measured.get(text) {
        return known.clone();
    }
    let measured = compile_with_growing_work(text);
    lock_ignoring_poison(&COMPILED).insert_measured(text, measured.clone());
    measured
}

/// Returns `true` if the expression matches the whole value; may compile it anew, so use it only for reports.
pub fn compile_and_match_expression(text: &str, value: &[u8]) -> bool {
    let mut matches = false;
    Expressions::new(&[(text, ())]).for_each_match(value, |()| matches = true);
    matches
}

fn compile_with_growing_work(text: &str) -> Result<u64, ExpressionError> {
    let mut steps = MIN_STEPS;
    let nfa =
        build_nfa(&[text], MAX_SINGLE_AUTOMATON_BYTES).map_err(|reason| ExpressionError::Unusable { reason, steps })?;
    let visits_per_state = measure_visits(&nfa).ok_or(ExpressionError::TooCostly)?;
    loop {
        match build_dfa(&nfa, BuildLimits { bytes: MAX_SINGLE_AUTOMATON_BYTES, steps, visits_per_state }) {
            Ok(automaton) => {
                if steps > MAX_STEPS_IN_GROUP {
                    lock_ignoring_poison(&COMPILED).insert_group(hash_texts([text]), Some(Arc::new(automaton)));
                }
                return Ok(steps);
            }
            Err(BuildFailure::TooManySteps) if steps < MAX_EXPRESSION_STEPS => steps *= 2,
            Err(BuildFailure::TooManySteps) => return Err(ExpressionError::TooCostly),
            Err(BuildFailure::Other(reason)) => return Err(ExpressionError::Unusable { reason, steps }),
        }
    }
}

/// Returns the automaton of a group that fits: one that was built before, or a new one.
fn find_or_build_group<I>(group: &[MeasuredExpression<I>]) -> Option<Arc<Dfa>> {
    let key = hash_texts(group.iter().map(|one| one.text.as_str()));
    if let Some(known) = lock_ignoring_poison(&COMPILED).groups.get(&key) {
        return known.clone();
    }
    let texts: Vec<&str> = group.iter().map(|one| one.text.as_str()).collect();
    let bytes = MAX_SINGLE_AUTOMATON_BYTES.max(MAX_AUTOMATON_BYTES_PER_EXPRESSION * texts.len());
    let alone = group.iter().map(|one| one.steps).sum::<u64>();
    // A single one takes what it took before.
    let steps = if group.len() == 1 { alone } else { 2 * alone + 16 * MIN_STEPS };
    let built = build_nfa(&texts, bytes).ok().and_then(|nfa| {
        let visits_per_state = measure_visits(&nfa)?;
        build_dfa(&nfa, BuildLimits { bytes, steps, visits_per_state }).ok().map(Arc::new)
    });
    lock_ignoring_poison(&COMPILED).insert_group(key, built.clone());
    built
}

fn hash_texts<'t>(texts: impl IntoIterator<Item = &'t str>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

static COMPILED: LazyLock<Mutex<CompiledExpressions>> = LazyLock::new(Mutex::default);

/// What was compiled in this process, with failures.
#[derive(Default)]
struct CompiledExpressions {
    /// Work of single expressions.
    measured: HashMap<Box<str>, Result<u64, ExpressionError>>,
    /// Automata by the hash of their expressions; `None`: too large.
    groups: HashMap<[u8; 32], Option<Arc<Dfa>>>,
    /// Size of the automata, in bytes.
    group_bytes: usize,
}

impl CompiledExpressions {
    /// Maximum number of expressions, and of groups, that are remembered; an automaton that rules use stays.
    const MAX_REMEMBERED: usize = 20_000;
    /// Maximum size of automata that no rule may be using, in bytes.
    const MAX_UNUSED_BYTES: usize = 32 << 20;

    fn insert_measured(&mut self, text: &str, measured: Result<u64, ExpressionError>) {
        if self.measured.len() >= Self::MAX_REMEMBERED {
            self.measured.clear();
        }
        self.measured.insert(text.into(), measured);
    }

    fn insert_group(&mut self, key: [u8; 32], built: Option<Arc<Dfa>>) {
        self.group_bytes += built.as_ref().map_or(0, |automaton| automaton.memory_usage());
        if self.group_bytes > Self::MAX_UNUSED_BYTES || self.groups.len() >= Self::MAX_REMEMBERED {
            self.groups.retain(|_, known| known.as_ref().is_some_and(|automaton| Arc::strong_count(automaton) > 1));
            // The bound is of what is built from here on.
            self.group_bytes = 0;
        }
        self.groups.insert(key, built);
    }
}

/// Compiles expressions to an automaton that is not deterministic: one pass over their texts.
fn build_nfa(expressions: &[&str], max_bytes: usize) -> Result<NFA, String> {
    thompson::Compiler::new()
        .syntax(syntax::Config::new().unicode(false).utf8(false).dot_matches_new_line(true))
        .configure(
            thompson::Config::new().utf8(false).nfa_size_limit(Some(max_bytes)).which_captures(WhichCaptures::None),
        )
        .build_many(expressions)
        .map_err(|error| match error.source().map(ToString::to_string) {
            Some(parsing) => describe_syntax_error(&parsing),
            None => format_too_large(max_bytes),
        })
}

/// Limits of a build.
#[derive(Clone, Copy)]
struct BuildLimits {
    bytes: usize,
    steps: u64,
    visits_per_state: u64,
}

enum BuildFailure {
    /// The steps did not suffice.
    TooManySteps,
    /// It cannot be built, or it is too large.
    Other(String),
}

/// Makes an automaton deterministic.
///
/// For each of its states, and each class of bytes, it follows all states that the given automaton may be in. The memory
/// for these sets times the classes, times what is visited on the way to one of them, is the bound of its steps.
fn build_dfa(nfa: &NFA, BuildLimits { bytes, steps, visits_per_state }: BuildLimits) -> Result<Dfa, BuildFailure> {
    let classes = nfa.byte_classes().alphabet_len() as u64;
    let set_bytes = usize::try_from(steps / classes / visits_per_state).unwrap_or(usize::MAX);
    let config = dense::Config::new()
        .start_kind(StartKind::Anchored)
        // All expressions that match, not only the first.
        .match_kind(MatchKind::All)
        .accelerate(false)
        .dfa_size_limit(Some(bytes))
        .determinize_size_limit(Some(set_bytes));
    dense::Builder::new().configure(config).build_from_nfa(nfa).map_err(|error| {
        let text = error.to_string();
        match error.is_size_limit_exceeded() {
            true if text.contains("determinization") => BuildFailure::TooManySteps,
            true => BuildFailure::Other(format_too_large(bytes)),
            false => BuildFailure::Other(error.source().map_or(text, ToString::to_string)),
        }
    })
}

/// Returns how many states are visited, at most, for each state that reads a byte; `None` if counting takes too long.
fn measure_visits(nfa: &NFA) -> Option<u64> {
    let states = nfa.states();
    let mut visited_by = vec![usize::MAX; states.len()];
    let (mut waiting, mut visited_in_all, mut most) = (Vec::new(), 0, 1);
    for (round, reader) in states.iter().enumerate() {
        match reader {
            State::ByteRange { trans } => waiting.push(trans.next),
            State::Sparse(sparse) => waiting.extend(sparse.transitions.iter().map(|trans| trans.next)),
            State::Dense(dense) => waiting.extend(dense.transitions.iter()),
            _ => continue,
        }
        let (mut visited, mut reading) = (0_u64, 0_u64);
        while let Some(id) = waiting.pop() {
            visited += 1;
            if std::mem::replace(&mut visited_by[id.as_usize()], round) == round {
                continue;
            }
            match &states[id.as_usize()] {
                State::Union { alternates } => waiting.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => waiting.extend([*alt1, *alt2]),
                State::Look { next, .. } | State::Capture { next, .. } => waiting.push(*next),
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) | State::Fail | State::Match { .. } => {
                    reading += 1;
                }
            }
        }
        visited_in_all += visited;
        most = most.max(visited.div_ceil(reading.max(1)));
        if visited_in_all > MAX_VISITED_STATES {
            return None;
        }
    }
    Some(most)
}

fn format_too_large(max_bytes: usize) -> String {
    format!("its automaton takes more than {} KiB", max_bytes >> 10)
}

/// Returns the last line of an error of the parser, which has the reason; the others show the place.
fn describe_syntax_error(text: &str) -> String {
    let last = text.lines().last().unwrap_or_default();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}
