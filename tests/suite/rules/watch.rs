//! Detection of changed rule files, in every way that files change.
//!
//! Tests in real time wait for a condition with a generous deadline. With events the poll interval is an hour, so only
//! an event can make a test pass; without, it is milliseconds. With both it is milliseconds too.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use tempfile::TempDir;
use tollkeeper::rules::files::read::read_rule_files;
use tollkeeper::rules::files::walk::{FileStamp, FileStamps};
use tollkeeper::rules::files::watch::{FileSetReceiver, FileWatcher, WatchTiming};
use tollkeeper::rules::files::{PathProblem, RuleFileSet, RuleFileSetResult, RuleFilesLocation};

use crate::rules::rule_files::{runtime, tree};

const DEADLINE: Duration = Duration::from_secs(30);

fn by_events() -> WatchTiming {
    WatchTiming { debounce: Duration::from_millis(20), poll_interval: Duration::from_secs(3600), events: true }
}

fn by_polling() -> WatchTiming {
    WatchTiming { debounce: Duration::from_millis(5), poll_interval: Duration::from_millis(10), events: false }
}

fn by_both() -> WatchTiming {
    WatchTiming { poll_interval: Duration::from_millis(10), ..by_events() }
}

/// Starts a watcher and waits until its watches are registered.
async fn started(layout: &RuleFilesLocation, timing: WatchTiming) -> (FileWatcher, FileSetReceiver) {
    let (watcher, mut changes) = FileWatcher::start(layout.clone(), timing, &read_rule_files(layout)).unwrap();
    watcher.reload();
    let _same = next(&mut changes).await;
    (watcher, changes)
}

async fn next(changes: &mut FileSetReceiver) -> RuleFileSetResult {
    tokio::time::timeout(DEADLINE, changes.next_set()).await.expect("no change noticed").expect("the watcher ended")
}

/// Receives changes until one contains exactly `expected`; returns the number received.
async fn until(changes: &mut FileSetReceiver, expected: &[&str], what: &str) -> usize {
    let mut last = None;
    for count in 1.. {
        match tokio::time::timeout(DEADLINE, changes.next_set()).await {
            Ok(reading) => last = Some(texts(&reading.expect("the watcher ended"))),
            Err(_) => panic!("{what}: expected {expected:?}, last handed over: {last:?}"),
        }
        if last.as_ref().is_some_and(|texts| texts == expected) {
            return count;
        }
    }
    unreachable!("the loop has no end")
}

fn texts(reading: &RuleFileSetResult) -> Vec<String> {
    match reading {
        Ok(sources) => sources.files.iter().map(|it| String::from_utf8_lossy(&it.bytes).into_owned()).collect(),
        Err(failure) => failure.errors.iter().map(ToString::to_string).collect(),
    }
}

/// Waits until the watcher has compared the files `times` more.
async fn wait_for_comparisons(watcher: &FileWatcher, times: u64) {
    let (goal, deadline) = (watcher.comparison_count() + times, Instant::now() + DEADLINE);
    while watcher.comparison_count() < goal {
        assert!(Instant::now() < deadline, "the watcher no longer compares");
        tokio::task::yield_now().await;
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Atomically replaces `link` by a link to `target`.
fn swap(link: &Path, target: &str) {
    let new = link.with_extension("tmp");
    symlink(target, &new).unwrap();
    fs::rename(new, link).unwrap();
}

/// A way in which rule files change.
struct Change {
    name: &'static str,
    /// Files before the change.
    entries: &'static [&'static str],
    layout: fn(&Path) -> RuleFilesLocation,
    change: fn(&Path),
    /// The contents of all files afterwards, by name.
    expected: &'static [&'static str],
}

fn rules(dir: &Path) -> RuleFilesLocation {
    RuleFilesLocation::Paths(vec![dir.join("rules")])
}

fn one_file(dir: &Path) -> RuleFilesLocation {
    RuleFilesLocation::Paths(vec![dir.join("rules/a.yaml")])
}

fn watch_root(dir: &Path) -> RuleFilesLocation {
    runtime(&dir.join("current"), true, false)
}

fn app_directory(dir: &Path) -> RuleFilesLocation {
    runtime(&dir.join("current"), false, true)
}

/// Updates a volume as kubelet does: creates a directory, replaces the link, and removes the old directory.
fn kubelet(mount: &Path) {
    write(&mount.join("..2026_02/a.yaml"), "new");
    symlink("..2026_02", mount.join("..data_tmp")).unwrap();
    fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
    fs::remove_dir_all(mount.join("..2026_01")).unwrap();
}

fn overwrite(dir: &Path) {
    let mut file = OpenOptions::new().write(true).open(dir.join("rules/a.yaml")).unwrap();
    file.write_all(b"DOMAIN").unwrap();
}

