//! Webhook of levels that keys reach (`notify` of a limit).
//!
//! Decides: which webhook gets levels, and the secret that signs them.

use std::path::PathBuf;

use super::credentials::{SecretSource, SecretVariables};
use super::secret::Secret;
use super::setting::settings;
use super::value::text::SecretUrl;
use super::values::Values;

settings! { "Levels of limits";
    TOLLKEEPER_NOTIFY_WEBHOOK: Option<SecretUrl> = "",
        "URL that gets each level of `notify`, by POST";
    TOLLKEEPER_NOTIFY_WEBHOOK_SECRET: Option<Secret> = "",
        "secret that signs these requests (Standard Webhooks): whsec_ and base64, or 16 bytes or more"
        .only_read("with TOLLKEEPER_NOTIFY_WEBHOOK");
    TOLLKEEPER_NOTIFY_WEBHOOK_SECRET_FILE: Option<PathBuf> = "", "file that holds it, read at the start"
        .only_read("with TOLLKEEPER_NOTIFY_WEBHOOK");
}

static WEBHOOK_SECRET_VARIABLES: SecretVariables =
    SecretVariables { text: &TOLLKEEPER_NOTIFY_WEBHOOK_SECRET, file: &TOLLKEEPER_NOTIFY_WEBHOOK_SECRET_FILE };

/// Webhook of levels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookSettings {
    /// URL, which may hold a secret: `http://` or `https://`.
    pub url: Secret,
    /// Secret that signs; `None`: requests are not signed.
    pub secret: Option<SecretSource>,
}

impl WebhookSettings {
    pub(super) fn from_values(values: &mut Values) -> Option<Self> {
        let secret = WEBHOOK_SECRET_VARIABLES.read_source(values);
        let url = values.get(&TOLLKEEPER_NOTIFY_WEBHOOK)?;
        let text = url.reveal();
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or_default();
        let has_host = !rest.is_empty() && !rest.starts_with(['/', '?', '#']);
        if !has_host || text.bytes().any(|byte| !byte.is_ascii_graphic()) {
            values.add_problem(&TOLLKEEPER_NOTIFY_WEBHOOK, "not a URL", "give http://host/path or https://host/path");
        }
        Some(Self { url: Secret::new(text), secret })
    }
}
