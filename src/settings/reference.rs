//! The table, written out for people: the environment section of `--help`, and `docs/settings.md`.

use std::fmt::Write as _;

use super::setting::{Group, Kind, Setting, Status};
use super::table::TABLE;

/// The environment section of `--help`: for each group a heading, for each setting `NAME=default` and what it means.
pub fn help() -> String {
    const WIDEST: usize = 48;
    let mut text = String::new();
    for group in Group::ALL {
        let rows: Vec<(String, &Setting)> =
            settings_of(group).map(|setting| (format!("{}={}", setting.name, setting.default), setting)).collect();
        let width = rows.iter().map(|(name, _)| name.len()).filter(|len| *len <= WIDEST).max().unwrap_or(0);
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}{}:", if text.is_empty() { "" } else { "\n" }, group.title());
        for (name, setting) in rows {
            let mark = mark(setting).map(|mark| format!(" [{mark}]")).unwrap_or_default();
            let _ = writeln!(text, "  {name:<width$}  {}{}{mark}", setting.doc, choice(setting));
        }
    }
    text
}

/// The text of `docs/settings.md`.
pub fn markdown() -> String {
    let mut text = String::from(INTRODUCTION);
    for group in Group::ALL {
        let _ = write!(text, "\n## {}\n\n| name | default | value | meaning |\n|---|---|---|---|\n", group.title());
        for setting in settings_of(group) {
            let default = if setting.default.is_empty() { String::new() } else { format!("`{}`", setting.default) };
            let note = note(setting).map(|note| format!(". *{note}*")).unwrap_or_default();
            let _ = writeln!(text, "| `{}` | {default} | {} | {}{note} |", setting.name, setting.kind, setting.doc);
        }
    }
    text
}

const INTRODUCTION: &str = "\
# Settings

tollkeeper takes its settings from the environment. The names, defaults and syntax are those of envoyproxy/ratelimit, so that
its manifests can stay as they are; names that begin with `TOLLKEEPER_` are tollkeeper's own.

- A bool is `true`, `false`, `1`, `0`, `t` or `f`; a duration is one or more numbers with units (`150us`, `1.5s`, `1h30m`), and
  only `0` needs none. Set but empty is an error for bools, numbers and durations.
- All settings that are wrong are named at once, and the process does not start (exit code 2).
- A setting that would change verdicts or security and that this release lacks stops the start too. One that is harmless is
  warned about and has no effect.
- `tollkeeper check --env` says what becomes of each variable that is set.

This page is written from the program's own table, and a test compares them.
";

fn settings_of(group: Group) -> impl Iterator<Item = &'static Setting> {
    TABLE.iter().filter(move |setting| setting.group == group)
}

/// What may be given, where neither the default nor the doc shows it.
fn choice(setting: &Setting) -> String {
    match setting.kind {
        Kind::OneOf { .. } => format!(" ({})", setting.kind),
        Kind::Int { .. } | Kind::Float { .. } | Kind::Duration { .. } | Kind::Bytes { .. } => {
            let kind = setting.kind.to_string();
            kind.split_once(", ").map(|(_, bounds)| format!(" ({bounds})")).unwrap_or_default()
        }
        _ => String::new(),
    }
}

/// In a word or three, that a setting is not honoured.
fn mark(setting: &Setting) -> Option<String> {
    match setting.status {
        Status::Honoured | Status::Differs(_) => None,
        Status::NoEffect { .. } => Some("no effect".to_owned()),
        Status::Refused(refusals) => refusals.last().map(|refusal| format!("refused {}", refusal.when)),
    }
}

/// In a sentence, how a setting is not honoured or differs.
fn note(setting: &Setting) -> Option<String> {
    match setting.status {
        Status::Honoured => None,
        Status::Differs(why) => Some(format!("Differs from envoyproxy/ratelimit: {why}")),
        Status::NoEffect { why, .. } => Some(format!("No effect: {why}")),
        Status::Refused(refusals) => {
            let each = refusals.iter().map(|refusal| format!("Refused {}: {}", refusal.when, refusal.why));
            Some(each.collect::<Vec<_>>().join(". "))
        }
    }
}
