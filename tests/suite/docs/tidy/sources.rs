//! The Rust files of the repository, parsed, with the module that each defines.

use std::collections::BTreeMap;

use super::{CRATE_ROOTS, Text, texts};

/// A Rust file.
pub(super) struct Source {
    /// Path from the root of the repository.
    pub(super) name: String,
    pub(super) syntax: syn::File,
}

/// All Rust files below `directory`, by name, without what cargo built there.
pub(super) fn sources(directory: &str) -> Vec<Source> {
    texts(directory, ".rs").into_iter().filter(|text| !text.name.contains("/target/")).map(parse).collect()
}

fn parse(text: Text) -> Source {
    let syntax = syn::parse_file(&text.content).unwrap_or_else(|error| panic!("{}: {error}", text.name));
    Source { name: text.name, syntax }
}

/// Whether an item is compiled for tests only.
pub(super) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

/// Path of the module that a file in `src` defines: `store::redis` for `src/store/redis.rs`, empty for the roots of crates.
pub(super) fn module_path(name: &str) -> Vec<String> {
    if is_root(name) {
        return Vec::new();
    }
    let path = name.strip_prefix("src/").unwrap_or(name).trim_end_matches(".rs");
    path.split('/').map(str::to_owned).collect()
}

/// Whether a file is the root of a crate, or of the program.
fn is_root(name: &str) -> bool {
    name == "src/main.rs" || CRATE_ROOTS.contains(&name)
}

/// The files in `src`, each by its module path joined with `::`; of the roots only `lib.rs`.
pub(super) fn modules() -> BTreeMap<String, Source> {
    sources("src")
        .into_iter()
        .filter(|source| source.name == "src/lib.rs" || !is_root(&source.name))
        .map(|source| (module_path(&source.name).join("::"), source))
        .collect()
}
