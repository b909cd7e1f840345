//! Identities that clouds give to a process, as logins of Redis: IAM of AWS, Google Cloud and Entra of Azure.
//!
//! A deployment names the cloud and the user; where its credentials come from is read from the variables of that cloud,
//! with their standard names, which a pod or machine already has. They are read only for a deployment that asks for
//! them. The first source that is set counts, in the order of AWS's own libraries.
//!
//! Decides: which identity of a cloud is used (IAM, Entra), and in which order.

use std::net::IpAddr;
use std::path::PathBuf;

use super::secret::Secret;
use super::setting::{AnySetting, Setting, settings};
use super::value::choices;
use super::values::Values;
use crate::base::named_enum::named_enum;

settings! { "Identities of clouds";
    TOLLKEEPER_REDIS_AWS_IAM_SERVICE: AwsCacheService = "elasticache",
        "service that checks tokens of REDIS_AWS_IAM_AUTH" .only_read("with REDIS_AWS_IAM_AUTH=true");
    TOLLKEEPER_REDIS_IDENTITY_USER: String = "",
        "user for TOLLKEEPER_REDIS_IDENTITY=azure; empty: the object id in the token"
        .only_read("with TOLLKEEPER_REDIS_IDENTITY=azure");
    AWS_REGION: String = "", "region of the cache, without REDIS_AWS_IAM_REGION, and of STS";
    AWS_DEFAULT_REGION: String = "", "AWS_REGION under its other name";
    AWS_ACCESS_KEY_ID: Option<Secret> = "", "access key; the first source of credentials";
    AWS_SECRET_ACCESS_KEY: Option<Secret> = "", "secret of that access key";
    AWS_SESSION_TOKEN: Option<Secret> = "", "session token of that access key";
    AWS_WEB_IDENTITY_TOKEN_FILE: Option<PathBuf> = "", "file with a web identity token; the second source";
    AWS_ROLE_ARN: String = "", "role that the web identity assumes";
    AWS_ROLE_SESSION_NAME: String = "tollkeeper", "name of that session";
    AWS_ENDPOINT_URL_STS: String = "", "URL of STS; empty: that of the region";
    AWS_CONTAINER_CREDENTIALS_FULL_URI: Option<Secret> = "", "URL of a pod's or task's credentials; the third source";
    AWS_CONTAINER_CREDENTIALS_RELATIVE_URI: Option<Secret> = "", "path of the credentials of an ECS task";
    AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE: Option<PathBuf> = "", "file with the token that this URL needs";
    AWS_CONTAINER_AUTHORIZATION_TOKEN: Option<Secret> = "", "token that this URL needs";
    AWS_EC2_METADATA_SERVICE_ENDPOINT: String = "http://169.254.169.254", "instance metadata of EC2; the last source";
    AWS_EC2_METADATA_DISABLED: String = "false", "true: do not ask the instance metadata of EC2";
    GCE_METADATA_HOST: String = "metadata.google.internal", "host, or host:port, of the metadata server of Google Cloud";
    AZURE_CLIENT_ID: String = "", "client id of the identity in Entra, or of a user-assigned managed identity";
    AZURE_TENANT_ID: String = "", "tenant of the identity in Entra, with a token file";
    AZURE_FEDERATED_TOKEN_FILE: Option<PathBuf> = "",
        "file with the token of a workload identity; not set: managed identity";
    AZURE_AUTHORITY_HOST: String = "https://login.microsoftonline.com/", "URL of Entra, with a token file";
    TOLLKEEPER_AZURE_METADATA_URL: String = "http://169.254.169.254", "instance metadata of Azure, for managed identities"
        .only_read("with TOLLKEEPER_REDIS_IDENTITY=azure and without AZURE_FEDERATED_TOKEN_FILE");
}

named_enum! {
    /// Cloud whose access token is the password, other than AWS.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TokenCloud {
        /// None: the deployment has a password, or no login.
        None = "none",
        /// Google Cloud: Memorystore.
        Google = "google",
        /// Azure: Azure Managed Redis.
        Azure = "azure",
    }
}

choices! { TokenCloud }

named_enum! {
    /// Service of AWS that checks a token.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum AwsCacheService {
        /// ElastiCache.
        ElastiCache = "elasticache",
        /// MemoryDB.
        MemoryDb = "memorydb",
    }
}

choices! { AwsCacheService }

