//! The table of settings as text: the environment section of `--help`, and `docs/settings.md`.

use std::fmt::Write as _;

use super::setting::{AnySetting, SettingGroup, Support};
use super::table::GROUPS;

/// Formats the environment section of `--help`: by group, `NAME=default`, and below it the help of the setting.
pub fn help() -> String {
    let mut text = String::new();
    for group in GROUPS {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}{}:", if text.is_empty() { "" } else { "\n" }, group.title);
        for setting in group.settings {
            let allowed = setting.allowed_text().map(|allowed| format!(" ({allowed})")).unwrap_or_default();
            let mark = mark(*setting).map(|mark| format!(" [{mark}]")).unwrap_or_default();
            let _ = writeln!(text, "  {}={}", setting.name(), setting.default_text());
            text += &indented(&format!("{}{allowed}{mark}", setting.info().help));
        }
    }
    text
}

/// Wraps text into indented lines that fit in a terminal of 100 columns.
fn indented(text: &str) -> String {
    const MAX_COLUMNS: usize = 98;
    const INDENT: &str = "      ";
    let mut lines = String::from(INDENT);
    let mut column = INDENT.len();
    for word in text.split(' ') {
        if column + 1 + word.len() > MAX_COLUMNS {
            lines += &format!("\n{INDENT}");
            column = INDENT.len();
        } else if column > INDENT.len() {
            lines.push(' ');
            column += 1;
        }
        lines += word;
        column += word.len();
    }
    lines + "\n"
}

/// Formats `docs/settings.md`.
pub fn markdown() -> String {
    let mut text = String::from(INTRODUCTION);
    for group in GROUPS {
        let _ = write!(text, "\n## {}\n\n", group.title);
        let shared_note = shared_note(group);
        if let Some(note) = &shared_note {
            let _ = write!(text, "{note}.\n\n");
        }
        text += "| name | default | value | meaning |\n|---|---|---|---|\n";
        for setting in group.settings {
            let default = match setting.default_text() {
                empty if empty.is_empty() => empty,
                default => format!("`{default}`"),
            };
            let own_note = note(*setting).filter(|note| shared_note.as_ref() != Some(note));
            let note = own_note.map(|note| format!(". *{note}*")).unwrap_or_default();
            let (name, help) = (setting.name(), setting.info().help);
            let _ = writeln!(text, "| `{name}` | {default} | {} | {help}{note} |", value_text(*setting));
        }
    }
    text
}

const INTRODUCTION: &str = "\
# Settings

For operators: every environment variable that tollkeeper reads. Names, defaults and syntax are those of
envoyproxy/ratelimit, so its manifests work unchanged; names that begin with `TOLLKEEPER_` are tollkeeper's own.

Check an environment before you deploy it:

```sh
tollkeeper check --env
```

- A bool is `true`, `false`, `1`, `0`, `t` or `f`. A duration is one or more numbers with units (`150us`, `1.5s`, `1h30m`);
  only `0` needs no unit. A bool, number or duration that is set but empty is an error.
- All invalid settings are reported at once, and the process does not start (exit code 2).
- A setting that would change verdicts or security and that this release does not support prevents the start. A harmless one
  gets a warning and has no effect.

This page is generated from the program's own table, and a test compares them.
";

/// Describes the values of a setting: `int, 0 to 65535`.
fn value_text(setting: &dyn AnySetting) -> String {
    match (setting.kind(), setting.allowed_text()) {
        ("", allowed) => allowed.unwrap_or_default(),
        (kind, Some(allowed)) => format!("{kind}, {allowed}"),
        (kind, None) => kind.to_owned(),
    }
}

/// Notes in brackets that a setting is not honoured.
fn mark(setting: &dyn AnySetting) -> Option<String> {
    match setting.info().support {
        Support::Honoured | Support::Differs(_) => None,
        Support::NoEffect { .. } => Some("no effect".to_owned()),
        Support::Refused(unsupported) => unsupported.last().map(|value| format!("refused {}", value.when)),
    }
}

/// Note that all settings of a group have in common, if they have one.
fn shared_note(group: &SettingGroup) -> Option<String> {
    let mut notes = group.settings.iter().map(|setting| note(*setting));
    let first = notes.next()??;
    notes.all(|note| note.as_ref() == Some(&first)).then_some(first)
}

/// Notes in a sentence that a setting is not honoured, or differs.
fn note(setting: &dyn AnySetting) -> Option<String> {
    match setting.info().support {
        Support::Honoured => None,
        Support::Differs(how) => Some(format!("Differs from envoyproxy/ratelimit: {how}")),
        Support::NoEffect { why, .. } => Some(format!("No effect: {why}")),
        Support::Refused(unsupported) => {
            let each = unsupported.iter().map(|value| format!("Refused {}: {}", value.when, value.why));
            Some(each.collect::<Vec<_>>().join(". "))
        }
    }
}
