//! Reads YAML nodes into the typed document.
//!
//! One function for each kind of mapping loops over the keys of that section. A key whose value is null counts as not
//! written, as in envoyproxy/ratelimit. A value that cannot be read is reported and left at its default.
//!
//! Decides: which type a key takes: `requests_per_unit: "10"`, `value: 404`, a key without a value.
//! Decides: which text is a content type.

mod times;

use std::sync::Arc;

use super::defaults::{DefaultableKey, DefaultableKeys};
use super::fields::{DocumentReader, Field, FieldPath, detect_non_rule_file};
use super::value::{self, InvalidValue};
use super::{DescriptorSpec, Document, PlanChoiceSpec, PlanSpec, RateLimitEntry, RateLimitSpec, TableSpec};
use crate::limit::algorithm::Algorithm;
use crate::limit::{RegionLossPolicy, StoreFailurePolicy};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::key_table::{ConsistencyWord, MAX_OVER_LIMIT_BODY_BYTES, ScopeWord, Section, ValueKind};
use crate::rules::plan_table::is_valid_plan_or_table_name;
use crate::rules::rule::RuleLogging;
use crate::rules::yaml::{Scalar, ScalarValue, Spanned, YamlContent, YamlNode};

/// Reads a document. Reports a `root` that is not a mapping and returns `None`.
pub fn read_document(reader: &mut DocumentReader<'_>, root: &YamlNode<'_>) -> Option<Document> {
    let field_path = FieldPath::ROOT;
    let mut document = Document { at: root.at, ..Document::default() };
    if root.is_null() {
        return Some(document);
    }
    if let Some(foreign) = detect_non_rule_file(root) {
        reader.report_non_rule_file(foreign);
        document.unreadable = true;
        return Some(document);
    }
    let errors = reader.found.error_count();
    let fields = reader.read_fields(root, Section::Root, "map[interface {}]interface {}", &field_path)?;
    document.unreadable = reader.found.error_count() > errors;
    for field in fields {
        let field_path = field_path.with_key(field.key.name);
        match field.key.name {
            "domain" => {
                let errors = reader.found.error_count();
                document.domain = reader.read_string(&field, &field_path);
                document.unreadable |= reader.found.error_count() > errors;
            }
            "descriptors" => document.descriptors = reader.read_descriptors(&field, &field_path),
            "matching" if !field.node.is_null() => {
                document.matching =
                    reader.read_matching(field.node, &field_path).map(|value| Spanned { value, at: field.at });
            }
            "plans" => document.plans = reader.read_plans(&field, &field_path),
            "tables" => document.tables = reader.read_tables(&field, &field_path),
            "defaults" if !field.node.is_null() => {
                document.defaults =
                    reader.read_defaults(field.node, &field_path).map(|value| Spanned { value, at: field.at });
            }
            _ => {}
        }
    }
    Some(document)
}

