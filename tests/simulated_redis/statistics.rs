//! Counts of what happened, so that a simulation can tell what it covered.

use std::collections::BTreeMap;

/// Counts since a server was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Commands by name, those of scripts included.
    pub commands: BTreeMap<&'static str, u64>,
    /// Error replies by their first word, such as `NOSCRIPT`, `MOVED` or `OOM`.
    pub errors: BTreeMap<String, u64>,
    /// Keys that a simulation evicted.
    pub evicted_keys: u64,
}

impl Statistics {
    /// Counts a command.
    pub(crate) fn count_command(&mut self, name: &'static str) {
        *self.commands.entry(name).or_default() += 1;
    }

    /// Counts an error reply.
    pub(crate) fn count_error(&mut self, text: &str) {
        let code = text.split(' ').next().unwrap_or_default();
        match self.errors.get_mut(code) {
            Some(count) => *count += 1,
            None => drop(self.errors.insert(code.to_owned(), 1)),
        }
    }

    /// Number of error replies with this first word.
    pub fn errors_with_code(&self, code: &str) -> u64 {
        self.errors.get(code).copied().unwrap_or_default()
    }
}
