//! CPU time of Redis per charge, script by script, beside simpler commands in the same run.
//!
//! 256 charges are in flight on one connection, each on one of 100 000 keys. The cost is the CPU time of the server's
//! process, user and system. Rounds alternate between all cases, and the ratio of a case is to a script with GET, SET
//! and TIME in the same round; the table has the medians. The bench asserts nothing.
//!
//! In `tests/bench`: `cargo bench --bench scripts [-- PART-OF-A-NAME...]`; `REDIS_SERVER=PROGRAM` measures another server
//! program.

#![expect(clippy::print_stdout, reason = "a bench talks to a person")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use bytes::BytesMut;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::client::redis::connection::Script;
use tollkeeper::store::client::redis::resp::{Reply, decode_reply};
use tollkeeper::store::redis::script::{CallTime, encode_charges, script_for_countings};

/// Charges in flight.
const IN_FLIGHT: usize = 256;
const KEYS: usize = 100_000;
/// Charges of each case in a round.
const CHARGES: usize = 102_400;
const ROUNDS: usize = 7;

const GET_SET_TIME: &str = "redis.call('TIME') local v = redis.call('GET', KEYS[1]) \
     redis.call('SET', KEYS[1], ARGV[1], 'PX', '86400000') return v";

fn main() {
    let selected: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let server = kit::redis::options().start();
    let pid: u32 = server.info("process_id").parse().expect("a process id is a number");
    let mut connection = TcpStream::connect(server.address()).expect("the server accepts");
    connection.set_nodelay(true).expect("it is a socket");
    let is_selected = |case: &Case| {
        case.is_reference || selected.is_empty() || selected.iter().any(|part| case.name.contains(part.as_str()))
    };
    let cases: Vec<Case> = cases().into_iter().filter(is_selected).collect();
    for case in &cases {
        case.set_up(&mut connection);
    }
    let mut costs: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, costs) in cases.iter().zip(&mut costs) {
            let before = cpu(pid);
            case.run(&mut connection);
            costs.push((cpu(pid) - before).as_secs_f64() * 1e6 / CHARGES as f64);
        }
    }
    let reference = cases.iter().position(|case| case.is_reference).expect("one case is the reference");
    println!("{:<40} {:>10} {:>7}", "case", "us/charge", "ratio");
    for (case, own) in cases.iter().zip(&costs) {
        let ratios = own.iter().zip(&costs[reference]).map(|(own, reference)| own / reference).collect();
        println!("{:<40} {:>10.2} {:>7.2}", case.name, median(own.clone()), median(ratios));
    }
}

/// Words of a command.
type Words = Vec<Vec<u8>>;

/// A kind of call, measured by itself.
struct Case {
    name: String,
    is_reference: bool,
    /// Command that the server needs once; its reply is not read.
    setup: Option<Words>,
    /// Commands with [`IN_FLIGHT`] charges.
    batches: Vec<Batch>,
}

struct Batch {
    commands: Vec<u8>,
    replies: usize,
}

impl Case {
    /// Creates a case; `call` returns the commands that charge these keys, at most `keys_per_call` of them.
    fn new(name: impl Into<String>, keys_per_call: usize, call: impl Fn(&[String]) -> Vec<Words>) -> Self {
        let name = name.into();
        let batch = |number: usize| {
            let keys = (number * IN_FLIGHT..).map(|index| format!("bench:{name}:{}", index * 7919 % KEYS));
            let keys: Vec<String> = keys.take(IN_FLIGHT).collect();
            let calls: Vec<Words> = keys.chunks(keys_per_call).flat_map(&call).collect();
            let mut commands = Vec::new();
            calls.iter().for_each(|words| encode(&mut commands, words));
            Batch { commands, replies: calls.len() }
        };
        let batches = (0..CHARGES / IN_FLIGHT).map(batch).collect();
        Self { name, is_reference: false, setup: None, batches }
    }

    /// Creates a case that runs a script with these arguments.
    fn script(name: impl Into<String>, keys_per_call: usize, text: &str, arguments: &[&[u8]]) -> Self {
        let script = Script::new(text.to_owned());
        let call = |keys: &[String]| {
            let mut words: Words = vec!["EVALSHA".into(), script.sha1.clone().into(), keys.len().to_string().into()];
            words.extend(keys.iter().map(|key| key.clone().into_bytes()));
            words.extend(arguments.iter().map(|argument| argument.to_vec()));
            vec![words]
        };
        let setup = Some(vec!["SCRIPT".into(), "LOAD".into(), text.into()]);
        Self { setup, ..Self::new(name, keys_per_call, call) }
    }

