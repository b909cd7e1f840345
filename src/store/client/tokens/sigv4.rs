//! Signature version 4 of AWS, for requests whose signature is in their query.
//!
//! Only what a login needs: GET of `/` without a body, with `host` as the one signed header. The request is never sent;
//! its URL without the scheme is the password.

use ring::digest::{SHA256, digest};
use ring::hmac::{HMAC_SHA256, Key, sign};

use crate::base::text_encoding::{percent_encode, to_hex};
use crate::settings::secret::Secret;

/// Credentials of AWS.
#[derive(Clone, Debug)]
pub(super) struct AwsKeys {
    pub(super) id: Secret,
    pub(super) secret: Secret,
    pub(super) session_token: Option<Secret>,
}

/// Request that is to be presigned.
pub(super) struct RequestToPresign<'r> {
    pub(super) host: &'r str,
    pub(super) region: &'r str,
    pub(super) service: &'r str,
    /// Parameters of the query, sorted by name; all names are below `X-Amz-`.
    pub(super) query: &'r [(&'r str, &'r str)],
    /// Time of the signature, as `20150830T123600Z`.
    pub(super) time: &'r str,
    /// Validity of the signature in seconds, at most 7 days.
    pub(super) valid_s: u32,
}

impl RequestToPresign<'_> {
    /// Signs the request, and returns its URL without the scheme.
    pub(super) fn sign_url(&self, keys: &AwsKeys) -> Secret {
        let date = self.time.split('T').next().unwrap_or_default();
        let scope = format!("{date}/{}/{}/aws4_request", self.region, self.service);
        let query = self.encode_query(keys, &scope);
        let payload = to_hex(digest(&SHA256, b"").as_ref());
        let canonical = format!("GET\n/\n{query}\nhost:{}\n\nhost\n{payload}", self.host);
        let canonical = to_hex(digest(&SHA256, canonical.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{canonical}", self.time);
        let mut key = format!("AWS4{}", keys.secret.reveal()).into_bytes();
        for part in [date, self.region, self.service, "aws4_request"] {
            key = hmac(&key, part.as_bytes());
        }
        let signature = to_hex(&hmac(&key, text.as_bytes()));
        Secret::new(format!("{}/?{query}&X-Amz-Signature={signature}", self.host))
    }

    /// Encodes the query in the order of its names.
    fn encode_query(&self, keys: &AwsKeys, scope: &str) -> String {
        let credential = format!("{}/{scope}", keys.id.reveal());
        let valid_s = self.valid_s.to_string();
        let mut pairs: Vec<(&str, &str)> = self.query.to_vec();
        pairs.extend([("X-Amz-Algorithm", "AWS4-HMAC-SHA256"), ("X-Amz-Credential", &credential)]);
        pairs.extend([("X-Amz-Date", self.time), ("X-Amz-Expires", &valid_s)]);
        pairs.extend(keys.session_token.as_ref().map(|token| ("X-Amz-Security-Token", token.reveal())));
        pairs.push(("X-Amz-SignedHeaders", "host"));
        let pairs: Vec<String> =
            pairs.iter().map(|(name, value)| format!("{}={}", percent_encode(name), percent_encode(value))).collect();
        pairs.join("&")
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    sign(&Key::new(HMAC_SHA256, key), text).as_ref().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

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
