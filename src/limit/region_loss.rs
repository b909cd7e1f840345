//! Policy of a global limit in a region that is cut off from the global Redis.

/// Hits that a cut-off region admits in a period, once those that it was granted are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegionLossPolicy {
    /// The region's part of half the overshoot.
    #[default]
    Share,
    /// The limit divided by the number of regions, which may exceed the overshoot.
    Local,
    /// None.
    Deny,
    /// Any number.
    Allow,
}

impl RegionLossPolicy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Share, Self::Local, Self::Deny, Self::Allow];

    /// Name in rule files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Local => "local",
            Self::Deny => "deny",
            Self::Allow => "allow",
        }
    }

    /// Returns the policy of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }
}
