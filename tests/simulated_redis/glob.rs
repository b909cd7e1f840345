//! Patterns of MATCH and KEYS: `*`, `?`, `[...]` and `\`.

/// Returns true if the whole text matches the pattern.
pub(crate) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|start| matches(rest, &text[start..])),
        [b'?', rest @ ..] => !text.is_empty() && matches(rest, &text[1..]),
        [b'[', rest @ ..] => text.split_first().is_some_and(|(byte, text)| {
            let (is_in_class, rest) = match_class(rest, *byte);
            is_in_class && matches(rest, text)
        }),
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => {
            text.first() == Some(literal) && matches(rest, &text[1..])
        }
    }
}

/// Returns whether a byte is in the class at the start of `pattern`, and the pattern after the class.
fn match_class(pattern: &[u8], byte: u8) -> (bool, &[u8]) {
    let (is_negated, mut rest) = match pattern {
        [b'^', rest @ ..] => (true, rest),
        _ => (false, pattern),
    };
    let mut is_found = false;
    loop {
        let range;
        (range, rest) = match rest {
            [] | [b']', ..] => return (is_found != is_negated, rest.get(1..).unwrap_or_default()),
            [b'\\', literal, rest @ ..] => (*literal..=*literal, rest),
            [from, b'-', to, rest @ ..] => (*from.min(to)..=*from.max(to), rest),
            [literal, rest @ ..] => (*literal..=*literal, rest),
        };
        is_found |= range.contains(&byte);
    }
}
