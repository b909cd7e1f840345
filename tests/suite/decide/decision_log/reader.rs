//! The reader: compressed input, input that was cut off, and errors.

use std::io::{Cursor, Write as _};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tollkeeper::decide::log::reader::{ReadError, RecordReader};
use tollkeeper::decide::log::record::Record;

use super::record::{full_decision, header};

fn reader(bytes: impl Into<Vec<u8>>) -> RecordReader {
    RecordReader::new("log", Cursor::new(bytes.into())).unwrap()
}

/// Lines of a header and three decisions.
fn lines() -> Vec<u8> {
    let mut lines = Vec::new();
    lines.extend(header().to_line());
    (0..3).for_each(|_| full_decision().append_line(&mut lines));
    lines
}

fn compress(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

fn count(reader: &mut RecordReader) -> usize {
    let mut count = 0;
    while reader.next_record().unwrap().is_some() {
        count += 1;
    }
    count
}

fn error(line: &str) -> String {
    let mut good = Vec::new();
    full_decision().append_line(&mut good);
    let mut reader = reader([&good, line.as_bytes(), b"\n", &good].concat());
    assert!(matches!(reader.next_record(), Ok(Some(Record::Decision(_)))));
    let error = reader.next_record().unwrap_err().to_string();
    // Reading can continue.
    assert!(matches!(reader.next_record(), Ok(Some(Record::Decision(_)))));
    error
}

#[test]
fn compressed_logs_are_read_like_plain_ones() {
    let lines = lines();
    let gzip = compress(&lines);
    // Files grow by whole members.
    for (bytes, expected) in [(lines, 4), (gzip.clone(), 4), ([&*gzip, &gzip].concat(), 8)] {
        let mut reader = reader(bytes);
        assert_eq!(count(&mut reader), expected);
        assert!(!reader.is_truncated());
    }
}

#[test]
fn zstd_is_refused_with_a_fix() {
    let error = RecordReader::new("log.zst", Cursor::new(b"\x28\xb5\x2f\xfd\x00".to_vec())).err().unwrap();
    assert_eq!(
        error.to_string(),
        "log.zst:1: cannot be read: it is compressed with zstd (decompress it with `zstd -d FILE`, or use gzip)"
    );
}

#[test]
fn log_that_was_cut_off_ends_with_its_last_complete_record() {
    let lines = lines();
    let last = lines[..lines.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
    for end in 0..lines.len() {
        let mut reader = reader(&lines[..end]);
        let complete = lines[..end].iter().filter(|byte| **byte == b'\n').count();
        // A line without its end can still be a whole record.
        let found = count(&mut reader);
        let is_whole =
            serde_json::from_slice::<serde_json::Value>(lines[..end].rsplit(|b| *b == b'\n').next().unwrap());
        assert_eq!(found, complete + usize::from(is_whole.is_ok()), "at {end}");
        assert_eq!(reader.is_truncated(), is_whole.is_err() && lines[..end].last().is_some_and(|b| *b != b'\n'));
    }
    for (whole, end) in [(true, last), (false, last + 100)] {
        let mut member = compress(&lines[..end]);
        let mut reader = reader(member.clone());
        assert_eq!((count(&mut reader), reader.is_truncated()), (3, !whole));
        member.truncate(member.len() - 1);
        let mut reader = self::reader(member);
        count(&mut reader);
        assert!(reader.is_truncated());
    }
}

#[test]
fn errors_name_the_input_and_the_line() {
    let error_of = |path: &str| match RecordReader::open(Path::new(path)) {
        Ok(mut reader) => reader.next_record().unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    assert_eq!(error_of("/nonexistent"), "/nonexistent: cannot be opened: No such file or directory (os error 2)");
    assert!(error_of("/").starts_with("/:1: cannot be read: "), "{}", error_of("/"));
    assert!(error("hello").starts_with("log:2: not a record of a decision log: expected value at line 1 column 1"));
    assert!(error("{}").starts_with("log:2: not a record of a decision log: missing field `v`"));
    assert!(error(r#"{"v":1,"type":"decision","seq":"x"}"#).starts_with("log:2: not a record of a decision log: "));
    assert_eq!(
        error(r#"{"v":2,"type":"decision"}"#),
        "log:2: format version 2 is not supported, only 1 (use a newer tollkeeper)"
    );
}

#[test]
fn unknown_types_and_fields_and_blank_lines_are_ignored() {
    let mut line = Vec::new();
    full_decision().append_line(&mut line);
    let line = String::from_utf8(line).unwrap();
    let more = line.replace("\"seq\":17", "\"new\":{\"a\":[1]},\"seq\":17");
    let mut reader = reader(format!("{{\"v\":1,\"type\":\"other\",\"x\":1}}\n\n{more}  \n"));
    let found = reader.next_record().unwrap();
    assert_eq!(found, Some(Record::Decision(Box::new(full_decision()))));
    drop(found);
    assert_eq!(reader.line_number(), 3);
    assert!(matches!(reader.next_record(), Ok(None)));
    let other_order = line.replace("{\"v\":1,\"type\":\"decision\",", "{\"type\":\"decision\",\"v\":1,");
    assert_eq!(count(&mut self::reader(other_order)), 1);
}

#[test]
fn random_bytes_are_errors() {
    for bytes in [
        &b"\xff\xfe\n"[..],
        b"\x28\xb5\x2f\xfdgarbage",
        b"\x1f\x8b\x08garbage and more garbage",
        b"[1]\n",
        b"\"text\"\n",
    ] {
        let result = RecordReader::new("log", Cursor::new(bytes.to_vec()));
        let error = result.and_then(|mut reader| reader.next_record().map(|_| ()));
        let is_expected = matches!(&error, Err(ReadError::NotARecord { .. } | ReadError::Unreadable { .. }));
        assert!(is_expected, "{bytes:?}: {error:?}");
    }
}
