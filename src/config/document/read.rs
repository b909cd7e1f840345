//! From YAML nodes to the typed document.
//!
//! One function for each kind of mapping, each a loop over the keys that mean something there. A key whose value is
//! null counts as not written, as in the peer. Whatever can not be read is reported, left at its default, and reading
//! goes on.

use super::fields::{Field, Reader, Trail};
use super::value::{self, Refused};
use super::{Descriptor, Document, Limit, RateLimit, Refusal, Settings, Spot};
use crate::config::diagnostic::quotable;
use crate::config::keys::{Kind, MAX_BODY_BYTES, Place};
use crate::config::yaml::scalar::{Scalar, Value};
use crate::config::yaml::{Content, Node};
use crate::limit::StorePolicy;
use crate::limit::algorithm::Algorithm;

/// The document that `root` is; one that is no mapping is reported and `None`.
pub fn document(reader: &mut Reader<'_>, root: &Node<'_>) -> Option<Document> {
    let trail = Trail::ROOT;
    let mut document = Document { at: root.at, ..Document::default() };
    if root.is_null() {
        return Some(document);
    }
    let errors = reader.found.error_count();
    let fields = reader.fields(root, Place::Root, "map[interface {}]interface {}", &trail)?;
    document.unreadable = reader.found.error_count() > errors;
    for field in fields {
        let trail = trail.key(field.key.name);
        match field.key.name {
            "domain" => {
                let errors = reader.found.error_count();
                document.domain = reader.text(&field, &trail);
                document.unreadable |= reader.found.error_count() > errors;
            }
            "descriptors" => document.descriptors = reader.descriptors(&field, &trail),
            "defaults" if !field.node.is_null() => {
                document.defaults = reader.defaults(&field, &trail).map(|value| Spot { value, at: field.at });
            }
            _ => {}
        }
    }
    Some(document)
}