fn edit(dir: &Path) {
    let file = dir.join("rules/a.yaml");
    write(&dir.join("rules/4913"), "new");
    fs::rename(&file, dir.join("rules/a.yaml~")).unwrap();
    fs::rename(dir.join("rules/4913"), &file).unwrap();
    fs::remove_file(dir.join("rules/a.yaml~")).unwrap();
}

fn replace(dir: &Path) {
    write(&dir.join("a.new"), "new");
    fs::rename(dir.join("a.new"), dir.join("rules/a.yaml")).unwrap();
}

fn recreate_directory(dir: &Path) {
    fs::remove_dir_all(dir.join("rules")).unwrap();
    write(&dir.join("rules/a.yaml"), "new");
}

fn rename_directory(dir: &Path) {
    write(&dir.join("other/a.yaml"), "new");
    fs::rename(dir.join("rules"), dir.join("old")).unwrap();
    fs::rename(dir.join("other"), dir.join("rules")).unwrap();
}

fn rename_parent(dir: &Path) {
    write(&dir.join("other/rules/a.yaml"), "new");
    fs::rename(dir.join("app"), dir.join("old")).unwrap();
    fs::rename(dir.join("other"), dir.join("app")).unwrap();
}

fn release(dir: &Path) {
    write(&dir.join("releases/2/sub/config/a.yaml"), "new");
    swap(&dir.join("current"), "releases/2");
}

const CONFIG_MAP: &[&str] = &["rules/..2026_01/a.yaml", "rules/..data -> ..2026_01", "rules/a.yaml -> ..data/a.yaml"];
const RUNTIME_CONFIG_MAP: &[&str] = &[
    "current/sub/config/..2026_01/a.yaml",
    "current/sub/config/..data -> ..2026_01",
    "current/sub/config/a.yaml -> ..data/a.yaml",
];
const RELEASES: &[&str] = &["releases/1/sub/config/a.yaml", "current -> releases/1"];
const LINKED_TWICE: &[&str] = &["rules/a.yaml -> .hop", "rules/.hop -> .far/a", "rules/.far/a", "rules/.far/b"];
const NEW: &[&str] = &["new"];

macro_rules! change {
    ($name:literal, $entries:expr, $layout:expr, $change:expr, $expected:expr) => {
        Change { name: $name, entries: $entries, layout: $layout, change: $change, expected: $expected }
    };
}

const CHANGES: &[Change] = &[
    change!("written in place", &["rules/a.yaml"], rules, |d| write(&d.join("rules/a.yaml"), "new"), NEW),
    change!("written in place, one file", &["rules/a.yaml"], one_file, |d| write(&d.join("rules/a.yaml"), "new"), NEW),
    change!("overwritten, same size", &["rules/a.yaml"], rules, overwrite, &["DOMAIN: rules/a.yaml\n"]),
    change!("emptied", &["rules/a.yaml"], rules, |d| write(&d.join("rules/a.yaml"), ""), &[""]),
    change!("renamed over", &["rules/a.yaml"], rules, replace, NEW),
    change!("renamed over, one file", &["rules/a.yaml"], one_file, replace, NEW),
    change!("saved by an editor", &["rules/a.yaml"], rules, edit, NEW),
    change!("saved by an editor, one file", &["rules/a.yaml"], one_file, edit, NEW),
    change!("deleted and created", &["rules/a.yaml"], one_file, recreate_directory, NEW),
    change!(
        "one of two deleted",
        &["rules/a.yaml", "rules/b.yaml"],
        rules,
        |d| fs::remove_file(d.join("rules/b.yaml")).unwrap(),
        &["domain: rules/a.yaml\n"]
    ),
    change!(
        "renamed to another name",
        &["rules/a.yaml", "rules/b.yaml"],
        rules,
        |d| fs::rename(d.join("rules/a.yaml"), d.join("rules/c.yaml")).unwrap(),
        &["domain: rules/b.yaml\n", "domain: rules/a.yaml\n"]
    ),
    change!(
        "a new file",
        &["rules/a.yaml"],
        rules,
        |d| write(&d.join("rules/b.yaml"), "new"),
        &["domain: rules/a.yaml\n", "new"]
    ),
    change!(
        "a new nested directory",
        &["rules/a.yaml"],
        rules,
        |d| write(&d.join("rules/b/c/d.yaml"), "new"),
        &["domain: rules/a.yaml\n", "new"]
    ),
    change!("in a nested directory", &["rules/b/c/d.yaml"], rules, |d| write(&d.join("rules/b/c/d.yaml"), "new"), NEW),
    change!("appears later", &[], one_file, |d| write(&d.join("rules/a.yaml"), "new"), NEW),
    change!("directory appears later", &[], rules, |d| write(&d.join("rules/a.yaml"), "new"), NEW),
    change!("directory recreated", &["rules/a.yaml"], rules, recreate_directory, NEW),
    change!("directory renamed", &["rules/a.yaml"], rules, rename_directory, NEW),
    change!("config map", CONFIG_MAP, rules, |d| kubelet(&d.join("rules")), NEW),
    change!("config map, one file", CONFIG_MAP, one_file, |d| kubelet(&d.join("rules")), NEW),
    change!("config map, runtime", RUNTIME_CONFIG_MAP, app_directory, |d| kubelet(&d.join("current/sub/config")), NEW),
    change!("config map, watch root", RUNTIME_CONFIG_MAP, watch_root, |d| kubelet(&d.join("current/sub/config")), NEW),
    change!("release swapped", RELEASES, watch_root, release, NEW),
    change!("release swapped, app directory", RELEASES, app_directory, release, NEW),
    change!(
        "release edited in place",
        RELEASES,
        watch_root,
        |d| write(&d.join("releases/1/sub/config/a.yaml"), "new"),
        NEW
    ),
    change!("release appears", &["releases/"], watch_root, release, NEW),
    change!("linked file written", LINKED_TWICE, rules, |d| write(&d.join("rules/.far/a"), "new"), NEW),
    change!(
        "link in between swapped",
        LINKED_TWICE,
        rules,
        |d| swap(&d.join("rules/.hop"), ".far/b"),
        &["domain: rules/.far/b\n"]
    ),
    change!(
        "linked directory written",
        &["rules/.far/a.yaml", "rules/x -> .far"],
        rules,
        |d| write(&d.join("rules/.far/a.yaml"), "new"),
        NEW
    ),
];

