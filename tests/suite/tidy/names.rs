//! Names are the field's words: no metaphor, no word of the private dialect that the code once had.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use super::assert_none;
use super::sources::{line, module_path, sources};

/// Words that no identifier may contain, in any case: `Door`, `open_door` and `DOOR_S` all contain `door`.
const BANNED_WORDS: &[&str] = &[
    "anew",
    "bell",
    "desk",
    "draw",
    "drawing",
    "drawn",
    "guest",
    "knock",
    "lull",
    "nobody",
    "occasion",
    "occasionally",
    "somebody",
    "spokesman",
    "stranger",
    "whoever",
];

/// Names that no type, trait or module may have: words that mean something else to an engineer of this field.
const BANNED_TYPES: &[&str] = &[
    "Alarm",
    "Anchor",
    "Ask",
    "Begins",
    "Begun",
    "Busy",
    "Care",
    "Chart",
    "Claimed",
    "Complaint",
    "Conversation",
    "Distinct",
    "Door",
    "Doors",
    "Edge",
    "Entrance",
    "Fate",
    "Fates",
    "Found",
    "Gate",
    "Gathered",
    "Goes",
    "Ground",
    "Heard",
    "Heart",
    "House",
    "Lead",
    "Lending",
    "Lent",
    "Line",
    "Looks",
    "Manner",
    "Material",
    "Misused",
    "Moment",
    "Named",
    "OfLimit",
    "OfRedis",
    "Once",
    "Over",
    "Pane",
    "Place",
    "Rung",
    "Scene",
    "Sentry",
    "Settle",
    "Sharers",
    "Shape",
    "Sight",
    "Site",
    "Spot",
    "Survey",
    "Talk",
    "Traffic",
    "Trail",
    "Turn",
    "Unread",
    "Wanted",
    "Way",
    "What",
    "When",
    "Wish",
    "Witness",
    "Words",
    "Written",
];

/// Names that more than one type may have, because the module path says which one is meant.
const REPEATED_TYPES: &[&str] = &["Args", "Error", "Builder", "State"];

/// The words of an identifier: `SlotMap`, `slot_map` and `SLOT_MAP` have the same two.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous_is_lower = false;
    for character in name.chars() {
        let begins_word = character == '_' || character.is_uppercase() && previous_is_lower;
        if begins_word && !words[words.len() - 1].is_empty() {
            words.push(String::new());
        }
        if character != '_' {
            let last = words.len() - 1;
            words[last].extend(character.to_lowercase());
        }
        previous_is_lower = character.is_lowercase() || character.is_ascii_digit();
    }
    words
}

/// A name where it is defined.
struct Definition {
    name: String,
    line: usize,
    is_type: bool,
}

/// Collects the definitions of a file: items, fields, variants, parameters and variables.
#[derive(Default)]
struct DefinitionCollector(Vec<Definition>);

impl DefinitionCollector {
    fn add(&mut self, name: &syn::Ident, is_type: bool) {
        self.0.push(Definition { name: name.to_string(), line: line(name), is_type });
    }
}

impl<'ast> Visit<'ast> for DefinitionCollector {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Struct(item) => self.add(&item.ident, true),
            syn::Item::Enum(item) => self.add(&item.ident, true),
            syn::Item::Trait(item) => self.add(&item.ident, true),
            syn::Item::Type(item) => self.add(&item.ident, true),
            syn::Item::Const(item) => self.add(&item.ident, false),
            syn::Item::Static(item) => self.add(&item.ident, false),
            syn::Item::Mod(item) => self.add(&item.ident, false),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.add(&signature.ident, false);
        visit::visit_signature(self, signature);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        field.ident.iter().for_each(|name| self.add(name, false));
        visit::visit_field(self, field);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.add(&variant.ident, false);
        visit::visit_variant(self, variant);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        self.add(&pattern.ident, false);
        visit::visit_pat_ident(self, pattern);
    }
}

fn definitions(file: &syn::File) -> Vec<Definition> {
    let mut collector = DefinitionCollector::default();
    collector.visit_file(file);
    collector.0
}

#[test]
fn no_identifier_contains_a_banned_word() {
    let mut found = Vec::new();
    for source in ["src", "tests", "fuzz"].iter().flat_map(|directory| sources(directory)) {
        for module in module_path(&source.name).last().into_iter().filter(|name| is_banned(name)) {
            found.push(format!("{}: module {module}", source.name));
        }
        let banned = definitions(&source.syntax).into_iter().filter(|definition| is_banned(&definition.name));
        found.extend(banned.map(|definition| format!("{}:{}: {}", source.name, definition.line, definition.name)));
    }
    assert_none("identifiers with a banned word, see BANNED_WORDS", &found);
}

fn is_banned(name: &str) -> bool {
    words_of(name).iter().any(|word| BANNED_WORDS.iter().any(|banned| word == banned || *word == format!("{banned}s")))
}

#[test]
fn no_type_or_module_has_a_banned_name() {
    let mut found = Vec::new();
    // A Helm chart is one in tests; in the program, the word was a metaphor.
    for source in ["src", "fuzz"].iter().flat_map(|directory| sources(directory)) {
        for module in module_path(&source.name).last().into_iter().filter(|name| is_banned_type(name)) {
            found.push(format!("{}: module {module}", source.name));
        }
        let types = definitions(&source.syntax).into_iter().filter(|definition| definition.is_type);
        let banned = types.filter(|definition| is_banned_type(&definition.name));
        found.extend(banned.map(|definition| format!("{}:{}: {}", source.name, definition.line, definition.name)));
    }
    assert_none("types and modules with a banned name, see BANNED_TYPES", &found);
}

fn is_banned_type(name: &str) -> bool {
    BANNED_TYPES.iter().any(|banned| words_of(banned) == words_of(name))
}

#[test]
fn no_two_types_have_one_name() {
    let mut by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources("src") {
        for definition in definitions(&source.syntax).into_iter().filter(|definition| definition.is_type) {
            let place = format!("{}:{}", source.name, definition.line);
            by_name.entry(definition.name).or_default().push(place);
        }
    }
    let repeated = by_name.iter().filter(|(name, places)| places.len() > 1 && !REPEATED_TYPES.contains(&name.as_str()));
    let found: Vec<_> = repeated.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert_none("type names defined more than once", &found);
}

#[test]
fn identifiers_are_split_into_words() {
    for (name, words) in [
        ("SlotMap", vec!["slot", "map"]),
        ("slot_map", vec!["slot", "map"]),
        ("MAX_HITS", vec!["max", "hits"]),
        ("Http2Connection", vec!["http2", "connection"]),
        ("_unused", vec!["unused"]),
    ] {
        assert_eq!(words_of(name), words, "{name}");
    }
    assert!(is_banned("open_draws") && !is_banned("withdraw"));
    assert!(is_banned("DrawError") && is_banned("draws") && !is_banned("withdrawal"));
}
