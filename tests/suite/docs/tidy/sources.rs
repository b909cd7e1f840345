//! The Rust files of the repository, parsed, with the module that each defines.

use std::collections::BTreeMap;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::{Text, texts};

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

/// First line of a syntax node, from 1.
pub(super) fn line(node: &impl Spanned) -> usize {
    node.span().start().line
}

/// Number of lines that a syntax node spans.
pub(super) fn lines(node: &impl Spanned) -> usize {
    node.span().end().line - node.span().start().line + 1
}

/// Whether an item is compiled for tests only.
pub(super) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

/// Path of the module that a file in `src` defines: `store::redis` for `src/store/redis.rs`, empty for `src/lib.rs`.
pub(super) fn module_path(name: &str) -> Vec<String> {
    let path = name.strip_prefix("src/").unwrap_or(name).trim_end_matches(".rs");
    match path {
        "lib" | "main" => Vec::new(),
        _ => path.split('/').map(str::to_owned).collect(),
    }
}

/// The files in `src`, each by its module path joined with `::`, without `main.rs`.
pub(super) fn modules() -> BTreeMap<String, Source> {
    sources("src")
        .into_iter()
        .filter(|source| source.name != "src/main.rs")
        .map(|source| (module_path(&source.name).join("::"), source))
        .collect()
}

/// Calls `check` with each function, method and trait method, with its name and its number of lines.
pub(super) fn each_function(file: &syn::File, check: &mut dyn FnMut(&syn::Signature, usize)) {
    struct Functions<'c>(&'c mut dyn FnMut(&syn::Signature, usize));
    impl<'ast> Visit<'ast> for Functions<'_> {
        fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
            (self.0)(&item.sig, body_lines(&item.sig, &item.block));
            visit::visit_item_fn(self, item);
        }
        fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
            (self.0)(&item.sig, body_lines(&item.sig, &item.block));
            visit::visit_impl_item_fn(self, item);
        }
        fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
            (self.0)(&item.sig, lines(item));
            visit::visit_trait_item_fn(self, item);
        }
    }
    Functions(check).visit_file(file);
}

/// Lines of a function from its signature to its closing brace, without its comments above.
fn body_lines(signature: &syn::Signature, block: &syn::Block) -> usize {
    block.span().end().line - signature.span().start().line + 1
}