/// Identity that logs in to a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudIdentity {
    /// Variable that asks for the identity, for messages and metrics.
    pub setting: &'static str,
    /// Source of its tokens.
    pub source: TokenSourceSettings,
}

/// Source of the tokens of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSourceSettings {
    /// Tokens signed here with credentials of AWS.
    Aws(AwsIamSettings),
    /// Access tokens of the metadata server of Google Cloud, at `host` or `host:port`.
    Google {
        /// Host of the metadata server.
        metadata_host: String,
    },
    /// Access tokens of Entra.
    Azure(EntraSettings),
}

/// Login of an IAM user of ElastiCache or MemoryDB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsIamSettings {
    /// Service that checks the token.
    pub service: AwsCacheService,
    /// Name of the cache in lower case: the host that is signed.
    pub cache_name: String,
    /// Id of the user.
    pub user_id: String,
    /// Region of the cache.
    pub region: String,
    /// `true` for a serverless cache.
    pub is_serverless: bool,
    /// Source of the credentials.
    pub credentials: AwsCredentialSource,
}

/// Source of credentials of AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AwsCredentialSource {
    /// Keys from the environment.
    Keys {
        /// Id of the access key.
        id: Secret,
        /// Its secret.
        secret: Secret,
        /// Session token of temporary keys.
        session_token: Option<Secret>,
    },
    /// A role that a web identity assumes at STS.
    WebIdentity {
        /// File with the token.
        token_file: PathBuf,
        /// The role.
        role_arn: String,
        /// Name of the session.
        session_name: String,
        /// URL of STS.
        sts_url: String,
    },
    /// Credentials of a pod or of a task of ECS.
    Container {
        /// URL of the credentials. On ECS, whoever knows its path gets them.
        url: Secret,
        /// Token that the URL needs.
        authorization: Option<ContainerAuthorization>,
    },
    /// Role of an instance of EC2, by version 2 of the instance metadata, below this URL.
    InstanceMetadata(String),
}

/// Token that the URL of container credentials needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerAuthorization {
    /// File with the token.
    File(PathBuf),
    /// The token.
    Token(Secret),
}

/// Login of an identity of Entra.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntraSettings {
    /// User of Redis; `None` means the object id in the token.
    pub user: Option<String>,
    /// Source of the access tokens.
    pub source: EntraTokenSource,
}

/// Source of access tokens of Entra.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntraTokenSource {
    /// Managed identity, by the instance metadata.
    ManagedIdentity {
        /// URL of the instance metadata, without a path.
        metadata_url: String,
        /// Client id of a user-assigned identity.
        client_id: Option<String>,
    },
    /// Workload identity: a federated token from a file.
    WorkloadIdentity {
        /// URL of Entra, that ends in `/`.
        authority: String,
        /// Tenant of the identity.
        tenant_id: String,
        /// Client id of the identity.
        client_id: String,
        /// File with the federated token.
        token_file: PathBuf,
    },
}

/// The variables that give the identity of one deployment.
pub(crate) struct IdentityVariables {
    pub(crate) aws_auth: &'static Setting<bool>,
    pub(crate) aws_cache_name: &'static Setting<String>,
    pub(crate) aws_user_id: &'static Setting<String>,
    pub(crate) aws_is_serverless: &'static Setting<bool>,
    pub(crate) aws_region: &'static Setting<String>,
    pub(crate) cloud: &'static Setting<TokenCloud>,
}

impl IdentityVariables {
    /// Reads the identity; `None` if no variable asks for one.
    pub(crate) fn read_identity(&self, values: &mut Values) -> Option<CloudIdentity> {
        let (is_aws, cloud) = (values.get(self.aws_auth), values.get(self.cloud));
        if is_aws && cloud != TokenCloud::None {
            values.add_problem(self.cloud, format!("{} is set too", self.aws_auth.name()), "unset one of them");
        }
        let source = match cloud {
            _ if is_aws => TokenSourceSettings::Aws(self.read_aws_iam_settings(values)?),
            TokenCloud::None => return None,
            TokenCloud::Google => TokenSourceSettings::Google { metadata_host: read_google_metadata_host(values) },
            TokenCloud::Azure => TokenSourceSettings::Azure(Self::read_entra_settings(values)?),
        };
        let setting = if is_aws { self.aws_auth.name() } else { self.cloud.name() };
        Some(CloudIdentity { setting, source })
    }

