//! Queries of the system's DNS servers for SRV records, which the system's own resolver does not answer.
//!
//! Servers and search list are those of `/etc/resolv.conf`, read for each query. All servers are asked at once, by UDP,
//! and by TCP if the answer does not fit. The first answer counts; a failure counts if there is nothing else. `domain`
//! writes and parses the messages. Nothing is cached, and the caller bounds the time.
//!
//! Decides: the DNS query for an SRV record, and no more.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use domain::base::iana::{Rcode, Rtype};
use domain::base::{Message, MessageBuilder, Name, ToName as _};
use domain::rdata::Srv;
use futures_util::future::select_ok;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::base::random::random_u64;

const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;
/// Time without an answer after which a query is sent again.
const RESEND_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of DNS servers that are asked.
const MAX_DNS_SERVERS: usize = 8;
/// Maximum size of an answer by UDP; larger ones are cut and come by TCP.
const MAX_UDP_ANSWER_BYTES: usize = 4096;

/// A server that an SRV record names.
#[derive(Debug, PartialEq, Eq)]
pub struct SrvTarget {
    /// Name with a dot at its end; only a dot says that the service is not offered.
    pub host: String,
    /// Port of the server.
    pub port: u16,
}

/// Queries the SRV records of `name`, in the order of the answer.
///
/// # Errors
/// The text says why there are no records.
pub(super) async fn query_srv_records(name: &str) -> Result<Vec<SrvTarget>, String> {
    let content = fs::read(RESOLV_CONF).map_err(|error| format!("no resolver: {error}"))?;
    let (conf, problems) = resolv_conf::Config::parse_with_errors(&content);
    for error in problems {
        tracing::warn!(%error, "error parsing resolv.conf");
    }
    let servers: Vec<SocketAddr> = conf
        .nameservers
        .iter()
        .map(|server| SocketAddr::new(IpAddr::from(server), DNS_PORT))
        .take(MAX_DNS_SERVERS)
        .collect();
    if servers.is_empty() {
        return Err("no resolver: no nameservers found in config".to_owned());
    }
    let mut problem = format!("{name:?} is not the name of a record");
    for candidate in names_to_try(name, &conf) {
        match query_dns_servers(&servers, &candidate).await {
            Ok(targets) if !targets.is_empty() => return Ok(targets),
            Ok(_) => problem = format!("no records found for {candidate}"),
            Err(error) => problem = error.to_string(),
        }
    }
    Err(problem)
}

/// The names that `name` may stand for, in the order of trial: itself, before those of the search list if it has at
/// least `ndots` dots. A name that ends with a dot stands for itself only.
pub fn names_to_try(name: &str, conf: &resolv_conf::Config) -> Vec<Name<Vec<u8>>> {
    let itself = Name::vec_from_str(name).ok();
    if name.ends_with('.') {
        return itself.into_iter().collect();
    }
    let dots = name.bytes().filter(|byte| *byte == b'.').count();
    let suffixes = conf.get_system_domain().into_iter().chain(conf.get_last_search_or_domain().cloned());
    let searched = suffixes.filter_map(|suffix| Name::vec_from_str(&format!("{name}.{suffix}")).ok());
    let mut names: Vec<Name<Vec<u8>>> = Vec::new();
    for candidate in searched {
        if !names.contains(&candidate) {
            names.push(candidate);
        }
    }
    let is_first = dots >= usize::try_from(conf.ndots).unwrap_or(usize::MAX);
    let position = if is_first { 0 } else { names.len() };
    names.splice(position..position, itself);
    names
}

/// Asks all servers; returns the records of the first answer.
async fn query_dns_servers(servers: &[SocketAddr], name: &Name<Vec<u8>>) -> io::Result<Vec<SrvTarget>> {
    let query = build_srv_query(name)?;
    let (answer, _others) = select_ok(servers.iter().map(|server| Box::pin(query_dns_server(*server, &query)))).await?;
    parse_srv_targets(&answer).map_err(io::Error::other)
}

/// A query for the SRV records of `name`, with a random identifier.
pub fn build_srv_query(name: &Name<Vec<u8>>) -> io::Result<Message<Vec<u8>>> {
    let [first, second, ..] = random_u64().to_le_bytes();
    let mut message = MessageBuilder::new_vec();
    message.header_mut().set_id(u16::from_le_bytes([first, second]));
    message.header_mut().set_rd(true);
    let mut question = message.question();
    question.push((name, Rtype::SRV)).map_err(io::Error::other)?;
    Ok(question.into_message())
}

/// Targets of the SRV records in an answer.
pub fn parse_srv_targets(answer: &Message<Vec<u8>>) -> Result<Vec<SrvTarget>, domain::base::wire::ParseError> {
    let records = answer.answer()?.limit_to_in::<Srv<_>>();
    let targets = records.map(|record| {
        let record = record?;
        let srv = record.data();
        Ok(SrvTarget { host: srv.target().fmt_with_dot().to_string(), port: srv.port() })
    });
    targets.collect()
}

/// Answer of one server.
async fn query_dns_server(server: SocketAddr, query: &Message<Vec<u8>>) -> io::Result<Message<Vec<u8>>> {
    let mut answer = query_by_udp(server, query).await?;
    if answer.header().tc() {
        answer = query_by_tcp(server, query).await?;
    }
    match answer.header().rcode() {
        Rcode::NOERROR | Rcode::NXDOMAIN => Ok(answer),
        code => Err(io::Error::other(format!("the DNS server {} answers {code}", server.ip()))),
    }
}

async fn query_by_udp(server: SocketAddr, query: &Message<Vec<u8>>) -> io::Result<Message<Vec<u8>>> {
    let local: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((local, 0)).await?;
    socket.connect(server).await?;
    loop {
        socket.send(query.as_slice()).await?;
        if let Ok(answer) = timeout(RESEND_INTERVAL, receive_answer(&socket, query)).await {
            return answer;
        }
    }
}

/// Waits for the answer to `query`; other messages are ignored.
async fn receive_answer(socket: &UdpSocket, query: &Message<Vec<u8>>) -> io::Result<Message<Vec<u8>>> {
    let mut buffer = vec![0; MAX_UDP_ANSWER_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let message = Message::from_octets(buffer[..length].to_vec());
        if let Some(answer) = message.ok().filter(|message| message.is_answer(query)) {
            return Ok(answer);
        }
    }
}

async fn query_by_tcp(server: SocketAddr, query: &Message<Vec<u8>>) -> io::Result<Message<Vec<u8>>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.as_slice().len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], query.as_slice()].concat()).await?;
    let length = stream.read_u16().await?;
    let mut buffer = vec![0; usize::from(length)];
    stream.read_exact(&mut buffer).await?;
    let answer = Message::from_octets(buffer).map_err(io::Error::other)?;
    if answer.is_answer(query) { Ok(answer) } else { Err(io::Error::other("the DNS server answers another question")) }
}
