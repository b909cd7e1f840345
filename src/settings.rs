//! stand-in until the settings land

/// What the process was told about deciding.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// x
    pub shadow_mode: bool,
    /// x
    pub quota_mode: bool,
    /// x
    pub response_dynamic_metadata: bool,
    /// x
    pub metadata_verdicts: bool,
    /// x
    pub limit_headers: Option<HeaderNames>,
    /// x
    pub retry_after_header: Option<String>,
    /// x
    pub stop_when_over_limit: bool,
    /// x
    pub calendar_months: bool,
    /// x
    pub log_max: u32,
}
/// x
#[derive(Clone, Debug)]
pub struct HeaderNames {
    /// x
    pub limit: String,
    /// x
    pub remaining: String,
    /// x
    pub reset: String,
}