    fn set_up(&self, connection: &mut TcpStream) {
        if let Some(words) = &self.setup {
            let mut command = Vec::new();
            encode(&mut command, words);
            connection.write_all(&command).expect("the server reads");
            read_replies(connection, 1);
        }
        self.run(connection);
    }

    fn run(&self, connection: &mut TcpStream) {
        for batch in &self.batches {
            connection.write_all(&batch.commands).expect("the server reads");
            read_replies(connection, batch.replies);
        }
    }
}

fn cases() -> Vec<Case> {
    let one = |words: &[&str], key: &String| -> Words {
        words.iter().map(|word| if *word == "KEY" { key.clone().into_bytes() } else { (*word).into() }).collect()
    };
    let state = [7; 16];
    let mut cases = vec![
        Case { is_reference: true, ..Case::script("GET, SET PX and TIME in Lua", 1, GET_SET_TIME, &[&state]) },
        Case::script("empty script", 1, "return 1", &[]),
        Case::script("INCRBY in Lua", 1, "return redis.call('INCRBY', KEYS[1], 1)", &[]),
        Case::new("INCRBY, EXPIRE", 1, |keys| {
            vec![one(&["INCRBY", "KEY", "1"], &keys[0]), one(&["EXPIRE", "KEY", "86400"], &keys[0])]
        }),
    ];
    for algorithm in Algorithm::ALL {
        let argument = argument(algorithm);
        let counting = limit(algorithm).counting_method();
        let single = script_for_countings([counting].into_iter());
        cases.push(Case::script(algorithm.name(), 1, &single.text, &[&argument]));
        for keys in [2, 4, 8, 16] {
            let name = format!("{} x {keys}", algorithm.name());
            let merged = &single.merged.as_ref().expect("calls can share a command").text;
            cases.push(Case::script(name, keys, merged, &[keys.to_string().as_bytes(), &argument, b""]));
        }
    }
    cases
}

/// Returns the argument of a charge of one hit, as the server sends it.
fn argument(algorithm: Algorithm) -> Vec<u8> {
    let counter = OwnedCounter { limit: limit(algorithm), shadow: false, quota: false, tag: 0 };
    let request = ChargeRequest::new(Hits::Charge(1), 0);
    encode_charges(
        &[OwnedCharge::new([counter].into_iter().collect(), request)],
        CallTime::Server { about: Time::default() },
    )
    .to_vec()
}

/// Returns a limit that the bench does not reach.
fn limit(algorithm: Algorithm) -> Limit {
    let day = Period::new(Unit::Day, 1).expect("the period is valid");
    Limit::new(&LimitSpec::new(algorithm, 10_000, day)).expect("the limit is valid")
}

fn encode(out: &mut Vec<u8>, words: &Words) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

/// Reads this many replies.
fn read_replies(connection: &mut TcpStream, count: usize) {
    let (mut input, mut replies) = (BytesMut::new(), 0);
    while replies < count {
        let mut bytes = [0; 64 << 10];
        let length = connection.read(&mut bytes).expect("the server answers");
        assert!(length > 0, "the server closed the connection");
        input.extend_from_slice(&bytes[..length]);
        while let Some(reply) = decode_reply(&mut input).expect("a reply") {
            assert!(!is_error(&reply), "{reply:?}");
            replies += 1;
        }
    }
}

fn is_error(reply: &Reply) -> bool {
    match reply {
        Reply::Error(_) => true,
        Reply::Array(elements) => elements.iter().any(is_error),
        _ => false,
    }
}

/// CPU time of all threads of a process, from the scheduler's statistics in nanoseconds.
fn cpu(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the server runs");
    let account = |task: fs::DirEntry| fs::read_to_string(task.path().join("schedstat")).ok();
    let nanoseconds = tasks.filter_map(|task| account(task.ok()?)?.split(' ').next()?.parse::<u64>().ok());
    Duration::from_nanos(nanoseconds.sum())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