impl DocumentReader<'_> {
    fn read_descriptors(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Vec<DescriptorSpec> {
        let Some(list) = self.read_list(field.node, "[]config.YamlDescriptor", field_path) else { return Vec::new() };
        let mut descriptors = Vec::with_capacity(list.len());
        for (index, node) in list.iter().enumerate() {
            let field_path = field_path.with_index(index);
            if matches!(node.content, YamlContent::Map(_)) {
                descriptors.push(self.read_descriptor(node, index, &field_path));
            } else {
                self.report_not_a_mapping(node, &field_path);
            }
        }
        descriptors
    }

    fn read_descriptor(&mut self, node: &YamlNode<'_>, index: usize, field_path: &FieldPath<'_>) -> DescriptorSpec {
        let errors = self.found.error_count();
        let mut read = DescriptorSpec { at: node.at, index, ..DescriptorSpec::default() };
        read.key.at = node.at;
        let fields =
            self.read_fields(node, Section::Descriptor, "config.YamlDescriptor", field_path).unwrap_or_default();
        read.unreadable = self.found.error_count() > errors;
        for field in fields {
            let field_path = field_path.with_key(field.key.name);
            match field.key.name {
                "key" => {
                    read.key =
                        self.read_string(&field, &field_path).unwrap_or(Spanned { value: String::new(), at: field.at });
                }
                "value" => {
                    read.value = self.read_string(&field, &field_path).map(|spanned| spanned.value).unwrap_or_default();
                }
                "match" if !field.node.is_null() => {
                    read.matching = Some(Spanned { value: self.read_match(field.node, &field_path), at: field.at });
                }
                "rate_limit" => read.rate_limit = self.read_rate_limit(&field, &field_path),
                "plan" if !field.node.is_null() => read.plan = self.read_plan_choice(&field, &field_path),
                "shadow_mode" => read.shadow_mode = self.read_bool_or_false(&field, &field_path),
                "quota_mode" => read.quota_mode = self.read_bool_or_false(&field, &field_path),
                "detailed_metric" => read.detailed_metric = self.read_bool_or_false(&field, &field_path),
                "decision_log" => {
                    let logging = self.read_choice(&field, RuleLogging::from_name, &field_path);
                    read.logging = logging.map(|spanned| spanned.value);
                }
                "value_to_metric" => read.value_to_metric = self.read_bool_or_false(&field, &field_path),
                "share_threshold" => read.share_threshold = self.read_bool(&field, &field_path),
                "metadata" => read.metadata = self.read_metadata(&field, &field_path),
                "descriptors" => read.descriptors = self.read_descriptors(&field, &field_path),
                "over_limit_body" => read.over_limit_body = self.read_over_limit_body(&field, &field_path),
                "over_limit_content_type" => {
                    read.over_limit_content_type = self.read_over_limit_content_type(&field, &field_path);
                }
                _ => {}
            }
        }
        read
    }

    fn read_plans(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Vec<PlanSpec> {
        let mut plans = Vec::new();
        for (name, node) in self.read_named_elements(field, "plan", field_path) {
            let field_path = field_path.with_key(&name.value);
            let limits = Field { node, at: name.at, ..*field };
            let rate_limit = self.read_rate_limit(&limits, &field_path);
            if matches!(rate_limit, RateLimitSpec::None) {
                let hint = "write a mapping such as {unit: minute, requests_per_unit: 10}";
                self.report_error(name.at, &field_path, "a plan without limits", hint);
            }
            plans.push(PlanSpec { name, rate_limit });
        }
        plans
    }

    fn read_tables(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Vec<TableSpec> {
        let mut tables = Vec::new();
        for (name, node) in self.read_named_elements(field, "table", field_path) {
            let field_path = field_path.with_key(&name.value);
            let errors = self.found.error_count();
            let mut read = TableSpec { name: name.clone(), ..TableSpec::default() };
            for field in self.read_fields(node, Section::Table, "a table", &field_path).unwrap_or_default() {
                let field_path = field_path.with_key(field.key.name);
                match field.key.name {
                    "file" => read.file = self.read_string(&field, &field_path),
                    "redis" => read.redis = self.read_string(&field, &field_path),
                    "keep" => {
                        let parse = |scalar: &Scalar<'_>| value::parse_duration_us(scalar.text());
                        read.keep_us = self.read_parsed_scalar(&field, parse, &field_path);
                    }
                    _ => {}
                }
            }
            read.unreadable = self.found.error_count() > errors;
            tables.push(read);
        }
        tables
    }

    /// Reads `plan`.
    fn read_plan_choice(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<PlanChoiceSpec>> {
        let errors = self.found.error_count();
        let mut read = PlanChoiceSpec::default();
        for field in self.read_fields(field.node, Section::Plan, "a plan", field_path)? {
            let field_path = field_path.with_key(field.key.name);
            match field.key.name {
                "from" => read.from = self.read_string(&field, &field_path),
                "key" => read.key = self.read_string(&field, &field_path),
                "default" => read.default = self.read_string(&field, &field_path),
                _ => {}
            }
        }
        read.unreadable = self.found.error_count() > errors;
        Some(Spanned { value: read, at: field.at })
    }

    /// Returns the elements of a mapping from names that the user chooses. Reports invalid names, and leaves them out.
    fn read_named_elements<'n, 'a>(
        &mut self,
        field: &Field<'n, 'a>,
        kind: &str,
        field_path: &FieldPath<'_>,
    ) -> Vec<(Spanned<String>, &'n YamlNode<'a>)> {
        let YamlContent::Map(map) = &field.node.content else {
            if !field.node.is_null() {
                self.report_wrong_type(field.node, "a mapping", "write a mapping from names", field_path);
            }
            return Vec::new();
        };
        let mut elements = Vec::with_capacity(map.len());
        for (name, node) in map.iter() {
            let text = name.as_scalar().map_or("", |scalar| scalar.text());
            if is_valid_plan_or_table_name(text) {
                elements.push((Spanned { value: text.to_owned(), at: name.at }, node));
            } else {
                let message = format!("'{}' cannot be the name of a {kind}", escape_for_message(text));
                self.report_error(name.at, field_path, message, "write up to 64 letters, digits, `_` and `-`");
            }
        }
        elements
    }

    fn read_metadata(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
        match value::to_json(field.node) {
            serde_json::Value::Null => None,
            serde_json::Value::Object(map) => Some(map),
            _ => {
                let message =
                    format!("cannot unmarshal {} into map[string]interface {{}}", value::describe_node(field.node));
                self.report_error(field.node.at, field_path, message, "write a mapping here");
                None
            }
        }
    }

    fn read_rate_limit(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> RateLimitSpec {
        let at = field.at;
        match &field.node.content {
            YamlContent::Map(_) => match self.read_limit(field.node, Section::RateLimit, field_path) {
                Some(limit) => RateLimitSpec::One(Spanned { value: Box::new(limit), at }),
                None => RateLimitSpec::Unreadable,
            },
            YamlContent::List(list) if list.is_empty() => {
                self.report_error(
                    at,
                    field_path,
                    "an empty list of limits",
                    "leave `rate_limit` out if there is no limit",
                );
                RateLimitSpec::Unreadable
            }
            YamlContent::List(list) => {
                let mut limits = Vec::with_capacity(list.len());
                for (index, node) in list.iter().enumerate() {
                    let field_path = field_path.with_index(index);
                    if matches!(node.content, YamlContent::Map(_)) {
                        let limit = self.read_limit(node, Section::Limit, &field_path);
                        limits.extend(limit.map(|limit| RateLimitEntry { index: Some(index), ..limit }));
                    } else {
                        self.report_not_a_mapping(node, &field_path);
                    }
                }
                RateLimitSpec::Many(Spanned { value: limits, at })
            }
            YamlContent::Scalar(_) if field.node.is_null() => RateLimitSpec::None,
            YamlContent::Scalar(_) => {
                let hint = "write a mapping such as {unit: minute, requests_per_unit: 10}";
                self.report_wrong_type(field.node, "config.YamlRateLimit", hint, field_path);
                RateLimitSpec::Unreadable
            }
        }
    }

    fn read_limit(
        &mut self,
        node: &YamlNode<'_>,
        section: Section,
        field_path: &FieldPath<'_>,
    ) -> Option<RateLimitEntry> {
        let errors = self.found.error_count();
        let mut read = RateLimitEntry { at: node.at, ..RateLimitEntry::default() };
        read.requests_per_unit.at = node.at;
        for field in self.read_fields(node, section, "config.YamlRateLimit", field_path)? {
            let field_path = field_path.with_key(field.key.name);
            match field.key.name {
                "unit" => read.unit = self.read_string(&field, &field_path),
                "unit_multiplier" => read.unit_multiplier = self.read_u32(&field, &field_path),
                "requests_per_unit" => {
                    let requests = self.read_u32(&field, &field_path);
                    read.requests_at = Some(field.at);
                    read.rejects_all = requests.is_some_and(|requests| requests.value == 0);
                    read.requests_per_unit = requests.unwrap_or(Spanned { value: 0, at: field.at });
                }
                "unlimited" => read.unlimited = self.read_bool_or_false(&field, &field_path),
                "name" => read.name = self.read_string(&field, &field_path).unwrap_or_default(),
                "replaces" => read.replaces = self.read_replaces(&field, &field_path),
                "shadow_mode" => read.shadow_mode = self.read_bool_or_false(&field, &field_path),
                "quota_mode" => read.quota_mode = self.read_bool_or_false(&field, &field_path),
                "ban" => read.ban = self.read_ban(&field, &field_path),
                "reservations" => read.reservations = self.read_reservation_policy(&field, &field_path),
                "concurrent" => read.concurrent = self.read_u32(&field, &field_path),
                "max_duration" => read.max_duration_us = self.read_max_duration(&field, &field_path),
                "active" => read.active = self.read_active_times(&field, &field_path),
                "bucket_size" => read.bucket_size = self.read_u32(&field, &field_path),
                _ => self.read_defaultable_key(&field, &mut read.defaultable, &field_path),
            }
        }
        read.unreadable = self.found.error_count() > errors;
        Some(read)
    }

    fn read_replaces(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Vec<Spanned<String>> {
        let Some(list) = self.read_list(field.node, "[]config.yamlReplaces", field_path) else { return Vec::new() };
        let mut names = Vec::with_capacity(list.len());
        for (index, node) in list.iter().enumerate() {
            let field_path = field_path.with_index(index);
            if !matches!(node.content, YamlContent::Map(_)) {
                self.report_not_a_mapping(node, &field_path);
                continue;
            }
            let fields =
                self.read_fields(node, Section::Replaces, "config.yamlReplaces", &field_path).unwrap_or_default();
            let name = fields.iter().find_map(|field| self.read_string(field, &field_path.with_key(field.key.name)));
            names.push(name.unwrap_or(Spanned { value: String::new(), at: node.at }));
        }
        names
    }

    /// Reads a mapping with the keys of `defaults`.
    pub fn read_defaults(&mut self, node: &YamlNode<'_>, field_path: &FieldPath<'_>) -> Option<DefaultableKeys> {
        let mut keys = DefaultableKeys::default();
        for field in self.read_fields(node, Section::Defaults, "defaults", field_path)? {
            self.read_defaultable_key(&field, &mut keys, &field_path.with_key(field.key.name));
        }
        Some(keys)
    }

    /// Reads a key that a limit and `defaults` can both have.
    pub fn read_defaultable_key(
        &mut self,
        field: &Field<'_, '_>,
        keys: &mut DefaultableKeys,
        field_path: &FieldPath<'_>,
    ) {
        let Some(key) = DefaultableKey::from_name(field.key.name) else { return };
        match key {
            DefaultableKey::Algorithm => {
                keys.algorithm = self.read_choice(field, Algorithm::from_rule_word, field_path);
            }
            DefaultableKey::Window => keys.window = self.read_window(field, field_path),
            DefaultableKey::QueueSize => keys.queue_size = self.read_u32(field, field_path),
            DefaultableKey::MaxWait => {
                keys.max_wait_us =
                    self.read_parsed_scalar(field, |scalar| value::parse_duration_us(scalar.text()), field_path);
            }
            DefaultableKey::CountRejected => keys.count_rejected = self.read_bool(field, field_path),
            DefaultableKey::Consistency => {
                keys.consistency = self.read_choice(field, ConsistencyWord::from_name, field_path);
            }
            DefaultableKey::MaxOvershoot => {
                keys.max_overshoot = self.read_parsed_scalar(field, value::parse_overshoot, field_path);
            }
            DefaultableKey::Scope => keys.scope = self.read_choice(field, ScopeWord::from_name, field_path),
            DefaultableKey::Reserve => {
                keys.reserve_milli_percent = self.read_parsed_scalar(field, value::parse_milli_percent, field_path);
            }
            DefaultableKey::OnRegionLoss => {
                keys.on_region_loss = self.read_choice(field, RegionLossPolicy::from_name, field_path);
            }
            DefaultableKey::OnStoreError => {
                keys.on_store_error = self.read_choice(field, StoreFailurePolicy::from_name, field_path);
            }
            DefaultableKey::Epoch => keys.epoch = self.read_u64(field, field_path),
            DefaultableKey::OverLimitBody => keys.over_limit_body = self.read_over_limit_body(field, field_path),
            DefaultableKey::OverLimitContentType => {
                keys.over_limit_content_type = self.read_over_limit_content_type(field, field_path);
            }
        }
    }

    fn read_over_limit_body(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<Arc<str>>> {
        let Spanned { value: body, at } = self.read_string(field, field_path)?;
        if body.len() > MAX_OVER_LIMIT_BODY_BYTES {
            let message = format!("an `over_limit_body` of {} bytes", body.len());
            self.report_error(at, field_path, message, format!("at most {MAX_OVER_LIMIT_BODY_BYTES} are sent"));
        }
        Some(Spanned { value: body.into(), at })
    }

    /// Reads `over_limit_content_type`.
    fn read_over_limit_content_type(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<Arc<str>>> {
        let Spanned { value: content_type, at } = self.read_string(field, field_path)?;
        // A header value: anything but visible ASCII would break the response or split it.
        let visible = content_type.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
        if !visible || content_type.trim().is_empty() || content_type.len() > 256 {
            let message = format!("`{}` is not a content type", escape_for_message(&content_type));
            self.report_error(at, field_path, message, "write one such as application/json");
        }
        Some(Spanned { value: content_type.trim().into(), at })
    }
}

/// Scalars. Each is `None` if the key is not written, or if its value was reported.
impl DocumentReader<'_> {
    pub(super) fn read_string(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<String>> {
        match field.node.as_scalar() {
            Some(scalar) if scalar.is_null() => None,
            Some(scalar) => Some(Spanned { value: scalar.text().to_owned(), at: field.at }),
            None => {
                match &field.node.content {
                    YamlContent::List(_) if field.key.name == "value" => self.report_list_as_value(field, field_path),
                    _ => self.report_wrong_type(field.node, "string", "write text here", field_path),
                }
                None
            }
        }
    }

    /// Reports a list of values as `value`, in the words of envoyproxy/ratelimit.
    fn report_list_as_value(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) {
        let YamlContent::List(list) = &field.node.content else { return };
        let element = list.first().map_or_else(String::new, |element| value::format_as_go(element));
        let message = format!("config error, yaml file contains list of type other than map: {element}");
        self.report_error(field.at, field_path, message, "write `match: {in: [A, B]}` in place of `value`");
    }

    pub(super) fn read_bool_or_false(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> bool {
        self.read_bool(field, field_path).is_some_and(|flag| flag.value)
    }

    fn read_bool(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<bool>> {
        match field.node.as_scalar().map(|scalar| scalar.value()) {
            Some(ScalarValue::Null) => None,
            Some(ScalarValue::Bool(value)) => Some(Spanned { value, at: field.at }),
            _ => {
                self.report_wrong_type(field.node, "bool", "write true or false, without quotes", field_path);
                None
            }
        }
    }

    /// Reads a whole number in the range of the table.
    fn read_u64(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<u64>> {
        let (min, max) = match field.key.kind {
            ValueKind::Count(min, max) => (min, max),
            _ => (0, u64::MAX),
        };
        let number = match field.node.as_scalar().map(|scalar| scalar.value()) {
            Some(ScalarValue::Null) => return None,
            Some(ScalarValue::Int(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        match number {
            Some(value) if (min..=max).contains(&value) => Some(Spanned { value, at: field.at }),
            Some(value) if !field.key.peer => {
                let message = format!("`{}` is {value}, out of range", field.key.name);
                self.report_error(
                    field.node.at,
                    field_path,
                    message,
                    format!("write a whole number from {min} to {max}"),
                );
                None
            }
            _ => {
                let into = if max == u64::from(u32::MAX) { "uint32" } else { "uint64" };
                let hint = format!("write a whole number from {min} to {max}, without quotes");
                self.report_wrong_type(field.node, into, &hint, field_path);
                None
            }
        }
    }

    fn read_u32(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<u32>> {
        let count = self.read_u64(field, field_path)?;
        // The table bounds these numbers by 32 bits.
        Some(Spanned { value: u32::try_from(count.value).ok()?, at: count.at })
    }

    pub(super) fn read_choice<T>(
        &mut self,
        field: &Field<'_, '_>,
        from_name: impl Fn(&str) -> Option<T>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<T>> {
        let ValueKind::Choice(words) = field.key.kind else { return None };
        let hint = format!("write one of {}", words.join(", "));
        let parse = |scalar: &Scalar<'_>| {
            from_name(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("unknown {} '{}'", field.key.name, escape_for_message(scalar.text())),
                hint: hint.clone(),
            })
        };
        self.read_parsed_scalar(field, parse, field_path)
    }

    fn read_parsed_scalar<T>(
        &mut self,
        field: &Field<'_, '_>,
        parse: impl Fn(&Scalar<'_>) -> Result<T, InvalidValue>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<T>> {
        match field.node.as_scalar() {
            None => {
                self.report_wrong_type(field.node, "string", "write text here", field_path);
                None
            }
            Some(scalar) if scalar.is_null() => None,
            Some(scalar) => match parse(scalar) {
                Ok(value) => Some(Spanned { value, at: field.at }),
                Err(InvalidValue { message, hint }) => {
                    self.report_error(field.node.at, field_path, message, hint);
                    None
                }
            },
        }
    }

    /// Returns the elements of a list; none for null.
    fn read_list<'n, 'a>(
        &mut self,
        node: &'n YamlNode<'a>,
        into: &str,
        field_path: &FieldPath<'_>,
    ) -> Option<&'n [YamlNode<'a>]> {
        match &node.content {
            YamlContent::List(list) => Some(list),
            _ if node.is_null() => None,
            _ => {
                self.report_wrong_type(node, into, "write a list, its elements beginning with `- `", field_path);
                None
            }
        }
    }
}
