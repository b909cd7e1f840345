//! Texts of counters: distinct for distinct paths, bounded, hashed where values are secret.

use std::collections::HashMap;

use tollkeeper::decide::key_text::key_text;
use tollkeeper::decide::log::value_form::ValueForm;
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::request::Entry;
use tollkeeper::telemetry::top_keys::MAX_KEY_TEXT_BYTES;

fn text(entries: &[(&[u8], &[u8])], form: &ValueForm) -> String {
    let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
    key_text(&CounterPath { domain: "d", entries: &entries, shared: &[], candidate: None }, form).to_string()
}

#[test]
fn different_paths_have_different_texts() {
    let long = |last: u8| [vec![b'a'; 300], vec![last]].concat();
    let (long_a, long_b) = (long(b'a'), long(b'b'));
    let escapes = b",".repeat(200);
    let mut texts: HashMap<String, usize> = HashMap::new();
    let paths: [&[(&[u8], &[u8])]; 16] = [
        &[(b"a", b"b"), (b"c", b"d")],
        &[(b"a", b"b,c=d")],
        &[(b"a", b"b\\,c\\=d")],
        &[(b"a,c", b"b=d")],
        &[(b"a=b", b"c")],
        &[(b"a", b"b=c")],
        &[(b"a\\", b"b")],
        &[(b"a", b"\\b")],
        &[(b"a", b"\xff")],
        &[(b"a", b"\xfe")],
        &[(b"a", "\u{fffd}".as_bytes())],
        &[(b"a", &long_a)],
        &[(b"a", &long_b)],
        &[(b"a", &long_a[..300])],
        &[(b"a", &escapes), (b"b", b"1")],
        &[(b"a", &escapes), (b"b", b"2")],
    ];
    for (index, path) in paths.iter().enumerate() {
        let text = text(path, &ValueForm::Plain);
        assert!(text.len() <= MAX_KEY_TEXT_BYTES + 18, "{text}");
        assert_eq!(texts.insert(text.clone(), index), None, "{text}");
    }
    let copied = text(&[(b"a", &long_a)], &ValueForm::Plain);
    let (entry, hash) = copied.rsplit_once(",#").unwrap();
    assert!(hash.len() == 16 && !hash.contains('='), "{copied}");
    let forged = format!("{},#{hash}", entry.strip_prefix("a=").unwrap());
    assert_ne!(text(&[(b"a", forged.as_bytes())], &ValueForm::Plain), copied, "a value that looks like the end");
}

#[test]
fn hashed_text_has_no_value() {
    let form = ValueForm::hashed_with("a secret of the fleet");
    let (ann, bob) = (text(&[(b"user", b"ann")], &form), text(&[(b"user", b"bob")], &form));
    assert!(ann.starts_with("user=") && ann.len() == "user=".len() + 32 && ann != bob, "{ann} {bob}");
    assert_eq!(ann, text(&[(b"user", b"ann")], &ValueForm::hashed_with("a secret of the fleet")));
    assert_eq!(text(&[(b"user", b"ann")], &ValueForm::Omitted), "user");
}