    fn read_aws_iam_settings(&self, values: &mut Values) -> Option<AwsIamSettings> {
        let region = [values.get(self.aws_region), values.get(&AWS_REGION), values.get(&AWS_DEFAULT_REGION)]
            .into_iter()
            .find(|region| !region.is_empty())
            .unwrap_or_default();
        let (cache_name, user_id) = (values.get(self.aws_cache_name), values.get(self.aws_user_id));
        if let Some(what) = find_name_problem(&cache_name, "-_.") {
            values.add_problem(self.aws_cache_name, what, "give the name of the cache or cluster");
        } else if let Some(what) = find_name_problem(&user_id, "-_.") {
            values.add_problem(self.aws_user_id, what, "give the id of the user, in IAM mode");
        } else if let Some(what) = find_name_problem(&region, "-") {
            values.add_problem(self.aws_region, what, "give the region, or set AWS_REGION");
        } else {
            return Some(AwsIamSettings {
                service: values.get(&TOLLKEEPER_REDIS_AWS_IAM_SERVICE),
                cache_name: cache_name.to_ascii_lowercase(),
                user_id,
                is_serverless: values.get(self.aws_is_serverless),
                credentials: read_aws_credential_source(values, self.aws_auth, &region)?,
                region,
            });
        }
        None
    }

    fn read_entra_settings(values: &mut Values) -> Option<EntraSettings> {
        let client_id = Some(values.get(&AZURE_CLIENT_ID)).filter(|id| !id.is_empty());
        let user = Some(values.get(&TOLLKEEPER_REDIS_IDENTITY_USER)).filter(|user| !user.is_empty());
        let Some(token_file) = values.get(&AZURE_FEDERATED_TOKEN_FILE) else {
            let metadata_url = read_url(values, &TOLLKEEPER_AZURE_METADATA_URL, PlaintextPolicy::Allowed)?;
            return Some(EntraSettings { user, source: EntraTokenSource::ManagedIdentity { metadata_url, client_id } });
        };
        let tenant_id = values.get(&AZURE_TENANT_ID);
        if let Some(what) = find_name_problem(&tenant_id, "-.") {
            values.add_problem(&AZURE_TENANT_ID, what, "give the tenant, or unset the token file");
            return None;
        }
        let Some(client_id) = client_id else {
            values.add_problem(&AZURE_CLIENT_ID, "not set", "give the client id, or unset the token file");
            return None;
        };
        let authority = format!("{}/", read_url(values, &AZURE_AUTHORITY_HOST, PlaintextPolicy::OnLoopback)?);
        let source = EntraTokenSource::WorkloadIdentity { authority, tenant_id, client_id, token_file };
        Some(EntraSettings { user, source })
    }
}

/// Reads the first source of credentials of AWS that is set.
fn read_aws_credential_source(
    values: &mut Values,
    asked_by: &Setting<bool>,
    region: &str,
) -> Option<AwsCredentialSource> {
    match (values.get(&AWS_ACCESS_KEY_ID), values.get(&AWS_SECRET_ACCESS_KEY)) {
        (Some(id), Some(secret)) => {
            let session_token = values.get(&AWS_SESSION_TOKEN);
            return Some(AwsCredentialSource::Keys { id, secret, session_token });
        }
        (None, None) => {}
        (id, _) => {
            let (lone, missing): (&dyn AnySetting, &str) = match id {
                Some(_) => (&AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.name()),
                None => (&AWS_SECRET_ACCESS_KEY, AWS_ACCESS_KEY_ID.name()),
            };
            values.add_problem(lone, format!("set without {missing}"), "give both or none");
            return None;
        }
    }
    if let Some(token_file) = values.get(&AWS_WEB_IDENTITY_TOKEN_FILE) {
        let role_arn = values.get(&AWS_ROLE_ARN);
        if role_arn.is_empty() {
            values.add_problem(&AWS_ROLE_ARN, "not set with AWS_WEB_IDENTITY_TOKEN_FILE", "give the role to assume");
            return None;
        }
        let session_name = values.get(&AWS_ROLE_SESSION_NAME);
        let sts_url = match values.get(&AWS_ENDPOINT_URL_STS).as_str() {
            "" if region.starts_with("cn-") => format!("https://sts.{region}.amazonaws.com.cn"),
            "" => format!("https://sts.{region}.amazonaws.com"),
            _ => read_url(values, &AWS_ENDPOINT_URL_STS, PlaintextPolicy::OnLoopback)?,
        };
        return Some(AwsCredentialSource::WebIdentity { token_file, role_arn, session_name, sts_url });
    }
    if let Some(url) = read_container_credentials_url(values) {
        return Some(AwsCredentialSource::Container { url: url?, authorization: read_container_authorization(values) });
    }
    if values.get(&AWS_EC2_METADATA_DISABLED).trim().eq_ignore_ascii_case("true") {
        let fix = "give keys, a web identity or container credentials, or unset AWS_EC2_METADATA_DISABLED";
        values.add_problem(asked_by, "there is no source of credentials of AWS", fix);
        return None;
    }
    read_url(values, &AWS_EC2_METADATA_SERVICE_ENDPOINT, PlaintextPolicy::Allowed)
        .map(AwsCredentialSource::InstanceMetadata)
}

