//! Tokens of cloud identities: renewal, signatures, bounds.

mod renewal {
    use std::time::Duration;

    use tollkeeper::store::client::tokens::pause_until_renewal;

    #[test]
    fn token_is_renewed_after_two_thirds_of_any_lifetime() {
        let pause = |lifetime_s| pause_until_renewal(Duration::from_secs(lifetime_s)).as_secs();
        assert_eq!([0, 900, 30_000].map(pause), [1, 600, 20_000]);
        assert_eq!([u64::MAX, u64::MAX / 2 + 1].map(pause), [6 * 3600; 2]);
    }
}

mod aws {
    use tollkeeper::settings::cloud_identity::{AwsCacheService, AwsCredentialSource, AwsIamSettings};
    use tollkeeper::settings::secret::Secret;
    use tollkeeper::store::client::tokens::aws::{AwsKeys, AwsTokenSigner, Credentials, RequestToPresign};

    const NOW_S: u64 = 1_800_000_000;

    /// A signer with credentials that end in 25 minutes, and a source that cannot be reached.
    fn signer() -> AwsTokenSigner {
        let url = Secret::new("http://127.0.0.1:1/");
        let mut signer = AwsTokenSigner::new(AwsIamSettings {
            service: AwsCacheService::ElastiCache,
            cache_name: "my-cache".to_owned(),
            user_id: "cache-user".to_owned(),
            region: "eu-west-1".to_owned(),
            is_serverless: false,
            credentials: AwsCredentialSource::Container { url, authorization: None },
        });
        signer.keep_longest(credentials("first", NOW_S + 1500));
        signer
    }

    fn credentials(id: &str, expires_at_s: u64) -> Credentials {
        let keys = AwsKeys { id: Secret::new(id), secret: Secret::new("secret"), session_token: None };
        Credentials { keys, expires_at_s }
    }

    #[test]
    fn old_credentials_sign_a_token_only_when_it_is_due() {
        let mut signer = signer();
        let mut fetch = |at_s: u64| {
            let fetched = signer.fetch(NOW_S + at_s).map_err(|error| error.0)?;
            assert_eq!(fetched.problem.map(|problem| problem.expires_at_s), Some(NOW_S + 1500));
            Ok::<_, String>(fetched.token.map(|token| token.expires_at_s - NOW_S))
        };
        let signed = [0, 1, 60, 599, 600, 700, 1199, 1200].map(&mut fetch);
        let expected = [Some(900), None, None, None, Some(1500), None, None, Some(1500)];
        assert_eq!(signed, expected.map(Ok));
        assert!(fetch(1500).is_err_and(|error| error.contains("does not answer")));
    }

    #[test]
    fn credentials_that_end_later_stay() {
        let mut signer = signer();
        signer.keep_longest(credentials("second", NOW_S + 1499));
        signer.keep_longest(credentials("third", NOW_S + 1500));
        signer.keep_longest(credentials("fourth", NOW_S + 60));
        assert_eq!(signer.last.map(|last| last.keys.id.reveal().to_owned()).as_deref(), Some("third"));
    }

    const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";

    fn keys(session_token: Option<&str>) -> AwsKeys {
        AwsKeys {
            id: Secret::new("AKIDEXAMPLE"),
            secret: Secret::new(SECRET),
            session_token: session_token.map(Secret::new),
        }
    }

    /// `get-vanilla-query-order-key-case` of the test suite of AWS.
    #[test]
    fn signature_is_that_of_the_published_suite() {
        let request = RequestToPresign {
            host: "example.amazonaws.com",
            region: "us-east-1",
            service: "service",
            query: &[("Param1", "value1"), ("Param2", "value2")],
            time: "20150830T123600Z",
            valid_s: 3600,
        };
        let url = request.sign_url(&keys(None));
        let signature = "86012e2c9ad4d77369f5d81c11f75158aae4f895a085212cc6d3f923d300bed5";
        assert_eq!(url.reveal().rsplit_once('=').map(|(_, signature)| signature), Some(signature));
    }

    /// URLs that `SigV4QueryAuth` of botocore signs.
    #[test]
    fn url_is_that_of_botocore() {
        let sign = |service, query: &[(&str, &str)], session_token| {
            let (host, region, time) = ("my-cache", "eu-west-1", "20260102T030405Z");
            let request = RequestToPresign { host, region, service, query, time, valid_s: 900 };
            let url = request.sign_url(&keys(session_token)).reveal().to_owned();
            let (start, signature) = url.rsplit_once('=').expect("a signature");
            (start.to_owned(), signature.to_owned())
        };
        let plain = [("Action", "connect"), ("User", "cache-user.1")];
        let serverless = [("Action", "connect"), ("ResourceType", "ServerlessCache"), ("User", "cache-user.1")];
        let token = Some("Fwo+/=token==");
        let (_, keys_only) = sign("elasticache", &plain, None);
        assert_eq!(keys_only, "5d060ea859e9d1601cc79726768cc28940c9c9a36035f79935e8cf0db06b01c1");
        let (_, memorydb) = sign("memorydb", &plain, token);
        assert_eq!(memorydb, "a82155e79268a6677d0b0272b420cdefceb9d9ad0db357a0d2e516b4c4c99d63");
        let (start, with_token) = sign("elasticache", &serverless, token);
        // The order of the names is that of the signature.
        assert!(start.starts_with("my-cache/?Action=connect&ResourceType=ServerlessCache&User=cache-user.1&X-Amz-"));
        assert!(start.contains("&X-Amz-Security-Token=Fwo%2B%2F%3Dtoken%3D%3D&"), "{start}");
        assert_eq!(with_token, "0d9dc629b3987f512a6024f3fc636a730a28798bf47848a84ce7a50acde17679");
    }
}

mod google {
    use tollkeeper::store::client::tokens::google::parse_access_token;

    const MAX_LIFETIME_S: u64 = 7 * 86_400;

    const SERVICE_NAME: &str = "the metadata server of Google Cloud";

    #[test]
    fn lifetime_of_any_length_is_bounded() {
        for lifetime in ["18446744073709551615", "\"18446744073709551615\"", "604801"] {
            let reply = format!("{{\"access_token\":\"token\",\"expires_in\":{lifetime}}}");
            let reply = serde_json::from_str(&reply).expect("it is JSON");
            let token = parse_access_token(SERVICE_NAME, &reply, 1000).expect("it is a token");
            assert_eq!(token.expires_at_s, 1000 + MAX_LIFETIME_S, "{lifetime}");
        }
    }
}

mod files {
    use tollkeeper::store::client::tokens::token_fetch::read_token_file;

    const MAX_TOKEN_BYTES: usize = 32 * 1024;

    #[test]
    fn file_that_is_too_long_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        let read = |length: usize| {
            std::fs::write(file.path(), "t".repeat(length)).expect("a file can be written");
            read_token_file("SETTING", file.path()).map(|token| token.reveal().len()).map_err(|error| error.0)
        };
        assert_eq!(read(MAX_TOKEN_BYTES), Ok(MAX_TOKEN_BYTES));
        let error = read(MAX_TOKEN_BYTES + 1).expect_err("it is too long");
        assert!(error.contains("SETTING") && error.contains("more than 32768 bytes"), "{error}");
    }
}
