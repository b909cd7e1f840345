//! Log files: permissions, rotation, compression, a full disk, and files of an earlier process.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::tempdir;
use tollkeeper::decide::log::header::HeaderReason;
use tollkeeper::decide::log::record::Record;

use super::{decisions, logging_service, records};
use kit::fixtures::shop_request;
use kit::test_service::TestService;

const RULES: &str = "descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]\n";
const ALL: (&str, &str) = ("TOLLKEEPER_DECISION_LOG_WHEN", "all");

fn decide(service: &TestService, count: u32) {
    (0..count).for_each(|number| drop(service.decide(&shop_request(&format!("user={number}"))).unwrap()));
}

fn numbered(file: &Path, number: u32) -> PathBuf {
    if number == 0 { file.to_owned() } else { format!("{}.{number}", file.display()).into() }
}

#[test]
fn files_are_rotated_by_size_and_the_oldest_is_deleted() {
    for name in ["log", "log.gz"] {
        let directory = tempdir().unwrap();
        let file = directory.path().join(name);
        let env = [ALL, ("TOLLKEEPER_DECISION_LOG_FILE_BYTES", "64KiB"), ("TOLLKEEPER_DECISION_LOG_FILES", "3")];
        // Compressed, the same bytes take more records.
        let rounds = if name == "log" { 8 } else { 60 };
        for _ in 0..rounds {
            let service = logging_service(&file, &env, RULES);
            decide(&service, 200);
            service.finish_log();
        }
        let mut names: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        assert_eq!(names, [0, 1, 2].map(|number| numbered(&file, number)));
        for path in &names {
            let metadata = fs::metadata(path).unwrap();
            assert!(metadata.len() <= 64 << 10, "{}", metadata.len());
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
            assert!(matches!(&records(path)[0], Record::Header(_)), "{}", path.display());
            assert!(!decisions(path).is_empty());
        }
    }
}

#[test]
fn file_begins_with_a_header_and_numbers_go_on_after_a_rotation() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let env = [ALL, ("TOLLKEEPER_DECISION_LOG_FILE_BYTES", "64KiB"), ("TOLLKEEPER_DECISION_LOG_FILES", "100")];
    let service = logging_service(&file, &env, RULES);
    decide(&service, 1000);
    service.finish_log();
    let mut files: Vec<PathBuf> = (0..100).map(|number| numbered(&file, number)).filter(|path| path.exists()).collect();
    files.reverse();
    assert!(files.len() > 4);
    for (index, path) in files.iter().enumerate() {
        let event = if index == 0 { HeaderReason::Start } else { HeaderReason::Rotation };
        assert!(matches!(&records(path)[0], Record::Header(header) if header.event == event && header.rules.is_some()));
    }
    let numbers: Vec<u64> = files.iter().flat_map(|path| decisions(path)).map(|decision| decision.seq).collect();
    assert_eq!(numbers, (1..=1000).collect::<Vec<_>>());
}

#[test]
fn file_of_an_earlier_process_is_continued_unless_its_end_is_damaged() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let log = || {
        let service = logging_service(&file, &[ALL], RULES);
        decide(&service, 2);
        service.finish_log();
    };
    log();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    log();
    assert_eq!(decisions(&file).len(), 4);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    // A crash in the middle of a line.
    let length = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 10).unwrap();
    log();
    assert_eq!(decisions(&file).len(), 2);
    let mut damaged = tollkeeper::decide::log::reader::RecordReader::open(&numbered(&file, 1)).unwrap();
    let read = super::read_records(&mut damaged);
    assert_eq!(read.iter().filter(|record| matches!(record, Record::Decision(_))).count(), 3);
    assert!(damaged.is_truncated());
}

#[test]
fn file_that_others_truncate_or_move_is_followed() {
    let directory = tempdir().unwrap();
    let (file, moved) = (directory.path().join("log"), directory.path().join("moved"));
    let env = [ALL, ("TOLLKEEPER_DECISION_LOG_FILE_BYTES", "64KiB")];
    let service = logging_service(&file, &env, RULES);
    let written = || service.inner.decider.log.as_ref().unwrap().counts_by_sink().next().unwrap().written;
    let wait_for_records = |count| kit::wait_for("the records", || (written() == count).then_some(()));
    decide(&service, 100);
    wait_for_records(100);
    // As logrotate does with copytruncate; the room counts again.
    fs::File::create(&file).unwrap();
    decide(&service, 100);
    wait_for_records(200);
    assert!(!numbered(&file, 1).exists());
    assert_eq!(decisions(&file).len(), 100);
    fs::rename(&file, &moved).unwrap();
    decide(&service, 50);
    service.finish_log();
    assert_eq!((decisions(&moved).len(), decisions(&file).len()), (100, 50));
    assert!(matches!(&records(&file)[0], Record::Header(_)));
}

#[test]
fn destination_that_cannot_be_written_is_refused_at_the_start() {
    let directory = tempdir().unwrap();
    let problem = |path: &Path| {
        let sink = format!("file:{}", path.display());
        let vars = [("TOLLKEEPER_DECISION_LOG".into(), sink.into())];
        let (settings, _) = tollkeeper::settings::Settings::from_env(vars.into_iter()).unwrap();
        let problems = tollkeeper::serve::server::startup::find_startup_problems(&settings);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let (missing, parent) = (directory.path().join("missing/log"), directory.path());
    assert_eq!(
        problem(&missing),
        format!("TOLLKEEPER_DECISION_LOG=file:{}: its directory does not exist; create it", missing.display())
    );
    assert_eq!(
        problem(parent),
        format!("TOLLKEEPER_DECISION_LOG=file:{}: is a directory; name a file", parent.display())
    );
    let file = parent.join("log");
    assert_eq!(problem(&file), "");
    assert!(!file.exists(), "the check creates nothing");
}