/// Changes outside the directories of files and links, of which no event tells.
const CHANGES_ELSEWHERE: &[Change] = &[
    change!(
        "parent renamed",
        &["app/rules/a.yaml"],
        |d| RuleFilesLocation::Paths(vec![d.join("app/rules")]),
        rename_parent,
        NEW
    ),
    change!(
        "link in another directory swapped",
        &["rules/a.yaml -> ../links/a", "links/a -> ../far/a", "far/a", "far/b"],
        one_file,
        |d| swap(&d.join("links/a"), "../far/b"),
        &["domain: far/b\n"]
    ),
];

/// Makes each change, then another one in place, which only renewed watches can notice.
async fn notices_changes(changes: impl Iterator<Item = &Change>, timing: fn() -> WatchTiming) {
    for Change { name, entries, layout, change, expected } in changes {
        let dir: TempDir = tree(entries);
        let layout = layout(dir.path());
        let (_watcher, mut changes) = started(&layout, timing()).await;
        change(dir.path());
        until(&mut changes, expected, name).await;

        let mut files = read_rule_files(&layout).unwrap().files;
        write(&files[0].path, "again");
        files[0].bytes = b"again".to_vec();
        let expected = texts(&Ok(RuleFileSet { files, ..RuleFileSet::default() }));
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        until(&mut changes, &expected, &format!("{name}, and then written")).await;
    }
}

#[tokio::test]
async fn events_detect_every_kind_of_change() {
    notices_changes(CHANGES.iter(), by_events).await;
}

#[tokio::test]
async fn polling_detects_every_kind_of_change() {
    notices_changes(CHANGES.iter().chain(CHANGES_ELSEWHERE), by_polling).await;
}

#[tokio::test]
async fn polling_detects_what_events_do_not() {
    notices_changes(CHANGES_ELSEWHERE.iter(), by_both).await;
}

#[tokio::test]
async fn burst_of_writes_gives_few_changes() {
    let dir = tree(&["rules/a.yaml"]);
    let (_watcher, mut changes) = started(&rules(dir.path()), by_events()).await;
    for i in 0..1000 {
        write(&dir.path().join("rules/a.yaml"), &i.to_string());
    }
    let count = until(&mut changes, &["999"], "burst").await;
    assert!(count < 50, "{count} of 1000 were handed over");
}

#[tokio::test]
async fn slow_receiver_gets_only_the_newest() {
    let dir = tree(&["rules/a.yaml"]);
    let (watcher, mut changes) = started(&rules(dir.path()), by_polling()).await;
    for i in 0..5 {
        write(&dir.path().join("rules/a.yaml"), &i.to_string());
        wait_for_comparisons(&watcher, 4).await;
    }
    assert_eq!(until(&mut changes, &["4"], "newest").await, 1);
}

