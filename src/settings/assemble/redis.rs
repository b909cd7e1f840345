//! From the values of an environment to the Redis that counters live in.
//!
//! The variables of the two deployments differ only in name, so each is read by a list of names. What contradicts what
//! is found here, and is named with both variables. What asks for something that nobody reads, such as a certificate
//! without TLS, is idle: a notice, because a manifest that works elsewhere must not fail here for it.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use super::Values;
use crate::settings::parse::Fault;
use crate::settings::redis::{
    Credentials, DeploymentSettings, Endpoint, KeyFormat, OverLimitCache, Redis, Tls, TopologySettings,
};
use crate::settings::url::{self, Url};
use crate::settings::{Notice, Store};

/// The variables of a deployment.
struct Names {
    socket_type: &'static str,
    topology: &'static str,
    url: &'static str,
    connections: &'static str,
    dial_timeout: &'static str,
    tls: &'static str,
    server: LoginNames,
    sentinels: LoginNames,
}

/// The variables that say what to authenticate with.
struct LoginNames {
    auth: &'static str,
    file: &'static str,
}

const MAIN: Names = Names {
    socket_type: "REDIS_SOCKET_TYPE",
    topology: "REDIS_TYPE",
    url: "REDIS_URL",
    connections: "REDIS_POOL_SIZE",
    dial_timeout: "REDIS_TIMEOUT",
    tls: "REDIS_TLS",
    server: LoginNames { auth: "REDIS_AUTH", file: "TOLLKEEPER_REDIS_AUTH_FILE" },
    sentinels: LoginNames { auth: "REDIS_SENTINEL_AUTH", file: "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE" },
};

const PER_SECOND: Names = Names {
    socket_type: "REDIS_PERSECOND_SOCKET_TYPE",
    topology: "REDIS_PERSECOND_TYPE",
    url: "REDIS_PERSECOND_URL",
    connections: "REDIS_PERSECOND_POOL_SIZE",
    dial_timeout: "REDIS_PERSECOND_TIMEOUT",
    tls: "REDIS_PERSECOND_TLS",
    server: LoginNames { auth: "REDIS_PERSECOND_AUTH", file: "TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE" },
    sentinels: LoginNames {
        auth: "REDIS_PERSECOND_SENTINEL_AUTH",
        file: "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE",
    },
};

impl Names {
    const fn all(&self) -> [&'static str; 10] {
        [
            self.socket_type,
            self.topology,
            self.url,
            self.connections,
            self.dial_timeout,
            self.tls,
            self.server.auth,
            self.server.file,
            self.sentinels.auth,
            self.sentinels.file,
        ]
    }
}

/// What only counters in Redis have, and no variable that by itself asks for Redis.
const WITH_REDIS: [&str; 12] = [
    "CACHE_KEY_PREFIX",
    "EXPIRATION_JITTER_MAX_SECONDS",
    "TOLLKEEPER_STORE_TIMEOUT",
    "TOLLKEEPER_REPLICAS",
    "TOLLKEEPER_EVENTUAL_BYTES",
    "TOLLKEEPER_KEY_FORMAT",
    LOCAL_CACHE,
    OVER_LIMIT_CACHE,
    MAIN.server.file,
    MAIN.sentinels.file,
    PER_SECOND.server.file,
    PER_SECOND.sentinels.file,
];

const LOCAL_CACHE: &str = "LOCAL_CACHE_SIZE_IN_BYTES";
const OVER_LIMIT_CACHE: &str = "TOLLKEEPER_OVER_LIMIT_CACHE_BYTES";

/// What is read with TLS only, for both deployments: an authority, a certificate, its key, and how names are checked.
const TLS_FILES: [&str; 4] =
    ["REDIS_TLS_CACERT", "REDIS_TLS_CLIENT_CERT", "REDIS_TLS_CLIENT_KEY", "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION"];

const SENTINELS: &str = "the name of the master, then its sentinels: mastername,host:port,host:port";
const NODES: &str = "some of its nodes: host:port,host:port";

/// What a `REDIS_URL` lists.
struct Addresses {
    /// The master's name, for sentinels.
    master: String,
    /// At least one.
    urls: Vec<Url>,
}

impl Addresses {
    /// Stands for what is wrong, so that the rest can be checked; nobody connects to it.
    fn none() -> Self {
        let endpoint = Endpoint::Tcp { host: String::new(), port: 0 };
        let url = Url { endpoint, credentials: Credentials::None, database: None, tls: None };
        Self { master: String::new(), urls: vec![url] }
    }
}

