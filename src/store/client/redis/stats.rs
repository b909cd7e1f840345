//! Statistics of a deployment, for the metrics collector.

/// Connections and breakers of a deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeploymentStats {
    /// Connections in use.
    pub connections: usize,
    /// Connections opened since the start.
    pub opened: u64,
    /// Address of each server in use, and whether its breaker is open.
    pub nodes: Vec<(String, bool)>,
}
