//! Functions and files are short, parameters have names, and doc comments say what an item is.

use std::fmt::Write;

use syn::visit::{self, Visit};

use super::assert_none;
use super::sources::{each_function, line, sources};

/// Lines of a function, from its signature to its closing brace.
const MAX_FUNCTION_LINES: usize = 60;
/// Lines of a file in `src`, its tests included.
const MAX_FILE_LINES: usize = 400;
/// Share of doc comments that may open with a question word, in percent.
const MAX_QUESTION_PERCENT: usize = 5;

/// Words that open a doc comment which circles its subject instead of naming it.
const QUESTION_WORDS: &[&str] = &["What", "How", "Whether", "Where", "Who", "Whoever", "Why", "Which", "That", "When"];

#[test]
fn functions_are_short() {
    let mut found = Vec::new();
    for source in sources("src") {
        each_function(&source.syntax, &mut |signature, lines| {
            if lines > MAX_FUNCTION_LINES {
                found.push(format!("{}:{}: {} has {lines} lines", source.name, line(signature), signature.ident));
            }
        });
    }
    assert_none("functions that are too long", &found);
}

#[test]
fn files_are_short() {
    let too_long = |lines: usize| lines > MAX_FILE_LINES;
    let counted = sources("src").into_iter().map(|source| (source.text.lines().count(), source.name));
    let found: Vec<_> =
        counted.filter(|(lines, _)| too_long(*lines)).map(|(lines, name)| format!("{name}: {lines}")).collect();
    assert_none("files that are too long", &found);
}

fn is_tuple(kind: &syn::Type) -> bool {
    match kind {
        syn::Type::Tuple(tuple) => !tuple.elems.is_empty(),
        syn::Type::Reference(reference) => is_tuple(&reference.elem),
        syn::Type::Paren(inner) => is_tuple(&inner.elem),
        _ => false,
    }
}

#[test]
fn no_parameter_is_a_tuple() {
    let mut found = Vec::new();
    for source in sources("src") {
        each_function(&source.syntax, &mut |signature, _| {
            let typed = signature.inputs.iter().filter_map(|input| match input {
                syn::FnArg::Typed(typed) => Some(&typed.ty),
                syn::FnArg::Receiver(_) => None,
            });
            // A conversion from a tuple has no choice: its trait says what it takes.
            if signature.ident != "from" && typed.into_iter().any(|kind| is_tuple(kind)) {
                found.push(format!("{}:{}: {}", source.name, line(signature), signature.ident));
            }
        });
    }
    assert_none("functions with a tuple as parameter: name a struct", &found);
}

/// First lines of the doc comments of a file, each with its line number.
#[derive(Default)]
struct DocCollector(Vec<(usize, String)>);

impl<'ast> Visit<'ast> for DocCollector {
    fn visit_file(&mut self, file: &'ast syn::File) {
        self.add(&file.attrs);
        visit::visit_file(self, file);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.add(item_attributes(item));
        visit::visit_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.add(&field.attrs);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.add(&variant.attrs);
        visit::visit_variant(self, variant);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.attrs);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.add(&item.attrs);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.add(&item.attrs);
        visit::visit_trait_item_fn(self, item);
    }
}

impl DocCollector {
    fn add(&mut self, attributes: &[syn::Attribute]) {
        let first = attributes.iter().find(|attribute| attribute.path().is_ident("doc"));
        if let Some(syn::Meta::NameValue(doc)) = first.map(|attribute| &attribute.meta)
            && let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &doc.value
        {
            self.0.push((line(text), text.value().trim().to_owned()));
        }
    }
}

fn item_attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        _ => &[],
    }
}

fn opens_with_a_question_word(text: &str) -> bool {
    text.split_whitespace().next().is_some_and(|word| QUESTION_WORDS.contains(&word))
}

#[test]
fn doc_comments_open_with_a_noun_or_a_verb() {
    let mut all = 0;
    let mut found = String::new();
    let mut questions = 0;
    for source in ["src", "tests", "fuzz"].iter().flat_map(|directory| sources(directory)) {
        let mut docs = DocCollector::default();
        docs.visit_file(&source.syntax);
        all += docs.0.len();
        for (line, text) in docs.0.iter().filter(|(_, text)| opens_with_a_question_word(text)) {
            questions += 1;
            writeln!(found, "{}:{line}: {text}", source.name).unwrap();
        }
    }
    assert!(all > 1000, "only {all} doc comments were found");
    assert!(
        questions * 100 <= all * MAX_QUESTION_PERCENT,
        "{questions} of {all} doc comments open with a question word, more than {MAX_QUESTION_PERCENT} %:\n{found}"
    );
}
