//! Commands that concern the server or the connection, and scripts. Scripts may not call them.

use std::mem;

use bytes::Bytes;

use crate::arguments::{integer, option_name, shown};
use crate::cluster::slot_of_key;
use crate::commands::{
    self, ALLOW_BUSY, Command, KeyPositions, LOADING, NO_AUTH, NO_SCRIPT, Properties, STALE, script_keys,
    unknown_subcommand, wrong_word_count,
};
use crate::numbers::parse_integer;
use crate::refusals::{Refusal, WRONG_PASSWORD};
use crate::reply::{CommandResult, Failure, Protocol, Reply};
use crate::scripts::{self, ScriptCall, ScriptHost, ScriptRules, sha1_hex};
use crate::server::{Connection, Kind, Role, Server};

/// Function of a command: all words with the name.
pub(crate) type ServerFunction = fn(&mut Server, &mut Connection, &[Bytes]) -> CommandResult;

const fn command(name: &'static str, arity: i32, flags: u8, run: ServerFunction) -> Command<ServerFunction> {
    Command { properties: Properties { name, arity, flags: flags | NO_SCRIPT, keys: KeyPositions::None }, run }
}

const fn script_command(name: &'static str, run: ServerFunction) -> Command<ServerFunction> {
    let keys = KeyPositions::Script;
    Command { properties: Properties { name, arity: -3, flags: NO_SCRIPT | STALE, keys }, run }
}

/// Flags of a login.
const LOGIN: u8 = LOADING | STALE | NO_AUTH | ALLOW_BUSY;

/// The commands, with the flags of Redis 7.0.
pub(crate) const SERVER_COMMANDS: &[Command<ServerFunction>] = &[
    script_command("evalsha", evalsha),
    script_command("eval", eval),
    command("script", -2, STALE, script),
    command("auth", -2, LOGIN, auth),
    command("hello", -1, LOGIN, hello),
    command("select", 2, LOADING | STALE, select),
    command("client", -2, LOADING | STALE, client),
    command("info", -1, LOADING | STALE, info),
    command("role", 1, LOADING | STALE, role),
    command("wait", 3, 0, wait),
    command("cluster", -2, STALE, cluster),
    command("asking", 1, 0, asking),
    command("readonly", 1, LOADING | STALE, change_nothing),
    command("readwrite", 1, LOADING | STALE, change_nothing),
    command("sentinel", -2, STALE, sentinel),
];

fn is_server_command(name: &[u8]) -> bool {
    commands::find(SERVER_COMMANDS, name).is_some()
}

/// EVAL.
fn eval(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    script_keys(words)?;
    // A comparison of texts is much cheaper than a hash in a debug build.
    let known = server.scripts.iter().find(|(_, text)| **text == words[1]).map(|(sha1, _)| sha1.clone());
    let sha1 = known.unwrap_or_else(|| sha1_hex(&words[1]));
    if !server.scripts.contains_key(&sha1) {
        scripts::compile(&sha1, &words[1])?;
        server.scripts.insert(sha1.clone(), words[1].clone());
    }
    run_script(server, &sha1, words)
}

/// Number of digits of a script's hash.
const SHA1_DIGITS: usize = 40;
const NO_SCRIPT_FOUND: Failure = Failure::fixed("NOSCRIPT No matching script. Please use EVAL.");

/// EVALSHA.
fn evalsha(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    if words[1].len() != SHA1_DIGITS {
        return Err(NO_SCRIPT_FOUND);
    }
    script_keys(words)?;
    run_script(server, &String::from_utf8_lossy(&words[1]).to_lowercase(), words)
}

fn run_script(server: &mut Server, sha1: &str, words: &[Bytes]) -> CommandResult {
    let text = server.scripts.get(sha1).ok_or(NO_SCRIPT_FOUND)?.clone();
    // A script could read old data, so it is refused although EVAL itself is not.
    if server.refusal == Some(Refusal::MasterDown) {
        return Err(Refusal::MasterDown.failure());
    }
    let keys = script_keys(words)?;
    let call = ScriptCall { sha1, text: &text, keys, arguments: &words[3 + keys.len()..] };
    let host = ScriptHost {
        keyspace: mem::take(&mut server.keyspace),
        statistics: mem::take(&mut server.statistics),
        rules: ScriptRules {
            refusal: server.refusal,
            is_replica: server.is_replica(),
            slots: server.slots.clone(),
            is_asking: server.is_asking,
            is_forbidden: is_server_command,
        },
        has_written: false,
    };
    let (result, host) = scripts::run(call, host);
    if let Some(host) = host {
        (server.keyspace, server.statistics) = (host.keyspace, host.statistics);
    }
    result
}