#[tokio::test]
async fn touched_but_unchanged_files_are_not_reported() {
    for mut timing in [by_events(), by_polling()] {
        timing.poll_interval = Duration::from_millis(10);
        let dir = tree(&["rules/a.yaml"]);
        let file = dir.path().join("rules/a.yaml");
        let (watcher, mut changes) = started(&rules(dir.path()), timing).await;
        File::options().write(true).open(&file).unwrap().set_modified(SystemTime::now()).unwrap();
        wait_for_comparisons(&watcher, 5).await;
        fs::copy(&file, dir.path().join("copy")).unwrap();
        fs::rename(dir.path().join("copy"), &file).unwrap();
        wait_for_comparisons(&watcher, 5).await;
        // In one step: polls are so short here that two of them could read a file that is only half written.
        write(&dir.path().join("copy"), "new");
        fs::rename(dir.path().join("copy"), &file).unwrap();
        assert_eq!(texts(&next(&mut changes).await), NEW);
    }
}

#[tokio::test]
async fn change_before_the_start_is_reported() {
    for timing in [by_events(), by_polling()] {
        let dir = tree(&["rules/a.yaml"]);
        let layout = rules(dir.path());
        let seen = read_rule_files(&layout);
        write(&dir.path().join("rules/a.yaml"), "new");
        let (_watcher, mut changes) = FileWatcher::start(layout, timing, &seen).unwrap();
        assert_eq!(texts(&next(&mut changes).await), NEW);
    }
}

#[tokio::test]
async fn explicit_reload_reports_unchanged_files() {
    let dir = tree(&["rules/a.yaml"]);
    let (watcher, mut changes) = started(&rules(dir.path()), by_events()).await;
    for _ in 0..3 {
        watcher.reload();
        assert_eq!(texts(&next(&mut changes).await), ["domain: rules/a.yaml\n"]);
    }
}

#[tokio::test]
async fn error_is_reported_once_and_then_the_recovery() {
    for mut timing in [by_events(), by_polling()] {
        timing.poll_interval = Duration::from_millis(10);
        let dir = tree(&["rules/a.yaml"]);
        let file = dir.path().join("rules/a.yaml");
        let (watcher, mut changes) = started(&rules(dir.path()), timing).await;

        fs::remove_file(&file).unwrap();
        assert_eq!(next(&mut changes).await.unwrap_err().errors[0].problem, PathProblem::NoRuleFiles);
        wait_for_comparisons(&watcher, 5).await;
        symlink("nowhere", &file).unwrap();
        assert_eq!(next(&mut changes).await.unwrap_err().errors[0].problem, PathProblem::Dangling);
        wait_for_comparisons(&watcher, 5).await;
        write(&dir.path().join("rules/nowhere"), "domain: rules/a.yaml\n");
        assert_eq!(texts(&next(&mut changes).await), ["domain: rules/a.yaml\n"]);
    }
}

#[tokio::test]
async fn unsettled_contents_are_not_reported() {
    // Linux generates new contents of this file for every read.
    let layout = RuleFilesLocation::Paths(vec!["/proc/sys/kernel/random/uuid".into()]);
    let (watcher, mut changes) = FileWatcher::start(layout.clone(), by_polling(), &read_rule_files(&layout)).unwrap();
    wait_for_comparisons(&watcher, 20).await;
    drop(watcher);
    assert!(changes.next_set().await.is_none());
}

#[tokio::test]
async fn reads_cause_no_comparison() {
    let dir = tree(&["rules/a.yaml"]);
    let (watcher, _changes) = started(&one_file(dir.path()), by_events()).await;
    // Polls at its own pace, which shows that there was time to wake up.
    let (pacer, _paces) = started(&rules(dir.path()), by_polling()).await;
    let before = watcher.comparison_count();
    fs::read(dir.path().join("rules/a.yaml")).unwrap();
    wait_for_comparisons(&pacer, 30).await;
    assert_eq!(watcher.comparison_count(), before);
}

#[test]
fn stamp_of_a_new_file_may_hide_a_change() {
    let dir = tree(&["rules/a.yaml"]);
    let path = dir.path().join("rules/a.yaml");
    let stamps = FileStamps(vec![(path.clone(), Ok(FileStamp::from_metadata(&path.metadata().unwrap())))]);
    let written = path.metadata().unwrap().modified().unwrap();
    let after = [0, 2, 4, 60].map(|seconds| stamps.may_hide_change(written + Duration::from_secs(seconds)));
    assert_eq!(after, [true, true, false, false]);
}

#[tokio::test]
async fn dropping_the_watcher_ends_the_stream() {
    for timing in [by_events(), by_polling()] {
        let dir = tree(&["rules/a.yaml"]);
        let (watcher, mut changes) = started(&rules(dir.path()), timing).await;
        drop(watcher);
        let end = tokio::time::timeout(DEADLINE, changes.next_set()).await.expect("the thread goes on");
        assert!(end.is_none());
    }
}
