//! Rules: from their source to the compiled set that decides.
//!
//! `source` delivers rules (`files` and `xds` are its implementations), `compile` turns them into checked rules by way
//! of `yaml` and `document`, `table_loader` reads the tables that they name, and `live` holds the compiled set that
//! decides.

pub mod plan_table;
pub mod rule;
pub mod diagnostic;
pub mod key_table;
pub mod yaml;
pub mod document;
pub mod rule_defaults;
pub mod load_progress;
pub mod compile;
pub mod schema;
pub mod files;
pub mod table_file;
pub mod defaults_file;
pub mod xds;
pub mod table_loader;
pub mod live;
pub mod source;
