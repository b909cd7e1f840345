//! State that all pages share.
//!
//! Decides: a bad file that maps metrics.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use super::browser_protection::AllowedHosts;
use super::live_events::LiveEvents;
use super::page_builder::PageBuilder;
use crate::serve::blocks::SharedBlocks;
use crate::serve::fleet::member::FleetMembership;
use crate::serve::metrics_collector::MetricsCollector;
use crate::settings::credentials::SecretSource;
use crate::settings::metrics::PROMETHEUS_MAPPER_YAML;
use crate::settings::metrics::PrometheusSettings;
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
use crate::telemetry::metrics::mapper::Mapper;
use crate::telemetry::metrics::prometheus::ExpositionOptions;

/// State that all pages share.
#[derive(Clone, Debug)]
pub struct AppState {
    /// The service, its health and its metrics.
    pub collector: MetricsCollector,
    /// Blocked values.
    pub blocks: Arc<SharedBlocks>,
    /// All replicas.
    pub fleet: Arc<FleetMembership>,
    /// Builds the pages.
    pub pages: PageBuilder,
    /// Events of `/live`.
    pub live: Arc<LiveEvents>,
    /// Names by which requests may address the debug listener.
    pub debug_hosts: AllowedHosts,
    /// Maximum size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Page for Prometheus; `None` if it is off.
    pub prometheus_page: Option<Arc<PrometheusPageConfig>>,
    /// Token for pages that change state or show keys; `None` switches these pages off.
    pub admin_token: Option<SecretSource>,
}

/// Path and options of the page for Prometheus.
#[derive(Debug)]
pub struct PrometheusPageConfig {
    /// Path of the page.
    pub(super) path: String,
    /// Names, labels and units.
    pub(super) options: ExpositionOptions,
}

impl PrometheusPageConfig {
    /// Reads the mapping file that the settings name; without it metrics have their own names, as with
    /// envoyproxy/ratelimit. `tags` are labels of every series.
    ///
    /// # Errors
    /// The file is there and cannot be used; names the setting, the file and the problem.
    pub fn new(settings: &PrometheusSettings, tags: &[(String, String)]) -> Result<Self, UnusableSetting> {
        let missing = find_missing_mapping_file(settings);
        if let Some(missing) = &missing {
            tracing::warn!("{missing}");
        }
        let read = |path: &Path| {
            Mapper::read_file(path).map_err(|error| {
                build_mapping_file_problem(path, format!("{error} (fix the file or unset the variable)"))
            })
        };
        let path = settings.mapper.as_deref().filter(|_| missing.is_none());
        let mapper = path.map(read).transpose()?;
        let options = ExpositionOptions { tags: tags.to_vec(), mapper, milliseconds: settings.milliseconds };
        Ok(Self { path: settings.path.clone(), options })
    }
}

/// Returns the setting whose mapping file is missing, so that metrics keep their own names.
pub fn find_missing_mapping_file(settings: &PrometheusSettings) -> Option<UnusableSetting> {
    let path = settings.mapper.as_deref()?;
    let is_missing = std::fs::metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound);
    is_missing
        .then(|| build_mapping_file_problem(path, "there is no such file: metrics keep their own names".to_owned()))
}

fn build_mapping_file_problem(path: &Path, what: String) -> UnusableSetting {
    UnusableSetting { setting: PROMETHEUS_MAPPER_YAML.name(), shown: path.display().to_string(), what }
}
