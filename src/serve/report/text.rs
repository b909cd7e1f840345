//! Text of clients in reports, without control characters.

/// Escapes control characters and marks that change the text direction, so that `text` is safe on a terminal.
pub fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for character in text.chars() {
        let is_mark = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if character.is_control() || is_mark {
            plain.extend(character.escape_default());
        } else {
            plain.push(character);
        }
    }
    plain
}
