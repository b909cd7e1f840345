//! The repository: its documentation, examples and order, and inputs that the fuzzers found.

mod cookbook;
mod specification;
mod calling;
mod example_rules;
mod doc_examples;
mod doc_links;
mod help_examples;
mod tidy;
mod fuzz_corpus;
