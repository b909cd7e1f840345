//! Identities of clouds in an environment: sources of credentials, contradictions, and no secret in any output.

use tollkeeper::settings::cloud_identity::{
    AwsCacheService, AwsCredentialSource, AwsIamSettings, CloudIdentity, TokenSourceSettings,
};
use tollkeeper::settings::credentials::Credentials;

use super::redis::redis;
use super::{notices, problems};

/// The identity of the counters' Redis.
fn identity(vars: &[(&str, &str)]) -> CloudIdentity {
    match redis(vars).main.credentials {
        Credentials::Identity(identity) => *identity,
        other => panic!("{other:?}"),
    }
}

const IAM: [(&str, &str); 5] = [
    ("REDIS_URL", "rediss://cache:6379"),
    ("REDIS_AWS_IAM_AUTH", "true"),
    ("REDIS_AWS_IAM_CACHE_NAME", "My-Cache"),
    ("REDIS_AWS_IAM_USER_ID", "limits"),
    ("AWS_REGION", "eu-west-1"),
];

fn with(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    IAM.iter().filter(|(name, _)| more.iter().all(|(other, _)| other != name)).chain(more).copied().collect()
}

#[test]
fn first_source_of_aws_credentials_counts() {
    let source = |more: &[(&'static str, &'static str)]| match identity(&with(more)).source {
        TokenSourceSettings::Aws(aws) => aws,
        other => panic!("{other:?}"),
    };
    let aws = source(&[]);
    assert_eq!((&*aws.cache_name, &*aws.user_id, &*aws.region), ("my-cache", "limits", "eu-west-1"));
    assert_eq!((aws.service, aws.is_serverless), (AwsCacheService::ElastiCache, false));
    assert_eq!(aws.credentials, AwsCredentialSource::InstanceMetadata("http://169.254.169.254".into()));
    let container = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials");
    let url = |aws: AwsIamSettings| match aws.credentials {
        AwsCredentialSource::Container { url, .. } => url.reveal().to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(url(source(&[container])), "http://169.254.170.23/v1/credentials");
    let relative = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/1");
    assert_eq!(url(source(&[relative])), "http://169.254.170.2/v2/credentials/1");
    // Whoever knows the path gets the credentials.
    let shown = format!("{:?}", redis(&with(&[relative])));
    assert!(!shown.contains("v2/credentials"), "{shown}");
    let web = [("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"), ("AWS_ROLE_ARN", "arn:aws:iam::1:role/limits")];
    let sts = |aws: AwsIamSettings| match aws.credentials {
        AwsCredentialSource::WebIdentity { sts_url, .. } => sts_url,
        other => panic!("{other:?}"),
    };
    assert_eq!(sts(source(&[web[0], web[1], container])), "https://sts.eu-west-1.amazonaws.com");
    let china = ("REDIS_AWS_IAM_REGION", "cn-north-1");
    assert_eq!(sts(source(&[web[0], web[1], china])), "https://sts.cn-north-1.amazonaws.com.cn");
    let keys = [("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE"), ("AWS_SECRET_ACCESS_KEY", "s3cret")];
    let of_keys = source(&[keys[0], keys[1], web[0], web[1]]);
    assert!(matches!(of_keys.credentials, AwsCredentialSource::Keys { session_token: None, .. }));
    let all = format!("{:?}", redis(&with(&keys)));
    assert!(!all.contains("s3cret") && !all.contains("AKIDEXAMPLE"), "{all}");
    let more = [("REDIS_AWS_IAM_SERVERLESS", "true"), ("TOLLKEEPER_REDIS_AWS_IAM_SERVICE", "memorydb")];
    assert_eq!((source(&more).service, source(&more).is_serverless), (AwsCacheService::MemoryDb, true));
}

#[test]
fn identities_that_cannot_log_in_are_problems() {
    for (more, expected) in [
        (&[("REDIS_AWS_IAM_CACHE_NAME", "")][..], "REDIS_AWS_IAM_CACHE_NAME"),
        (&[("REDIS_AWS_IAM_USER_ID", "a b")], "REDIS_AWS_IAM_USER_ID"),
        (&[("AWS_REGION", "")], "REDIS_AWS_IAM_REGION"),
        (&[("AWS_REGION", "eu_west_1")], "other characters than letters, digits and -"),
        (&[("REDIS_AUTH", "word")], "REDIS_AUTH gives a password too"),
        (&[("REDIS_AUTH_FILE", "/word")], "REDIS_AUTH_FILE gives a password too"),
        (&[("REDIS_URL", "rediss://ann:word@cache:6379")], "REDIS_URL gives a password too"),
        (&[("TOLLKEEPER_REDIS_IDENTITY", "google")], "REDIS_AWS_IAM_AUTH is set too"),
        (&[("AWS_ACCESS_KEY_ID", "AKID")], "AWS_SECRET_ACCESS_KEY"),
        (&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")], "AWS_ROLE_ARN"),
        (&[("AWS_EC2_METADATA_DISABLED", "true")], "there is no source of credentials"),
        (&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://evil.example/")], "without TLS"),
        (&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "ftp//x")], "not a URL"),
    ] {
        let found = problems(&with(more));
        assert!(found.len() == 1 && found[0].contains(expected), "{more:?}: {found:?}");
    }
    let azure = [("REDIS_URL", "rediss://cache:6379"), ("TOLLKEEPER_REDIS_IDENTITY", "azure")];
    let file = ("AZURE_FEDERATED_TOKEN_FILE", "/token");
    assert!(problems(&[azure[0], azure[1], file])[0].contains("AZURE_TENANT_ID"));
    let tenant = ("AZURE_TENANT_ID", "tenant");
    assert!(problems(&[azure[0], azure[1], file, tenant])[0].contains("AZURE_CLIENT_ID"));
}

#[test]
fn variables_of_clouds_are_not_read_without_an_identity() {
    let vars = [
        ("REDIS_URL", "cache:6379"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "not a url"),
        ("AZURE_CLIENT_ID", "client"),
        ("REDIS_AWS_IAM_CACHE_NAME", "cache"),
    ];
    assert_eq!(redis(&vars).main.credentials, Credentials::None);
    let noted =
        "REDIS_AWS_IAM_CACHE_NAME has no effect: it is only read with counters in Redis and REDIS_AWS_IAM_AUTH=true";
    assert_eq!(notices(&vars), [noted]);
    let plain = [("REDIS_URL", "cache:6379"), ("TOLLKEEPER_REDIS_IDENTITY", "google")];
    assert!(notices(&plain)[0].contains("without TLS"), "{:?}", notices(&plain));
    assert!(matches!(identity(&plain).source, TokenSourceSettings::Google { .. }));
}
