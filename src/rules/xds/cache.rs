//! Last accepted resources in a file, for a start while the control plane is away.
//!
//! The file is replaced atomically and readable by its owner only. Its first line is a format version and a checksum of
//! the rest; the second one says who sent the resources, when, and which
//! domains have those of an older version. A file that is damaged, or of another server or
//! node, is not used. A failure to write concerns nothing else.
//!
//! Decides: rules at a start without control plane; a cache file that is damaged or cannot be written.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use prost::Message as _;
use prost_types::Any;
use serde::{Deserialize, Serialize};

use super::refused_domains::RefusedDomain;
use crate::base::clock::Time;
use crate::base::pb::xds::DiscoveryResponse;
use crate::settings::xds::XdsSettings;

/// First word of the file, with its format version.
const CACHE_FORMAT: &str = "tollkeeper-xds-cache-1";

/// Upper bound on the first two lines without refused domains, in bytes.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// Upper bound on the file, in messages of the largest size: resources of refused domains are from older messages.
const MAX_FILE_SIZE_IN_MESSAGES: u64 = 4;

/// Cache of one subscription.
#[derive(Clone, Debug)]
pub struct ResourceCache {
    path: PathBuf,
    server: String,
    node_id: String,
    max_bytes: u64,
}

/// Resources in a file.
#[derive(Debug)]
pub struct CachedResources {
    /// Version at the control plane.
    pub version: String,
    /// Time when they were accepted.
    pub accepted_at: Time,
    /// The resources.
    pub resources: Vec<Any>,
    /// Domains whose resource is that of an older version, because the last one was refused.
    pub refused: Vec<RefusedDomain>,
}

/// Origin of the cached rules: the second line of the cache file.
#[derive(Debug, Serialize, Deserialize)]
struct CacheOrigin {
    server: String,
    node_id: String,
    accepted_at_us: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    refused: Vec<RefusedDomain>,
}

impl ResourceCache {
    /// The cache of a subscription; `None` without `TOLLKEEPER_XDS_CACHE`.
    pub fn new(settings: &XdsSettings) -> Option<Self> {
        Some(Self {
            path: settings.cache.clone()?,
            server: settings.server_address(),
            node_id: settings.node_id.clone(),
            max_bytes: MAX_FILE_SIZE_IN_MESSAGES * settings.max_message_bytes as u64 + MAX_HEAD_BYTES,
        })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// The file cannot be written, or would be too large to be read.
    pub fn write_resources(&self, set: CachedResources) -> io::Result<()> {
        let CachedResources { version, accepted_at, resources, refused } = set;
        let (server, node_id) = (self.server.clone(), self.node_id.clone());
        let origin = CacheOrigin { server, node_id, accepted_at_us: accepted_at.as_micros(), refused };
        let mut rest = serde_json::to_vec(&origin)?;
        rest.push(b'\n');
        let set = DiscoveryResponse { version_info: version, resources, ..DiscoveryResponse::default() };
        rest.extend(set.encode_to_vec());
        if rest.len() as u64 > self.max_bytes {
            return Err(io::Error::other(format!("it would be larger than {} bytes", self.max_bytes)));
        }
        let mut next = self.path.clone().into_os_string();
        next.push(".new");
        // A file that an interrupted write left has other permissions, perhaps.
        let _ = fs::remove_file(&next);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&next)?;
        writeln!(file, "{CACHE_FORMAT} {}", blake3::hash(&rest).to_hex())?;
        file.write_all(&rest)?;
        file.sync_all()?;
        fs::rename(next, &self.path)
    }

    /// Reads the file; `None` if there is none.
    ///
    /// # Errors
    /// The reason why the file cannot be used.
    pub fn read_resources(&self) -> Result<Option<CachedResources>, String> {
        let mut bytes = Vec::new();
        let read = File::open(&self.path).and_then(|file| file.take(self.max_bytes + 1).read_to_end(&mut bytes));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("it cannot be read: {error}")),
            Ok(length) if length as u64 > self.max_bytes => return Err("it is too large".to_owned()),
            Ok(_) => {}
        }
        self.parse_file(&bytes).map(Some)
    }

    fn parse_file(&self, bytes: &[u8]) -> Result<CachedResources, String> {
        let damaged = || "it is damaged".to_owned();
        let (first, rest) = split_first_line(bytes).ok_or_else(damaged)?;
        if first != format!("{CACHE_FORMAT} {}", blake3::hash(rest).to_hex()).as_bytes() {
            return Err(damaged());
        }
        let (origin, set) = split_first_line(rest).ok_or_else(damaged)?;
        let origin: CacheOrigin = serde_json::from_slice(origin).map_err(|_| damaged())?;
        let CacheOrigin { server, node_id, accepted_at_us, refused } = origin;
        if server != self.server || node_id != self.node_id {
            return Err(format!("it is of node {node_id:?} of {server:?}"));
        }
        let set = DiscoveryResponse::decode(set).map_err(|_| damaged())?;
        let accepted_at = Time::from_micros(accepted_at_us);
        Ok(CachedResources { version: set.version_info, accepted_at, resources: set.resources, refused })
    }
}

fn split_first_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memchr::memchr(b'\n', bytes)?;
    Some((&bytes[..end], &bytes[end + 1..]))
}