/// SCRIPT LOAD, EXISTS and FLUSH.
fn script(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    match (&*option_name(&words[1]), &words[2..]) {
        (b"LOAD", [text]) => {
            let sha1 = sha1_hex(text);
            scripts::compile(&sha1, text)?;
            server.scripts.insert(sha1.clone(), text.clone());
            Ok(Reply::Bulk(sha1.into()))
        }
        (b"LOAD", _) => Err(wrong_word_count("script|load")),
        (b"EXISTS", []) => Err(wrong_word_count("script|exists")),
        (b"EXISTS", hashes) => {
            let is_known = |hash: &Bytes| server.scripts.contains_key(&*String::from_utf8_lossy(hash).to_lowercase());
            Ok(Reply::Array(hashes.iter().map(|hash| Reply::flag(is_known(hash))).collect()))
        }
        (b"FLUSH", _) => {
            server.scripts.clear();
            Ok(Reply::ok())
        }
        _ => Err(unknown_subcommand(words)),
    }
}

/// AUTH.
fn auth(server: &mut Server, connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    match &words[1..] {
        [password] => {
            if server.options.password.is_none() {
                return Err(Failure::fixed(
                    "ERR AUTH <password> called without any password configured for the default user. Are you sure \
                     your configuration is correct?",
                ));
            }
            log_in(server, connection, b"default", password)
        }
        [user, password] => log_in(server, connection, user, password),
        _ => Err(Failure::SYNTAX),
    }
}

fn log_in(server: &Server, connection: &mut Connection, user: &[u8], password: &[u8]) -> CommandResult {
    let is_password = server.options.password.as_ref().is_none_or(|expected| expected.as_bytes() == password);
    if user != b"default" || !is_password || server.refusal == Some(Refusal::WrongPassword) {
        return Err(WRONG_PASSWORD);
    }
    connection.is_logged_in = true;
    Ok(Reply::ok())
}

/// HELLO, with AUTH and SETNAME.
fn hello(server: &mut Server, connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    let protocol = match words.get(1) {
        None => connection.protocol,
        Some(word) => match parse_integer(word) {
            Some(2) => Protocol::Resp2,
            Some(3) => Protocol::Resp3,
            Some(_) => return Err(Failure::fixed("NOPROTO unsupported protocol version")),
            None => return Err(Failure::fixed("ERR Protocol version is not an integer or out of range")),
        },
    };
    let mut rest = words.get(2..).unwrap_or_default();
    loop {
        rest = match rest {
            [] => break,
            [option, user, password, rest @ ..] if option_name(option) == b"AUTH" => {
                log_in(server, connection, user, password)?;
                rest
            }
            [option, name, rest @ ..] if option_name(option) == b"SETNAME" => {
                connection.name = name.clone();
                rest
            }
            [option, ..] => {
                let option = shown(option, usize::MAX);
                return Err(Failure::new(format!("ERR Syntax error in HELLO option '{option}'")));
            }
        };
    }
    if !connection.is_logged_in {
        return Err(Failure::fixed(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
             <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the \
             same time",
        ));
    }
    connection.protocol = protocol;
    let version = Reply::Bulk(server.options.version.clone().into());
    Ok(Reply::Map(vec![
        (Reply::text("server"), Reply::text("redis")),
        (Reply::text("version"), version),
        (Reply::text("proto"), Reply::Integer(if protocol == Protocol::Resp3 { 3 } else { 2 })),
        (Reply::text("id"), Reply::Integer(1)),
        (Reply::text("mode"), Reply::text(mode(server))),
        (Reply::text("role"), Reply::text(if server.is_replica() { "replica" } else { "master" })),
        (Reply::text("modules"), Reply::Array(Vec::new())),
    ]))
}

const fn mode(server: &Server) -> &'static str {
    match server.options.kind {
        Kind::Single => "standalone",
        Kind::Cluster => "cluster",
        Kind::Sentinel => "sentinel",
    }
}

/// SELECT. All databases are the same one: a simulation uses one.
fn select(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    let database = integer(&words[1])?;
    if server.options.kind == Kind::Cluster && database != 0 {
        return Err(Failure::fixed("ERR SELECT is not allowed in cluster mode"));
    }
    if !(0..16).contains(&database) {
        return Err(Failure::fixed("ERR DB index is out of range"));
    }
    Ok(Reply::ok())
}

/// CLIENT SETNAME and GETNAME.
fn client(_server: &mut Server, connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    match (&*option_name(&words[1]), &words[2..]) {
        (b"SETNAME", [name]) => {
            connection.name = name.clone();
            Ok(Reply::ok())
        }
        (b"SETNAME", _) => Err(wrong_word_count("client|setname")),
        (b"GETNAME", []) => Ok(Reply::bulk_or_null((!connection.name.is_empty()).then(|| connection.name.clone()))),
        (b"GETNAME", _) => Err(wrong_word_count("client|getname")),
        _ => Err(unknown_subcommand(words)),
    }
}

