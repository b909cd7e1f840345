//! Levels of `notify`.

use super::fields::{DocumentReader, Field};
use super::keys::ReadValue;
use super::value::parse_milli_percent;
use crate::rules::key_table::ValueKind;
use crate::rules::rule::notify_levels::{MAX_NOTIFY_LEVELS, NotifyLevel, NotifyLevels};
use crate::rules::yaml::YamlContent;

impl ReadValue for NotifyLevels {
    const KIND: ValueKind = ValueKind::Percentages(NotifyLevel::LEAST.milli_percent);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let hint = "write a list such as [50%, 80%, 100%]";
        let YamlContent::List(list) = &field.node.content else {
            reader.report_error(field.node.at, &field.path, format!("`{}` is no list", field.key.name), hint);
            return None;
        };
        let mut levels = Vec::new();
        let mut is_readable = true;
        for (index, node) in list.iter().enumerate() {
            let path = field.path.with_index(index);
            let level = match node.as_scalar() {
                Some(scalar) => parse_milli_percent(scalar, NotifyLevel::LEAST.milli_percent),
                None => Err(super::value::InvalidValue {
                    message: "this is not a percentage".to_owned(),
                    hint: hint.to_owned(),
                }),
            };
            match level {
                Ok(milli_percent) => levels.push(NotifyLevel { milli_percent }),
                Err(problem) => {
                    is_readable = false;
                    reader.report_error(node.at, &path, problem.message, problem.hint);
                }
            }
        }
        let levels = NotifyLevels::new(levels);
        if levels.is_none() && is_readable {
            let message = format!("`{}` has no levels, more than {MAX_NOTIFY_LEVELS}, or one twice", field.key.name);
            reader.report_error(field.node.at, &field.path, message, hint);
        }
        levels.filter(|_| is_readable)
    }
}
