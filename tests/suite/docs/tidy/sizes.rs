//! Functions and files are short, and parameters have names.

use super::sources::{each_function, line, sources};
use super::{assert_none, texts};

/// Lines of a function, from its signature to its closing brace.
const MAX_FUNCTION_LINES: usize = 60;
/// Lines of a file in `src`, its tests included.
const MAX_FILE_LINES: usize = 700;

#[test]
fn functions_are_short_and_no_parameter_is_a_tuple() {
    let (mut too_long, mut with_tuple) = (Vec::new(), Vec::new());
    for source in sources("src") {
        each_function(&source.syntax, &mut |signature, lines| {
            if lines > MAX_FUNCTION_LINES {
                too_long.push(format!("{}:{}: {} has {lines} lines", source.name, line(signature), signature.ident));
            }
            let typed = signature.inputs.iter().filter_map(|input| match input {
                syn::FnArg::Typed(typed) => Some(&typed.ty),
                syn::FnArg::Receiver(_) => None,
            });
            // A conversion from a tuple has no choice: its trait says what it takes.
            if signature.ident != "from" && typed.into_iter().any(|kind| is_tuple(kind)) {
                with_tuple.push(format!("{}:{}: {}", source.name, line(signature), signature.ident));
            }
        });
    }
    assert_none("functions that are too long", &too_long);
    assert_none("functions with a tuple as parameter: name a struct", &with_tuple);
}

#[test]
fn files_are_short() {
    let too_long = |lines: usize| lines > MAX_FILE_LINES;
    let counted = texts("src", ".rs").into_iter().map(|text| (text.content.lines().count(), text.name));
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