impl Values {
    /// Where counters live: in Redis if anything is said about it.
    pub(super) fn store(&mut self, in_redis: bool) -> Store {
        if !in_redis {
            WITH_REDIS.into_iter().for_each(|name| self.idle(name, "counters live in this process, not in Redis"));
            return Store::Memory;
        }
        let main = self.deployment(&MAIN);
        let per_second = self.bool("REDIS_PERSECOND").then(|| self.deployment(&PER_SECOND));
        if per_second.is_none() {
            let names = PER_SECOND.all();
            names.into_iter().for_each(|name| self.idle(name, "it is only read with REDIS_PERSECOND=true"));
        }
        if [Some(&main), per_second.as_ref()].into_iter().flatten().all(|deployment| deployment.tls.is_none()) {
            TLS_FILES.into_iter().for_each(|name| self.idle(name, "no Redis is connected to over TLS"));
        }
        let key_prefix = self.key_prefix();
        let key_format = match self.word("TOLLKEEPER_KEY_FORMAT") {
            "ratelimit" => KeyFormat::Ratelimit,
            _ => KeyFormat::Tollkeeper,
        };
        Store::Redis(Redis {
            main,
            per_second,
            timeout: self.duration("TOLLKEEPER_STORE_TIMEOUT"),
            replicas: self.optional_int("TOLLKEEPER_REPLICAS").and_then(NonZeroU32::new),
            max_replicas: NonZeroU32::new(self.int("TOLLKEEPER_MAX_REPLICAS")).expect("its lower bound is 1"),
            eventual_bytes: self.bytes("TOLLKEEPER_EVENTUAL_BYTES"),
            key_prefix,
            key_format,
            expiration_jitter: self.expiration_jitter(key_format),
            over_limit_cache: self.over_limit_cache(),
            health_needs_connection: self.bool("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION"),
        })
    }

    /// That of envoyproxy/ratelimit, if it is asked for, only adds to ours.
    fn over_limit_cache(&mut self) -> OverLimitCache {
        let own: usize = self.bytes(OVER_LIMIT_CACHE);
        let theirs = usize::try_from(self.int::<u64>(LOCAL_CACHE)).unwrap_or(usize::MAX);
        if own == 0 {
            self.idle(LOCAL_CACHE, "TOLLKEEPER_OVER_LIMIT_CACHE_BYTES=0 turns every such cache off");
            return OverLimitCache { capacity_bytes: 0, counting: false };
        }
        OverLimitCache { capacity_bytes: own.max(theirs), counting: theirs > 0 }
    }

    fn deployment(&mut self, names: &Names) -> DeploymentSettings {
        let Addresses { master, urls } = self.addresses(names).unwrap_or_else(|fault| {
            self.problem(names.url, &fault.what, &fault.fix);
            Addresses::none()
        });
        let is_unix = self.given.contains_key(names.socket_type) && self.word(names.socket_type) == "unix";
        if is_unix && self.word(names.topology) != "SINGLE" {
            self.idle.push((names.socket_type, "nodes of a cluster and sentinels are always on tcp"));
        }
        let in_url = self.same_credentials(names, &urls);
        let database = self.same_database(names, &urls);
        let tls = self.tls(names, &urls);
        let endpoints: Vec<Endpoint> = urls.into_iter().map(|url| url.endpoint).collect();
        let (topology, credentials) = match self.word(names.topology) {
            "SENTINEL" => {
                // Those of the URL are for whom the URL names.
                let credentials = self.credentials(&names.sentinels, in_url, names.url);
                let sentinels = TopologySettings::Sentinel { master, sentinels: endpoints, credentials };
                (sentinels, self.credentials(&names.server, Credentials::None, names.url))
            }
            other => {
                for name in [names.sentinels.auth, names.sentinels.file] {
                    self.idle(name, "there are no sentinels");
                }
                let [first, ..] = &endpoints[..] else { unreachable!("there is at least one") };
                let single = TopologySettings::Single(first.clone());
                let topology = if other == "CLUSTER" { TopologySettings::Cluster(endpoints) } else { single };
                (topology, self.credentials(&names.server, in_url, names.url))
            }
        };
        let (connections, dial_timeout) = (self.connections(names), self.duration(names.dial_timeout));
        DeploymentSettings { setting: names.url, topology, database, credentials, tls, connections, dial_timeout }
    }

