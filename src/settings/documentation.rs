//! All settings as text: the environment section of `--help`, `tollkeeper settings`, and `docs/reference/settings.md`.
//!
//! Decides: which variables `tollkeeper settings` prints without `--all`, and how.

use std::ffi::OsString;
use std::fmt::Write as _;

use super::environment::{self, SETTING_GROUPS};
use super::report::{EffectiveSetting, list_effective_settings};
use super::setting::{AnySetting, SettingGroup, Support};

/// Formats the environment section of `--help`: by group, `NAME=default`, and below it the help of the setting.
pub fn format_environment_help() -> String {
    let mut text = String::new();
    for group in SETTING_GROUPS {
        text += &format_heading(group, &text);
        for setting in group.settings {
            text += &format!("  {}={}\n{}", setting.name(), setting.default_text(), format_meaning(*setting));
        }
    }
    text
}

/// Formats the settings with their values in an environment, by group: all, or those that people often set and those
/// that this environment sets.
pub fn format_effective_settings(vars: impl Iterator<Item = (OsString, OsString)>, includes_all: bool) -> String {
    let mut text = String::new();
    let (effective, mut left_out) = (list_effective_settings(vars), 0);
    for group in SETTING_GROUPS {
        let mut rows = String::new();
        for setting in group.settings {
            let is_own = |name: &str| environment::find_setting(name).is_some_and(|own| own.name() == setting.name());
            for EffectiveSetting { name, value, set, ignored } in effective.iter().filter(|it| is_own(&it.name)) {
                if !includes_all && !set && !setting.info().is_often_set {
                    left_out += 1;
                    continue;
                }
                rows += &format!("{} {name}={value}\n", if *set { '*' } else { ' ' });
                rows += &format_meaning(*setting);
                rows +=
                    &ignored.as_ref().map(|why| wrap_indented(&format!("has no effect: {why}"))).unwrap_or_default();
            }
        }
        if !rows.is_empty() {
            text += &format!("{}{rows}", format_heading(group, &text));
        }
    }
    text += "\n* set in this environment; the others have their defaults\n";
    text + &if left_out > 0 { format!("--all prints {left_out} more\n") } else { String::new() }
}

/// Formats the title of a group, after an empty line unless it is the first.
fn format_heading(group: &SettingGroup, text_before: &str) -> String {
    format!("{}{}:\n", if text_before.is_empty() { "" } else { "\n" }, group.title)
}

/// Formats the help of a setting below its name: meaning, allowed values and support.
fn format_meaning(setting: &dyn AnySetting) -> String {
    let allowed = setting.allowed_values_text().map(|allowed| format!(" ({allowed})")).unwrap_or_default();
    let mark = no_effect_reason(setting).map_or("", |_| " [no effect]");
    wrap_indented(&format!("{}{allowed}{mark}", setting.info().help))
}

/// Wraps text into indented lines that fit in a terminal of 100 columns.
fn wrap_indented(text: &str) -> String {
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

/// Formats `docs/reference/settings.md`.
pub fn format_settings_markdown() -> String {
    let mut text = format!("{INTRODUCTION}{}", format_often_set_names());
    for group in SETTING_GROUPS {
        let _ = write!(text, "\n## {}\n\n", group.title);
        if let Some(note) = common_support_note(group) {
            let rows: String = group.settings.iter().map(|setting| format!("- `{}`\n", setting.name())).collect();
            let _ = write!(text, "{note}.\n\n{rows}");
            continue;
        }
        let is_infix_variant = |setting: &dyn AnySetting| {
            INFIX_VARIANTS.iter().any(|variants| variants.find_base_setting(setting).is_some())
        };
        let settings = group.settings.iter().copied().filter(|setting| !is_infix_variant(*setting));
        let (ignored, honoured): (Vec<_>, Vec<_>) = settings.partition(|setting| no_effect_reason(*setting).is_some());
        honoured.into_iter().for_each(|setting| text += &format_setting_item(setting));
        INFIX_VARIANTS.iter().for_each(|twins| text += &twins.format_infix_variants(group));
        if !ignored.is_empty() {
            text += "\nNo effect:\n\n";
        }
        for alike in ignored.chunk_by(|a, b| no_effect_reason(*a) == no_effect_reason(*b)) {
            let names: Vec<_> = alike.iter().map(|setting| format!("`{}`", setting.name())).collect();
            let reason = alike.first().and_then(|setting| no_effect_reason(*setting)).unwrap_or_default();
            let _ = writeln!(text, "- {}: {reason}", names.join(", "));
        }
    }
    text
}

/// Formats the names of the settings that people often set, one line for each group.
fn format_often_set_names() -> String {
    let mut text =
        String::from("\n## Those that people set\n\n`tollkeeper settings` prints them with their values.\n\n");
    for group in SETTING_GROUPS {
        let often_set = group.settings.iter().filter(|setting| setting.info().is_often_set);
        let names: Vec<_> = often_set.map(|setting| format!("`{}`", setting.name())).collect();
        if !names.is_empty() {
            let _ = writeln!(text, "- {}: {}", group.title, names.join(", "));
        }
    }
    text
}

/// Formats the list item of a setting that has an effect.
fn format_setting_item(setting: &dyn AnySetting) -> String {
    let note = support_note(setting).map(|note| format!(". *{note}*")).unwrap_or_default();
    let (name, help, default) = (setting.name(), setting.info().help, setting.default_text());
    let assigned = if default.is_empty() { name.to_owned() } else { format!("{name}={default}") };
    format!("- `{assigned}`{}: {help}{note}\n", describe_allowed_values(setting))
}

/// Returns the reason why a setting has no effect, if it has none.
fn no_effect_reason(setting: &dyn AnySetting) -> Option<&'static str> {
    match setting.info().support {
        Support::NoEffect { why } => Some(why),
        Support::Honoured | Support::Differs { .. } => None,
    }
}

