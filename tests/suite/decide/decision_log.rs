//! Decision log: the format and its schema, reading it back, and what the service writes.

mod candidates;
mod decisions;
mod debug_line;
mod files;
mod otlp;
mod process;
mod reader;
mod record;
mod redis;
mod rules;
mod sample;
pub(crate) mod schema;
mod stalled;
mod stream;
mod stream_settings;

use std::path::Path;

use tollkeeper::base::clock::Time;
use tollkeeper::decide::log::reader::RecordReader;
use tollkeeper::decide::log::record::{DecisionRecord, Record};

use self::schema::assert_valid;
use kit::test_service::TestService;

/// Noon on Wednesday the 8th of July 2026.
const NOON: Time = Time::from_secs(1_783_512_000);

/// A service that logs to `file`, with these settings and rules of the domain `shop` in `rules.yaml`.
fn logging_service(file: &Path, env: &[(&str, &str)], rules: &str) -> TestService {
    let sink = format!("file:{}", file.display());
    let own = [("TOLLKEEPER_DECISION_LOG", &*sink)];
    let service = TestService::new(own.into_iter().chain(env.iter().copied()), NOON);
    service.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
    service
}

/// Records of a file, all of which fit the schema.
fn records(file: &Path) -> Vec<Record<'static>> {
    let mut reader = RecordReader::open(file).unwrap();
    // Others are compressed.
    if let Ok(lines) = String::from_utf8(std::fs::read(file).unwrap()) {
        assert_valid(&lines);
    }
    read_records(&mut reader)
}

/// Reads all records; the text of each stays in memory.
fn read_records(reader: &mut RecordReader) -> Vec<Record<'static>> {
    let mut records = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        records.push(match record {
            Record::Decision(decision) => {
                let mut line = Vec::new();
                decision.append_line(&mut line);
                Record::Decision(serde_json::from_slice(line.leak()).unwrap())
            }
            Record::Header(header) => Record::Header(header),
            Record::Dropped(dropped) => Record::Dropped(dropped),
        });
    }
    records
}

/// Decisions in a file.
fn decisions(file: &Path) -> Vec<DecisionRecord<'static>> {
    let decision = |record| match record {
        Record::Decision(decision) => Some(*decision),
        Record::Header(_) | Record::Dropped(_) => None,
    };
    records(file).into_iter().filter_map(decision).collect()
}