/// Reads the URL of container credentials; `None` if none is set, `Some(None)` if it may not be used.
fn read_container_credentials_url(values: &mut Values) -> Option<Option<Secret>> {
    let path = values.get(&AWS_CONTAINER_CREDENTIALS_RELATIVE_URI);
    if let Some(path) = path.as_ref().map(Secret::reveal).filter(|path| path.starts_with('/')) {
        return Some(Some(Secret::new(format!("http://169.254.170.2{path}"))));
    }
    let url = values.get(&AWS_CONTAINER_CREDENTIALS_FULL_URI).filter(|url| !url.reveal().is_empty())?;
    let setting = &AWS_CONTAINER_CREDENTIALS_FULL_URI;
    Some(check_secret_url(values, setting, url.reveal(), PlaintextPolicy::OnContainerHosts).map(Secret::new))
}

fn read_container_authorization(values: &Values) -> Option<ContainerAuthorization> {
    let file = values.get(&AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE).map(ContainerAuthorization::File);
    file.or_else(|| values.get(&AWS_CONTAINER_AUTHORIZATION_TOKEN).map(ContainerAuthorization::Token))
}

fn read_google_metadata_host(values: &mut Values) -> String {
    let host = values.get(&GCE_METADATA_HOST);
    if find_name_problem(&host, "-.:[]").is_some() {
        values.add_problem(&GCE_METADATA_HOST, "not a host", "give host or host:port, or unset it");
    }
    host
}

/// Hosts to which secrets may travel without TLS.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PlaintextPolicy {
    /// Any: the service is only reachable on the machine.
    Allowed,
    /// This machine.
    OnLoopback,
    /// This machine, and the addresses of agents of ECS and EKS.
    OnContainerHosts,
}

/// Addresses of agents of ECS and EKS, which have no TLS.
const CONTAINER_CREDENTIAL_HOSTS: [&str; 3] = ["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// Reads a URL without its last `/`; adds a problem if a secret must not be sent there.
fn read_url(values: &mut Values, setting: &Setting<String>, plaintext: PlaintextPolicy) -> Option<String> {
    let url = values.get(setting);
    check_secret_url(values, setting, &url, plaintext)
}

fn check_secret_url(
    values: &mut Values,
    setting: &dyn AnySetting,
    url: &str,
    plaintext: PlaintextPolicy,
) -> Option<String> {
    let fix = "give http://HOST or https://HOST, with what follows it";
    let is_plain = url.len() <= 1000 && url.bytes().all(|b| b.is_ascii_graphic() && !b"\"<>\\^`{|}@".contains(&b));
    let parsed = url.parse::<http::Uri>().ok().filter(|_| is_plain);
    let Some((scheme, host)) = parsed.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.host()?))) else {
        values.add_problem(setting, "not a URL", fix);
        return None;
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let may_be_plaintext = match plaintext {
        PlaintextPolicy::Allowed => true,
        PlaintextPolicy::OnLoopback => is_loopback,
        PlaintextPolicy::OnContainerHosts => is_loopback || CONTAINER_CREDENTIAL_HOSTS.contains(&host),
    };
    if scheme == "https" || scheme == "http" && may_be_plaintext {
        return Some(url.trim_end_matches('/').to_owned());
    }
    values.add_problem(setting, "a secret would be sent to another machine without TLS", "give an https:// URL");
    None
}

/// Returns what is wrong with a text that should be 1 to 253 letters, digits and characters of `others`.
fn find_name_problem(text: &str, others: &str) -> Option<String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || others.contains(c);
    match text.len() {
        0 => Some("not set".to_owned()),
        1..=253 if text.chars().all(is_allowed) => None,
        1..=253 => Some(format!("it has other characters than letters, digits and {others}")),
        _ => Some("it is longer than 253 characters".to_owned()),
    }
}
