//! A plain connection to a Redis as any user; the only command of its own is `AUTH`.
//!
//! Nothing is retried, and neither redirections nor errors are handled: the suites test exactly those.

use std::fs;
use std::time::Duration;

use ::redis::{Client, ClientTlsConfig, Cmd, Connection, IntoConnectionInfo, RedisResult, TlsCertificates, Value};

use super::REPLY_TIMEOUT;
use super::certificates::Certificates;

/// A connection in RESP2.
pub struct RedisClient(Connection);

impl RedisClient {
    /// Connects to `redis://[USER:PASSWORD@]HOST:PORT` or `redis+unix:///PATH`.
    ///
    /// `timeout` bounds connecting and each reply.
    pub fn connect(url: &str, timeout: Duration) -> RedisResult<Self> {
        let info = url.into_connection_info()?;
        let settings = info.redis_settings().clone().set_skip_set_lib_name();
        Self::open(&Client::open(info.set_redis_settings(settings))?, timeout)
    }

    /// Connects with TLS to a port of `host`, trusting the authority in that file of the certificates, and showing
    /// the client's certificate if `mutual`.
    pub fn connect_tls(
        (host, port): (&str, u16),
        certificates: &Certificates,
        authority: &str,
        mutual: bool,
    ) -> RedisResult<Self> {
        let pem = |name| fs::read(certificates.path(name)).expect("the certificates have that file");
        let client_tls =
            mutual.then(|| ClientTlsConfig { client_cert: pem("client.crt"), client_key: pem("client.key") });
        let trusted = TlsCertificates { client_tls, root_cert: Some(pem(authority)) };
        let client = Client::build_with_tls(format!("rediss://{host}:{port}"), trusted)?;
        Self::open(&client, REPLY_TIMEOUT)
    }

    fn open(client: &Client, timeout: Duration) -> RedisResult<Self> {
        let mut caller = Self(client.get_connection_with_timeout(timeout)?);
        caller.set_timeout(timeout)?;
        Ok(caller)
    }

    /// Changes the timeout of replies.
    pub fn set_timeout(&mut self, timeout: Duration) -> RedisResult<()> {
        self.0.set_read_timeout(Some(timeout))?;
        self.0.set_write_timeout(Some(timeout))
    }

    /// The reply to a command.
    pub fn command(&mut self, words: &[&str]) -> RedisResult<Value> {
        command(words).query(&mut self.0)
    }

    /// Sends a command and leaves its reply for [`RedisClient::receive`].
    pub fn send(&mut self, words: &[&str]) -> RedisResult<()> {
        self.0.send_packed_command(&command(words).get_packed_command())
    }

    /// Reply to the oldest command sent with [`RedisClient::send`].
    pub fn receive(&mut self) -> RedisResult<Value> {
        self.0.recv_response()?.extract_error()
    }
}

fn command(words: &[&str]) -> Cmd {
    let mut command = Cmd::new();
    for word in words {
        command.arg(*word);
    }
    command
}
