//! Serialization of the words of rule files: algorithms, units and failure policies, by their names.

use std::borrow::Cow;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::StorePolicy;
use super::algorithm::Algorithm;
use super::period::Unit;
use super::region_loss::RegionLossPolicy;

macro_rules! serialize_by_name {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = Cow::<'de, str>::deserialize(deserializer)?;
                Self::from_name(&name).ok_or_else(|| D::Error::custom(format_args!("unknown name '{name}'")))
            }
        }
    )*};
}
serialize_by_name!(Algorithm, Unit, StorePolicy, RegionLossPolicy);