/// Settings that are variants of others for one purpose; an infix in the name tells them apart, such as `_TRACES`.
struct InfixVariants {
    infixes: &'static [&'static str],
    introduction: &'static str,
}

const INFIX_VARIANTS: [InfixVariants; 2] = [
    InfixVariants {
        infixes: &["_LOGS", "_METRICS", "_TRACES"],
        introduction: "These override the variable without `LOGS_`, `METRICS_` or `TRACES_`. A URL over HTTP has the whole path:",
    },
    InfixVariants {
        infixes: &["_PERSECOND"],
        introduction: "As the variable without `PERSECOND_`, for limits per second; only a default given here differs:",
    },
];

impl InfixVariants {
    /// Returns the setting that `setting` repeats, if it is one of these.
    fn find_base_setting(&self, setting: &dyn AnySetting) -> Option<&'static dyn AnySetting> {
        let infix = self.infixes.iter().find(|infix| setting.name().contains(**infix))?;
        let name = setting.name().replacen(infix, "", 1);
        environment::all_settings().find(|base| base.name() == name)
    }

    /// Formats the list of the variants in a group; empty if it has none.
    fn format_infix_variants(&self, group: &SettingGroup) -> String {
        let mut rows = String::new();
        for setting in group.settings {
            let Some(base) = self.find_base_setting(*setting) else { continue };
            let (default, usual) = (setting.default_text(), base.default_text());
            let own = if default.is_empty() || default == usual { String::new() } else { format!("={default}") };
            let _ = writeln!(rows, "- `{}{own}`", setting.name());
        }
        if rows.is_empty() { rows } else { format!("\n{}\n\n{rows}", self.introduction) }
    }
}

const INTRODUCTION: &str = "\
# Settings

For operators: every environment variable that tollkeeper reads. Names, defaults and syntax are those of
envoyproxy/ratelimit; `TOLLKEEPER_` begins tollkeeper's own.

Check an environment before you deploy it:

```sh
tollkeeper check --env
```

Each line: `NAME=default` (allowed values, if not any text): meaning.

- A bool is `true`, `false`, `1`, `0`, `t` or `f`. A duration is one or more numbers with units (`150us`, `1h30m`), or `0`. If set, neither
  they nor numbers may be empty.
- An invalid setting prevents the start (exit code 2); one without effect gets a warning.
- *Differs*: from envoyproxy/ratelimit.
";

/// Describes the values of a setting: ` (int, 0 to 65535)`; empty if they are any text, or bools with a default.
fn describe_allowed_values(setting: &dyn AnySetting) -> String {
    match (setting.type_name(), setting.allowed_values_text()) {
        ("text", None) => String::new(),
        ("bool", None) if !setting.default_text().is_empty() => String::new(),
        ("", allowed) => format!(" ({})", allowed.unwrap_or_default()),
        (kind, Some(allowed)) => format!(" ({kind}, {allowed})"),
        (kind, None) => format!(" ({kind})"),
    }
}

/// Returns the note that all settings of a group have in common, if they have one.
fn common_support_note(group: &SettingGroup) -> Option<String> {
    let mut notes = group.settings.iter().map(|setting| support_note(*setting));
    let first = notes.next()??;
    notes.all(|note| note.as_ref() == Some(&first)).then_some(first)
}

/// Returns a sentence about a setting that has no effect or differs from envoyproxy/ratelimit; `None` for all others.
fn support_note(setting: &dyn AnySetting) -> Option<String> {
    match setting.info().support {
        Support::Honoured => None,
        Support::Differs { how, .. } => Some(format!("Differs: {how}")),
        Support::NoEffect { why } => Some(format!("No effect: {why}")),
    }
}