    /// What the URL lists, by the topology.
    fn addresses(&self, names: &Names) -> Result<Addresses, Fault> {
        let secret = self.secret(names.url);
        let text = secret.reveal();
        let (topology, is_given) = (self.word(names.topology), self.given.contains_key(names.url));
        // Against a value that is wrong itself nothing can be checked.
        if [names.topology, names.socket_type, names.url].into_iter().any(|name| self.is_wrong(name)) {
            return Ok(Addresses::none());
        }
        if text.is_empty() {
            return Err(Fault::new("set but empty", "give the address of Redis, or unset all that begins with REDIS_"));
        }
        let mut parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let needs =
            |form: &str| Fault::new(format!("not set with {}={topology}", names.topology), format!("give {form}"));
        let list = |parts: &mut dyn Iterator<Item = &str>, port| {
            parts.map(|part| self.listed(part, port, topology)).collect::<Result<Vec<_>, _>>()
        };
        match topology {
            "SENTINEL" if !is_given => Err(needs(SENTINELS)),
            "SENTINEL" => {
                let master = parts.next().unwrap_or_default().to_owned();
                if !url::is_master_name(&master) {
                    return Err(Fault::new(
                        "it does not begin with the name of the master",
                        format!("give {SENTINELS}"),
                    ));
                }
                let urls = list(&mut parts, 26_379)?;
                let none = || Fault::new("it names a master and no sentinel", format!("give {SENTINELS}"));
                if urls.is_empty() { Err(none()) } else { Ok(Addresses { master, urls }) }
            }
            "CLUSTER" if !is_given => Err(needs(NODES)),
            "CLUSTER" => {
                let urls = list(&mut parts, 6379)?;
                let none = || Fault::new("it names no node", format!("give {NODES}"));
                if urls.is_empty() { Err(none()) } else { Ok(Addresses { master: String::new(), urls }) }
            }
            _ => Ok(Addresses { master: String::new(), urls: vec![self.single(text, names)?] }),
        }
    }

    /// The address of a single server; what its socket is not said to be, it looks like.
    fn single(&self, text: &str, names: &Names) -> Result<Url, Fault> {
        let Names { socket_type, topology, .. } = names;
        let is_said = self.given.contains_key(socket_type);
        let looks_like_path = text.starts_with('/');
        if looks_like_path && text.contains('?') {
            return Err(Fault::new("a path with a query", "give the path alone, and a password by REDIS_AUTH"));
        }
        if is_said && self.word(socket_type) == "unix" {
            if looks_like_path || !text.contains([':', ',', '@', '?']) {
                return Ok(url::at_path(text));
            }
            let fix = format!("give a path that begins with /, or {socket_type}=tcp");
            return Err(Fault::new(format!("no path, though {socket_type} is unix"), fix));
        }
        if looks_like_path && is_said {
            let what = if self.given.contains_key(names.url) { "a path" } else { "not set" };
            let fix = format!("give host:port, or {socket_type}=unix");
            return Err(Fault::new(format!("{what}, though {socket_type} is tcp"), fix));
        }
        if looks_like_path {
            return Ok(url::at_path(text));
        }
        url::tcp(text, 6379).map_err(|fault| {
            // A password may hold a comma, so this is a list only if it is no address.
            let list = || {
                let fix = format!("give one address, or {topology}=cluster, or {topology}=sentinel");
                Fault::new(format!("a list, though {topology} is single"), fix)
            };
            if text.contains(',') { list() } else { fault }
        })
    }

    fn listed(&self, part: &str, port: u16, topology: &str) -> Result<Url, Fault> {
        if part.starts_with('/') {
            let what = format!("a unix socket, which a {} has not", topology.to_ascii_lowercase());
            return Err(Fault::new(what, "give host:port,host:port"));
        }
        url::tcp(part, port)
    }

    fn same_credentials(&mut self, names: &Names, urls: &[Url]) -> Credentials {
        let mut said = urls.iter().map(|url| &url.credentials).filter(|credentials| **credentials != Credentials::None);
        let first = said.next().cloned().unwrap_or(Credentials::None);
        if said.any(|other| *other != first) {
            let is_sentinels = self.word(names.topology) == "SENTINEL";
            let login = if is_sentinels { &names.sentinels } else { &names.server };
            let fix = format!("give the same to all, or leave them out and give {}", login.auth);
            self.problem(names.url, "its addresses have different users or passwords", &fix);
        }
        first
    }

