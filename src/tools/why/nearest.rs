//! Descriptors of the logs that are most like one that they do not have.

use std::collections::HashSet;

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
        Self { asked: shortened(asked), compared: HashSet::new(), nearest: Vec::new() }
    }

    /// True after 10 000 different descriptors: no more are compared.
    pub(super) fn is_full(&self) -> bool {
        self.compared.len() == MAX_COMPARED
    }

    /// Adds a descriptor; forgets it if others are nearer.
    pub(super) fn add(&mut self, text: &str) {
        let text = shortened(text);
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

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
