//! Descriptors of the logs that are most like one that they do not have.

use std::collections::HashSet;

use crate::base::text::first_chars;

/// Number of descriptors that are told.
const MAX_TOLD: usize = 5;
/// Number of different descriptors that are compared.
const MAX_COMPARED: usize = 10_000;
/// Number of characters that are compared.
const MAX_CHARS: usize = 200;

/// Descriptors most like the asked one.
#[derive(Debug)]
pub(super) struct NearestDescriptors {
    asked: String,
    compared: HashSet<String>,
    /// Best first.
    nearest: Vec<LikeDescriptor>,
}

#[derive(Debug)]
struct LikeDescriptor {
    text: String,
    likeness: f64,
}

impl NearestDescriptors {
    /// Creates an empty list for the text of a descriptor.
    pub(super) fn new(asked: &str) -> Self {
        Self { asked: cut(asked), compared: HashSet::new(), nearest: Vec::new() }
    }

    /// True after 10 000 different descriptors: no more are compared.
    pub(super) fn is_full(&self) -> bool {
        self.compared.len() == MAX_COMPARED
    }

    /// Adds a descriptor; forgets it if others are nearer.
    pub(super) fn add(&mut self, text: &str) {
        let text = cut(text);
        if self.is_full() || self.compared.contains(&text) {
            return;
        }
        let likeness = strsim::jaro_winkler(&self.asked, &text);
        let position = self.nearest.partition_point(|other| other.likeness >= likeness);
        if position < MAX_TOLD {
            self.nearest.insert(position, LikeDescriptor { text: text.clone(), likeness });
            self.nearest.truncate(MAX_TOLD);
        }
        self.compared.insert(text);
    }

    /// The nearest descriptors, best first.
    pub(super) fn texts(&self) -> Vec<String> {
        self.nearest.iter().map(|near| near.text.clone()).collect()
    }
}

/// Cuts a text; whoever prints it escapes it.
fn cut(text: &str) -> String {
    first_chars(text, MAX_CHARS).map_or_else(|| text.to_owned(), |start| format!("{start}..."))
}