    fn same_database(&mut self, names: &Names, urls: &[Url]) -> u8 {
        let mut said = urls.iter().filter_map(|url| url.database);
        let first = said.next().unwrap_or(0);
        if said.any(|other| other != first) {
            self.problem(names.url, "its addresses have different databases", "give the same to all");
        } else if first != 0 && self.word(names.topology) == "CLUSTER" {
            self.problem(names.url, "a cluster has no database but 0", "leave the database out");
        }
        first
    }

    /// Those of the variables, else those of the URL.
    fn credentials(&mut self, names: &LoginNames, in_url: Credentials, url: &'static str) -> Credentials {
        let LoginNames { auth, file } = *names;
        let (secret, path) = (self.secret(auth), self.path(file));
        let (has_auth, has_file) = (!secret.reveal().is_empty(), !path.as_os_str().is_empty());
        if has_file && has_auth {
            self.problem(file, &format!("{auth} is set too"), "unset one of them");
        } else if has_file && in_url != Credentials::None {
            let what = format!("{url} holds a password too");
            self.problem(file, &what, "leave it to the file, which may say user:password");
        }
        if has_file {
            return Credentials::File(path);
        }
        if !has_auth {
            return in_url;
        }
        if in_url != Credentials::None {
            let what = format!("holds a password, in whose place that of {auth} is used");
            self.notices.push(Notice { name: url.to_owned(), what });
        }
        if secret.reveal().ends_with(['\n', '\r']) {
            self.problem(auth, "it ends in a line break", "remove it");
        }
        Credentials::parse(secret.reveal()).unwrap_or_else(|| {
            self.problem(auth, "it holds no password", "give password or user:password");
            Credentials::None
        })
    }

    fn tls(&mut self, names: &Names, urls: &[Url]) -> Option<Tls> {
        let by_url = urls.iter().any(|url| url.tls == Some(true));
        if by_url && urls.iter().any(|url| url.tls == Some(false)) {
            self.problem(names.url, "it has both redis:// and rediss://", "give rediss:// to all for TLS, or to none");
        }
        if by_url && self.given.contains_key(names.tls) && !self.bool(names.tls) {
            let fix = format!("unset it, or write redis:// in {}", names.url);
            self.problem(names.tls, &format!("{} says rediss://, which is TLS", names.url), &fix);
        }
        if !by_url && !self.bool(names.tls) {
            return None;
        }
        if urls.iter().any(|url| matches!(url.endpoint, Endpoint::Unix(_))) {
            let fix = format!("unset it, or give host:port as {}", names.url);
            self.problem(names.tls, "a unix socket has no TLS", &fix);
        }
        let [ca, cert, key, skip] = TLS_FILES;
        let (ca, client) = (self.file(ca), (self.file(cert), self.file(key)));
        match client {
            (Some(_), None) => self.problem(cert, &format!("set without {key}"), "give both or none"),
            (None, Some(_)) => self.problem(key, &format!("set without {cert}"), "give both or none"),
            _ => {}
        }
        Some(Tls { ca, client: client.0.zip(client.1), skip_hostname: self.bool(skip) })
    }

    /// As many as asked for, up to a bound: a manifest with more is not wrong.
    fn connections(&mut self, names: &Names) -> NonZeroUsize {
        const MOST: usize = 128;
        let asked = NonZeroUsize::new(self.int(names.connections)).expect("its lower bound is 1");
        if asked.get() > MOST {
            let what = format!("is more than {MOST}, which is taken");
            self.notices.push(Notice { name: names.connections.to_owned(), what });
        }
        asked.min(NonZeroUsize::new(MOST).expect("it is not 0"))
    }

    fn key_prefix(&mut self) -> String {
        const NAME: &str = "CACHE_KEY_PREFIX";
        const LONGEST_BYTES: usize = 256;
        let prefix = self.text(NAME);
        if prefix.len() > LONGEST_BYTES {
            self.problem(NAME, "too long", &format!("give at most {LONGEST_BYTES} bytes"));
        }
        prefix
    }

    fn expiration_jitter(&mut self, key_format: KeyFormat) -> Duration {
        const NAME: &str = "EXPIRATION_JITTER_MAX_SECONDS";
        const LONGEST_S: u64 = 366 * 86_400;
        if key_format != KeyFormat::Ratelimit {
            self.idle(NAME, "it is only read with TOLLKEEPER_KEY_FORMAT=ratelimit");
        }
        let seconds = u64::try_from(self.int::<i64>(NAME)).unwrap_or(0);
        if seconds > LONGEST_S {
            self.problem(NAME, "more than a year", &format!("give at most {LONGEST_S}"));
        }
        Duration::from_secs(seconds)
    }
}