impl Reader<'_> {
    fn descriptors(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Vec<Descriptor> {
        let Some(list) = self.list(field.node, "[]config.YamlDescriptor", trail) else { return Vec::new() };
        let mut descriptors = Vec::with_capacity(list.len());
        for (index, node) in list.iter().enumerate() {
            let trail = trail.index(index);
            if matches!(node.content, Content::Map(_)) {
                descriptors.push(self.descriptor(node, index, &trail));
            } else {
                self.not_a_mapping(node, &trail);
            }
        }
        descriptors
    }

    fn descriptor(&mut self, node: &Node<'_>, index: usize, trail: &Trail<'_>) -> Descriptor {
        let errors = self.found.error_count();
        let mut read = Descriptor { at: node.at, index, ..Descriptor::default() };
        read.key.at = node.at;
        let fields = self.fields(node, Place::Descriptor, "config.YamlDescriptor", trail).unwrap_or_default();
        read.unreadable = self.found.error_count() > errors;
        for field in fields {
            let trail = trail.key(field.key.name);
            match field.key.name {
                "key" => read.key = self.text(&field, &trail).unwrap_or(Spot { value: String::new(), at: field.at }),
                "value" => read.value = self.text(&field, &trail).map(|spot| spot.value).unwrap_or_default(),
                "rate_limit" => read.rate_limit = self.rate_limit(&field, &trail),
                "shadow_mode" => read.shadow_mode = self.is_on(&field, &trail),
                "quota_mode" => read.quota_mode = self.is_on(&field, &trail),
                "detailed_metric" => read.detailed_metric = self.is_on(&field, &trail),
                "value_to_metric" => read.value_to_metric = self.is_on(&field, &trail),
                "share_threshold" => read.share_threshold = self.flag(&field, &trail),
                "metadata" => read.metadata = self.metadata(&field, &trail),
                "descriptors" => read.descriptors = self.descriptors(&field, &trail),
                _ => self.refusal(&field, &mut read.refusal, &trail),
            }
        }
        read
    }

    fn metadata(
        &mut self,
        field: &Field<'_, '_>,
        trail: &Trail<'_>,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
        match value::json(field.node) {
            serde_json::Value::Null => None,
            serde_json::Value::Object(map) => Some(map),
            _ => {
                let message =
                    format!("cannot unmarshal {} into map[string]interface {{}}", value::described(field.node));
                self.error(field.node.at, trail, message, "write a mapping here");
                None
            }
        }
    }

    fn rate_limit(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> RateLimit {
        let at = field.at;
        match &field.node.content {
            Content::Map(_) => match self.limit(field.node, Place::RateLimit, trail) {
                Some(limit) => RateLimit::One(Spot { value: Box::new(limit), at }),
                None => RateLimit::Unreadable,
            },
            Content::List(list) if list.is_empty() => {
                self.error(at, trail, "an empty list of limits", "leave `rate_limit` out if there is no limit");
                RateLimit::Unreadable
            }
            Content::List(list) => {
                let mut limits = Vec::with_capacity(list.len());
                for (index, node) in list.iter().enumerate() {
                    let trail = trail.index(index);
                    if matches!(node.content, Content::Map(_)) {
                        let limit = self.limit(node, Place::Limit, &trail);
                        limits.extend(limit.map(|limit| Limit { index: Some(index), ..limit }));
                    } else {
                        self.not_a_mapping(node, &trail);
                    }
                }
                RateLimit::Many(Spot { value: limits, at })
            }
            Content::Scalar(_) if field.node.is_null() => RateLimit::None,
            Content::Scalar(_) => {
                let hint = "write a mapping such as {unit: minute, requests_per_unit: 10}";
                self.wrong_type(field.node, "config.YamlRateLimit", hint, trail);
                RateLimit::Unreadable
            }
        }
    }

    fn limit(&mut self, node: &Node<'_>, place: Place, trail: &Trail<'_>) -> Option<Limit> {
        let errors = self.found.error_count();
        let mut read = Limit { at: node.at, ..Limit::default() };
        read.requests_per_unit.at = node.at;
        for field in self.fields(node, place, "config.YamlRateLimit", trail)? {
            let trail = trail.key(field.key.name);
            match field.key.name {
                "unit" => read.unit = self.text(&field, &trail),
                "unit_multiplier" => read.unit_multiplier = self.small(&field, &trail),
                "requests_per_unit" => {
                    read.requests_per_unit = self.small(&field, &trail).unwrap_or(Spot { value: 0, at: field.at });
                }
                "unlimited" => read.unlimited = self.is_on(&field, &trail),
                "name" => read.name = self.text(&field, &trail).unwrap_or_default(),
                "replaces" => read.replaces = self.replaces(&field, &trail),
                "shadow_mode" => read.shadow_mode = self.is_on(&field, &trail),
                "quota_mode" => read.quota_mode = self.is_on(&field, &trail),
                "bucket_size" => read.bucket_size = self.small(&field, &trail),
                _ => self.setting(&field, &mut read.settings, &trail),
            }
        }
        read.unreadable = self.found.error_count() > errors;
        Some(read)
    }

    fn replaces(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Vec<Spot<String>> {
        let Some(list) = self.list(field.node, "[]config.yamlReplaces", trail) else { return Vec::new() };
        let mut names = Vec::with_capacity(list.len());
        for (index, node) in list.iter().enumerate() {
            let trail = trail.index(index);
            if !matches!(node.content, Content::Map(_)) {
                self.not_a_mapping(node, &trail);
                continue;
            }
            let fields = self.fields(node, Place::Replaces, "config.yamlReplaces", &trail).unwrap_or_default();
            let name = fields.iter().find_map(|field| self.text(field, &trail.key(field.key.name)));
            names.push(name.unwrap_or(Spot { value: String::new(), at: node.at }));
        }
        names
    }

    fn defaults(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Option<Settings> {
        let mut settings = Settings::default();
        for field in self.fields(field.node, Place::Defaults, "defaults", trail)? {
            self.setting(&field, &mut settings, &trail.key(field.key.name));
        }
        Some(settings)
    }

    fn setting(&mut self, field: &Field<'_, '_>, settings: &mut Settings, trail: &Trail<'_>) {
        match field.key.name {
            "algorithm" => settings.algorithm = self.choice(field, Algorithm::from_name, trail),
            "queue_size" => settings.queue_size = self.small(field, trail),
            "max_wait" => settings.max_wait_us = self.parsed(field, |scalar| value::duration_us(scalar.text()), trail),
            "count_rejected" => settings.count_rejected = self.flag(field, trail),
            "consistency" => {
                let eventual = |word: &str| matches!(word, "strict" | "eventual").then_some(word == "eventual");
                settings.eventual = self.choice(field, eventual, trail);
            }
            "max_overshoot" => settings.max_overshoot = self.parsed(field, value::overshoot, trail),
            "on_store_error" => settings.on_store_error = self.choice(field, StorePolicy::from_name, trail),
            "epoch" => settings.epoch = self.count(field, trail),
            _ => self.refusal(field, &mut settings.refusal, trail),
        }
    }

    fn refusal(&mut self, field: &Field<'_, '_>, refusal: &mut Refusal, trail: &Trail<'_>) {
        let Some(text) = self.text(field, trail) else { return };
        if field.key.name == "over_limit_body" {
            if text.value.len() > MAX_BODY_BYTES {
                let message = format!("an `over_limit_body` of {} bytes", text.value.len());
                self.error(text.at, trail, message, format!("at most {MAX_BODY_BYTES} are sent"));
            }
            refusal.body = Some(text);
        } else {
            // A header's value: what is not visible ASCII would break the response or split it.
            let visible = text.value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
            if !visible || text.value.trim().is_empty() || text.value.len() > 256 {
                let message = format!("`{}` is no content type", quotable(&text.value));
                self.error(text.at, trail, message, "write one such as application/json");
            }
            refusal.content_type = Some(Spot { value: text.value.trim().to_owned(), at: text.at });
        }
    }
}

/// Scalars. Each is `None` where nothing was written, and where what was written was reported.
impl Reader<'_> {
    fn text(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Option<Spot<String>> {
        match field.node.scalar() {
            Some(scalar) if scalar.is_null() => None,
            Some(scalar) => Some(Spot { value: scalar.text().to_owned(), at: field.at }),
            None => {
                self.wrong_type(field.node, "string", "write text here", trail);
                None
            }
        }
    }

    fn is_on(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> bool {
        self.flag(field, trail).is_some_and(|flag| flag.value)
    }

    fn flag(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Option<Spot<bool>> {
        match field.node.scalar().map(|scalar| scalar.value()) {
            Some(Value::Null) => None,
            Some(Value::Bool(value)) => Some(Spot { value, at: field.at }),
            _ => {
                self.wrong_type(field.node, "bool", "write true or false, without quotes", trail);
                None
            }
        }
    }

    /// A whole number within what the table says.
    fn count(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Option<Spot<u64>> {
        let (least, most) = match field.key.kind {
            Kind::Count(least, most) => (least, most),
            _ => (0, u64::MAX),
        };
        let number = match field.node.scalar().map(|scalar| scalar.value()) {
            Some(Value::Null) => return None,
            Some(Value::Int(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        match number {
            Some(value) if (least..=most).contains(&value) => Some(Spot { value, at: field.at }),
            Some(value) if !field.key.peer => {
                let message = format!("`{}` is {value}, out of range", field.key.name);
                self.error(field.node.at, trail, message, format!("write a whole number from {least} to {most}"));
                None
            }
            _ => {
                let into = if most == u64::from(u32::MAX) { "uint32" } else { "uint64" };
                let hint = format!("write a whole number from {least} to {most}, without quotes");
                self.wrong_type(field.node, into, &hint, trail);
                None
            }
        }
    }

    fn small(&mut self, field: &Field<'_, '_>, trail: &Trail<'_>) -> Option<Spot<u32>> {
        let count = self.count(field, trail)?;
        // The table bounds all of these by 32 bits.
        Some(Spot { value: u32::try_from(count.value).ok()?, at: count.at })
    }

    fn choice<T>(
        &mut self,
        field: &Field<'_, '_>,
        from_name: impl Fn(&str) -> Option<T>,
        trail: &Trail<'_>,
    ) -> Option<Spot<T>> {
        let Kind::Choice(words) = field.key.kind else { return None };
        let hint = format!("write one of {}", words.join(", "));
        let parse = |scalar: &Scalar<'_>| {
            from_name(scalar.text()).ok_or_else(|| Refused {
                message: format!("unknown {} '{}'", field.key.name, quotable(scalar.text())),
                hint: hint.clone(),
            })
        };
        self.parsed(field, parse, trail)
    }

    fn parsed<T>(
        &mut self,
        field: &Field<'_, '_>,
        parse: impl Fn(&Scalar<'_>) -> Result<T, Refused>,
        trail: &Trail<'_>,
    ) -> Option<Spot<T>> {
        match field.node.scalar() {
            None => {
                self.wrong_type(field.node, "string", "write text here", trail);
                None
            }
            Some(scalar) if scalar.is_null() => None,
            Some(scalar) => match parse(scalar) {
                Ok(value) => Some(Spot { value, at: field.at }),
                Err(Refused { message, hint }) => {
                    self.error(field.node.at, trail, message, hint);
                    None
                }
            },
        }
    }

    /// The elements of a list; null has none.
    fn list<'n, 'a>(&mut self, node: &'n Node<'a>, into: &str, trail: &Trail<'_>) -> Option<&'n [Node<'a>]> {
        match &node.content {
            Content::List(list) => Some(list),
            _ if node.is_null() => None,
            _ => {
                self.wrong_type(node, into, "write a list, its elements beginning with `- `", trail);
                None
            }
        }
    }
}