/// INFO, with the fields that clients read.
fn info(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    let replication = match &server.role {
        Role::Primary => format!("role:master\r\nconnected_slaves:{}\r\n", server.replicas_in_sync),
        Role::Replica { primary, is_connected } => format!(
            "role:slave\r\nmaster_host:{}\r\nmaster_port:{}\r\nmaster_link_status:{}\r\n",
            primary.host,
            primary.port,
            if *is_connected { "up" } else { "down" }
        ),
    };
    let sections = [
        ("Server", format!("redis_version:{}\r\nredis_mode:{}\r\n", server.options.version, mode(server))),
        (
            "Memory",
            format!(
                "used_memory:{}\r\nmaxmemory_policy:{}\r\n",
                server.memory_estimate(),
                server.options.maxmemory_policy
            ),
        ),
        ("Persistence", format!("loading:{}\r\n", i32::from(server.refusal == Some(Refusal::Loading)))),
        ("Replication", replication),
        ("Cluster", format!("cluster_enabled:{}\r\n", i32::from(server.options.kind == Kind::Cluster))),
        ("Keyspace", format!("db0:keys={}\r\n", server.key_count())),
    ];
    let wanted: Vec<String> = words[1..].iter().map(|word| String::from_utf8_lossy(word).to_lowercase()).collect();
    let is_wanted = |name: &str| {
        let all = wanted.is_empty() || wanted.iter().any(|word| ["all", "default", "everything"].contains(&&**word));
        all || wanted.contains(&name.to_lowercase())
    };
    let shown = sections.iter().filter(|(name, _)| is_wanted(name));
    let texts: Vec<String> = shown.map(|(name, fields)| format!("# {name}\r\n{fields}")).collect();
    Ok(Reply::Bulk(texts.join("\r\n").into()))
}

/// ROLE.
fn role(server: &mut Server, _connection: &mut Connection, _words: &[Bytes]) -> CommandResult {
    Ok(Reply::Array(match (&server.role, server.options.kind) {
        (_, Kind::Sentinel) => {
            let names = server.watched_primaries.keys().map(|name| Reply::Bulk(name.clone().into())).collect();
            vec![Reply::text("sentinel"), Reply::Array(names)]
        }
        (Role::Primary, _) => vec![Reply::text("master"), Reply::Integer(0), Reply::Array(Vec::new())],
        (Role::Replica { primary, is_connected }, _) => vec![
            Reply::text("slave"),
            Reply::Bulk(primary.host.clone().into()),
            Reply::Integer(primary.port.into()),
            Reply::text(if *is_connected { "connected" } else { "connect" }),
            Reply::Integer(0),
        ],
    }))
}

/// WAIT.
fn wait(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    if server.is_replica() {
        return Err(Failure::fixed(
            "ERR WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is \
             configured to be writable (which is not the default) writes to replicas are just local and are not \
             propagated.",
        ));
    }
    integer(&words[1])?;
    let timeout = parse_integer(&words[2]).ok_or(Failure::fixed("ERR timeout is not an integer or out of range"))?;
    if timeout < 0 {
        return Err(Failure::fixed("ERR timeout is negative"));
    }
    Ok(Reply::Integer(server.replicas_in_sync.into()))
}

/// CLUSTER SLOTS and KEYSLOT.
fn cluster(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    let reply = match (&*option_name(&words[1]), &words[2..]) {
        (b"SLOTS", []) => server.slots.as_ref().map_or_else(|| Reply::Array(Vec::new()), |slots| slots.slots_reply()),
        (b"KEYSLOT", [key]) => Reply::Integer(slot_of_key(key).into()),
        (b"SLOTS", _) => return Err(wrong_word_count("cluster|slots")),
        (b"KEYSLOT", _) => return Err(wrong_word_count("cluster|keyslot")),
        _ => return Err(unknown_subcommand(words)),
    };
    only_in_cluster(server).map(|()| reply)
}

/// Checks that the server is a node of a cluster.
const fn only_in_cluster(server: &Server) -> Result<(), Failure> {
    match server.options.kind {
        Kind::Cluster => Ok(()),
        Kind::Single | Kind::Sentinel => Err(Failure::fixed("ERR This instance has cluster support disabled")),
    }
}

/// ASKING.
fn asking(server: &mut Server, connection: &mut Connection, _words: &[Bytes]) -> CommandResult {
    only_in_cluster(server)?;
    connection.is_asking = true;
    Ok(Reply::ok())
}

/// READONLY and READWRITE: a replica here redirects all commands.
fn change_nothing(server: &mut Server, _connection: &mut Connection, _words: &[Bytes]) -> CommandResult {
    only_in_cluster(server).map(|()| Reply::ok())
}

/// SENTINEL GET-MASTER-ADDR-BY-NAME.
fn sentinel(server: &mut Server, _connection: &mut Connection, words: &[Bytes]) -> CommandResult {
    match (&*option_name(&words[1]), &words[2..]) {
        (b"GET-MASTER-ADDR-BY-NAME", [name]) => {
            let found = std::str::from_utf8(name).ok().and_then(|name| server.watched_primaries.get(name));
            Ok(found.map_or(Reply::NullArray, |primary| {
                let words = [primary.host.clone(), primary.port.to_string()];
                Reply::Array(words.into_iter().map(|word| Reply::Bulk(word.into())).collect())
            }))
        }
        (b"GET-MASTER-ADDR-BY-NAME", _) => Err(wrong_word_count("sentinel|get-master-addr-by-name")),
        _ => Err(unknown_subcommand(words)),
    }
}
