//! Locations of rule files: the files of a directory that are read, their names, and rejected ones.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tollkeeper::rules::files::read::read_rule_files;
use tollkeeper::rules::files::{
    MAX_FILE_BYTES, MAX_FILES, PathProblem, RuleFileSetFailure, RuleFileSetResult, RuleFilesLocation,
};

/// A directory with these files; a path that ends in `/` is a directory, `link -> target` a symbolic link.
pub(crate) fn tree(entries: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in entries {
        plant(dir.path(), entry);
    }
    dir
}

fn plant(dir: &Path, entry: &str) {
    if let Some((link, target)) = entry.split_once(" -> ") {
        let link = dir.join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(target, link).unwrap();
    } else if entry.ends_with('/') {
        fs::create_dir_all(dir.join(entry)).unwrap();
    } else {
        let file = dir.join(entry);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("domain: {entry}\n")).unwrap();
    }
}

fn paths(paths: &[PathBuf]) -> RuleFilesLocation {
    RuleFilesLocation::Paths(paths.to_vec())
}

/// `RUNTIME_ROOT` is `root`, the subdirectory `sub`, the app directory `config`.
pub(crate) fn runtime(root: &Path, watch_root: bool, ignore_dotfiles: bool) -> RuleFilesLocation {
    RuleFilesLocation::Runtime {
        root: root.to_owned(),
        subdirectory: "sub".to_owned(),
        app_directory: "config".to_owned(),
        ignore_dotfiles,
        watch_root,
    }
}

/// Reads with a deadline, so that blocking fails the test instead of hanging it.
fn read_within_deadline(location: RuleFilesLocation) -> RuleFileSetResult {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(read_rule_files(&location)));
    result.recv_timeout(Duration::from_secs(60)).expect("reading must not block")
}

fn names(reading: &RuleFileSetResult) -> Vec<String> {
    let sources = reading.as_ref().unwrap_or_else(|errors| panic!("{errors:?}"));
    sources.files.iter().map(|file| file.name.to_string()).collect()
}

fn problems(reading: RuleFileSetResult) -> Vec<PathProblem> {
    reading.expect_err("must fail").errors.into_iter().map(|error| error.problem).collect()
}

#[test]
fn directory_yields_its_rule_files_by_name() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["b.yaml", "a.yml", "c.json"], &["a.yml", "b.yaml", "c.json"]),
        (&["a.yaml", "README.md", "a.yaml~", "yaml"], &["a.yaml"]),
        (&["z/y/x.yaml", "z.yaml"], &["z.yaml", "z/y/x.yaml"]),
        (&["a.yaml", ".a.yaml", ".git/b.yaml"], &["a.yaml"]),
        (&["a.yaml", "rules.schema.json"], &["a.yaml"]),
        (&["..2026_01/a.yaml", "..data -> ..2026_01", "a.yaml -> ..data/a.yaml"], &["a.yaml"]),
        (&["a.yaml", "more -> ../elsewhere-that-is-a-dotfile/.x"], &[]),
        (&["shelf/x.yaml", "book -> shelf"], &["book/x.yaml", "shelf/x.yaml"]),
        (&["dir.yaml/a.yaml"], &["dir.yaml/a.yaml"]),
    ];
    for (entries, expected) in cases {
        let dir = tree(entries);
        let reading = read_within_deadline(paths(&[dir.path().to_owned()]));
        if expected.is_empty() {
            assert_eq!(problems(reading), [PathProblem::Dangling], "{entries:?}");
            continue;
        }
        let expected: Vec<_> = expected.iter().map(|it| dir.path().join(it).display().to_string()).collect();
        assert_eq!(names(&reading), expected, "{entries:?}");
    }
}

#[test]
fn files_are_read_as_raw_bytes() {
    let dir = tree(&["a.yaml"]);
    fs::write(dir.path().join("a.yaml"), b"\xff\x00\r\n").unwrap();
    let sources = read_within_deadline(paths(&[dir.path().join("a.yaml")])).unwrap();
    assert_eq!(sources.files[0].bytes, b"\xff\x00\r\n");
    assert_eq!(sources.files[0].path, dir.path().join("a.yaml"));
}

#[test]
fn given_file_is_read_once_whatever_its_name() {
    let dir = tree(&["rules.conf", ".hidden", "d/a.yaml"]);
    let at = |name: &str| dir.path().join(name);
    let reading =
        read_within_deadline(paths(&[at("rules.conf"), at(".hidden"), at("d"), at("d/a.yaml"), at("rules.conf")]));
    let expected: Vec<_> =
        [".hidden", "d/a.yaml", "rules.conf"].iter().map(|it| at(it).display().to_string()).collect();
    assert_eq!(names(&reading), expected);
}

#[test]
fn runtime_directory_yields_the_files_of_envoyproxy_ratelimit() {
    // Entries; watch_root; ignore_dotfiles; the names.
    let cases: &[(&[&str], bool, bool, &[&str])] = &[
        (&["sub/config/b.yaml", "sub/config/a"], true, false, &["config.a", "config.b.yaml"]),
        (&["sub/config/b.yaml", "sub/config/a"], false, false, &["a", "b.yaml"]),
        (&["sub/config/deep/er/a.yaml"], true, false, &["config.deep.er.a.yaml"]),
        (&["sub/config/deep/er/a.yaml"], false, false, &["deep.er.a.yaml"]),
        (&["sub/config.a.yaml", "sub/configs/b.yaml", "sub/other/c.yaml"], true, false, &["config.a.yaml"]),
        (&["sub/config/.a", "sub/config/.d/b", "sub/config/c"], true, false, &["config..a", "config..d.b", "config.c"]),
        (&["sub/config/.a", "sub/config/.d/b", "sub/config/c"], true, true, &["config.c"]),
        (&["sub/config/.a", "sub/config/.d/b", "sub/config/c"], false, true, &["c"]),
        (
            &["sub/config/..1/a.yaml", "sub/config/..data -> ..1", "sub/config/a.yaml -> ..data/a.yaml"],
            false,
            false,
            &["a.yaml"],
        ),
        (&["sub/config/a", "sub/config/.#a -> user@host.1"], false, false, &["a"]),
        (&["elsewhere/a.yaml", "sub/config -> ../elsewhere"], false, false, &["a.yaml"]),
        (&["elsewhere/a.yaml", "sub/config -> ../elsewhere"], true, false, &["config.a.yaml"]),
    ];
    for (entries, watch_root, ignore_dotfiles, expected) in cases {
        let root = tree(entries);
        let reading = read_within_deadline(runtime(root.path(), *watch_root, *ignore_dotfiles));
        assert_eq!(names(&reading), *expected, "{entries:?} {watch_root} {ignore_dotfiles}");
        assert!(reading.unwrap().warnings.is_empty(), "{entries:?}");
    }
}

#[test]
fn of_two_runtime_files_with_one_dotted_name_the_later_is_read() {
    let root = tree(&["sub/config/a/b.yaml", "sub/config/a.b.yaml"]);
    let sources = read_within_deadline(runtime(root.path(), false, false)).unwrap();
    assert_eq!(sources.files.len(), 1);
    assert_eq!(sources.files[0].path, root.path().join("sub/config/a.b.yaml"));
    assert_eq!(sources.warnings[0].path, root.path().join("sub/config/a/b.yaml"));
}

#[test]
fn missing_runtime_directory_is_rejected_like_envoyproxy_ratelimit() {
    // Entries below the temporary directory; watch_root; whether it loads.
    let cases: &[(&[&str], bool, bool)] = &[
        (&["root/sub/config/"], false, true),
        (&["root/sub/config/"], true, true),
        (&["root/sub/"], false, false),
        (&["root/sub/"], true, true),
        (&["root/"], true, true),
        (&[], true, true),
        (&[], false, false),
    ];
    for (entries, watch_root, loads) in cases {
        let dir = tree(entries);
        let reading = read_within_deadline(runtime(&dir.path().join("root"), *watch_root, false));
        match reading {
            Ok(sources) => {
                assert!(loads, "{entries:?} {watch_root}");
                assert_eq!((sources.files.len(), sources.warnings.len()), (0, 1), "{entries:?} {watch_root}");
            }
            Err(RuleFileSetFailure { errors, .. }) => {
                assert!(!loads, "{entries:?} {watch_root}: {errors:?}");
                assert_eq!(errors[0].problem, PathProblem::Missing);
            }
        }
    }
    let dir = tree(&[]);
    let orphan = dir.path().join("not/there");
    assert_eq!(problems(read_within_deadline(runtime(&orphan, true, false))), [PathProblem::Missing]);
}

#[test]
fn unset_runtime_variables_mean_no_rules_and_a_warning() {
    let unset = |root: &str, subdirectory: &str, app_directory: &str, watch_root| RuleFilesLocation::Runtime {
        root: root.into(),
        subdirectory: subdirectory.to_owned(),
        app_directory: app_directory.to_owned(),
        ignore_dotfiles: false,
        watch_root,
    };
    let cases = [
        (unset("", "sub", "config", true), "RUNTIME_ROOT"),
        (unset("", "sub", "config", false), "RUNTIME_ROOT"),
        (unset("/", "", "config", true), "RUNTIME_SUBDIRECTORY"),
        (unset("/", "sub", "", false), "RUNTIME_APPDIRECTORY"),
    ];
    for (layout, variable) in cases {
        let sources = read_within_deadline(layout).unwrap();
        assert!(sources.files.is_empty());
        assert_eq!(sources.warnings.len(), 1);
        assert_eq!(sources.warnings[0].problem, PathProblem::Unset(variable));
    }
}

#[test]
fn unreadable_file_is_rejected_with_path_and_fix() {
    let cases: &[(&[&str], &str, &str)] = &[
        (&[], "gone.yaml", "gone.yaml: no such file or directory; check the spelling"),
        (&["x.yaml -> nowhere"], "", "x.yaml: the symbolic link leads nowhere; remove the link"),
        (&["x.yaml -> nowhere"], "x.yaml", "x.yaml: the symbolic link leads nowhere; remove the link"),
        (&["a.yaml", "x -> x"], "", "x: symbolic links form a loop; remove the link"),
        (&["a.yaml", "d/up -> .."], "", "d/up: symbolic links form a loop; remove the link"),
        (&["d/a.yaml", "d/x.yaml -> ../s.yaml", "s.yaml"], "d", "d/x.yaml: a symbolic link leads out of the directory"),
        (&["d/a.yaml", "d/x.yaml -> /proc/self/environ"], "d", "d/x.yaml: a symbolic link leads out of the directory"),
        (
            &["d/a.yaml", "d/x.yaml -> .y", "d/.y -> ../s", "s"],
            "d",
            "d/x.yaml: a symbolic link leads out of the directory",
        ),
        (&["d/a.yaml", "d/up.d -> ../s", "s/b.yaml"], "d", "d/up.d: a symbolic link leads out of the directory"),
        (&["d/a.yaml", "d/up -> ../s", "s/b.yaml"], "d", "d/up: a symbolic link leads out of the directory"),
        (&["d/README.md"], "d", "d: the directory has no rule files; add a .yaml"),
        (&["d/"], "d", "d: the directory has no rule files; add a .yaml"),
        (&["a.yaml"], "a.yaml/b.yaml", "a.yaml/b.yaml: cannot be read: Not a directory"),
    ];
    for (entries, given, expected) in cases {
        let dir = tree(entries);
        let errors = read_within_deadline(paths(&[dir.path().join(given)])).expect_err("must fail").errors;
        let message = errors[0].to_string();
        assert!(message.contains(expected), "{message}");
        assert_eq!(errors.len(), 1, "{errors:?}");
    }
}

#[test]
fn all_problems_are_reported_at_once() {
    let dir = tree(&["a.yaml", "b.yaml -> nowhere", "d/"]);
    let reading = read_within_deadline(paths(&[dir.path().to_owned(), dir.path().join("d"), dir.path().join("e")]));
    assert_eq!(problems(reading), [PathProblem::Dangling, PathProblem::NoRuleFiles, PathProblem::Missing]);
}

#[test]
fn readable_files_of_a_rejected_set_are_kept_for_checking() {
    let dir = tree(&["a.yaml", "b.yaml -> nowhere", "c.yaml"]);
    let failure = read_within_deadline(paths(&[dir.path().to_owned()])).expect_err("must fail");
    assert_eq!(failure.errors.len(), 1);
    assert_eq!(
        names(&Ok(failure.readable)),
        [dir.path().join("a.yaml"), dir.path().join("c.yaml")].map(|path| path.display().to_string())
    );
}

#[test]
fn fifos_sockets_and_devices_are_rejected_without_blocking() {
    for (how, word) in [("fifo", "a FIFO"), ("socket", "a socket"), ("device", "a device")] {
        let dir = tree(&["sub/config/", "ok.yaml"]);
        let file = dir.path().join("sub/config/x.yaml");
        let _listener = match how {
            "fifo" => {
                assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
                None
            }
            "socket" => Some(UnixListener::bind(&file).unwrap()),
            _ => {
                symlink("/dev/zero", &file).unwrap();
                None
            }
        };
        let layouts = [
            RuleFilesLocation::Paths(vec![file.clone()]),
            paths(&[dir.path().to_owned()]),
            runtime(dir.path(), true, false),
            runtime(dir.path(), false, false),
        ];
        for layout in layouts {
            // A device is reached by a link, which a searched directory may not have.
            let leads_out =
                how == "device" && !matches!(&layout, RuleFilesLocation::Paths(paths) if *paths == [file.clone()]);
            let expected = if leads_out { PathProblem::LeadsOut } else { PathProblem::NotAFile(word) };
            assert_eq!(problems(read_within_deadline(layout)), [expected], "{how}");
        }
    }
}

#[test]
fn oversized_files_are_rejected_without_reading() {
    let dir = tree(&["a.yaml"]);
    let file = dir.path().join("a.yaml");
    let cases = [(MAX_FILE_BYTES, true), (MAX_FILE_BYTES + 1, false), (100 << 20, false), (1 << 40, false)];
    for (size, loads) in cases {
        File::create(&file).unwrap().set_len(size).unwrap();
        match read_within_deadline(RuleFilesLocation::Paths(vec![file.clone()])) {
            Ok(sources) => assert!(loads && sources.files[0].bytes.len() as u64 == size, "{size}"),
            Err(RuleFileSetFailure { errors, .. }) => {
                assert!(!loads && errors[0].problem == PathProblem::FileTooLarge(size), "{size}");
            }
        }
    }
}

#[test]
fn total_size_is_bounded() {
    let dir = tree(&["a.yaml", "b.yaml", "c.yaml", "d.yaml", "e.yaml", "f.yaml"]);
    for name in ["a.yaml", "b.yaml", "c.yaml", "d.yaml"] {
        File::create(dir.path().join(name)).unwrap().set_len(MAX_FILE_BYTES).unwrap();
    }
    let errors = read_within_deadline(paths(&[dir.path().to_owned()])).expect_err("must fail").errors;
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].problem, PathProblem::TotalTooLarge);
    assert_eq!(errors[0].path, dir.path().join("e.yaml"));
}

#[test]
fn too_many_files_are_one_error() {
    let dir = tree(&[]);
    for i in 0..MAX_FILES {
        File::create(dir.path().join(format!("{i}.yaml"))).unwrap();
    }
    assert_eq!(names(&read_within_deadline(paths(&[dir.path().to_owned()]))).len(), MAX_FILES);
    plant(dir.path(), "one.yaml");
    plant(dir.path(), "two.yaml");
    assert_eq!(problems(read_within_deadline(paths(&[dir.path().to_owned()]))), [PathProblem::TooManyFiles]);
}

#[test]
fn nesting_is_bounded_with_and_without_links() {
    let dir = tree(&[]);
    plant(dir.path(), &format!("{}a.yaml", "d/".repeat(40)));
    assert!(matches!(problems(read_within_deadline(paths(&[dir.path().to_owned()])))[..], [PathProblem::TooDeep(_)]));

    // Each level reaches the next one twice: 2^18 paths to one file, and no loop. The kernel follows 40 links in a
    // path; a mount elsewhere makes it begin again, and both attempts count.
    let dir = tree(&["18/a.yaml"]);
    for level in 0..18 {
        plant(dir.path(), &format!("{level}/x -> ../{}", level + 1));
        plant(dir.path(), &format!("{level}/y -> ../{}", level + 1));
    }
    let found = problems(read_within_deadline(paths(&[dir.path().to_owned()])));
    assert!(matches!(found[..], [PathProblem::TooManyFiles | PathProblem::TooManyEntries(_)]), "{found:?}");
}

#[test]
fn schema_beside_the_rules_is_not_loaded() {
    let dir = tree(&["sub/config/a.yaml", "sub/config/rules.schema.json"]);
    for watch_root in [true, false] {
        let found = names(&read_within_deadline(runtime(dir.path(), watch_root, false)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].ends_with("a.yaml"), "{found:?}");
    }
}

mod set_files {
    use std::path::Path;
    use std::path::PathBuf;
    use tollkeeper::rules::files::read::find_set_file_names;
    use tollkeeper::rules::files::read::resolve_set_file_path;

    #[test]
    fn names_are_found_where_the_compiler_reads_them() {
        let text = "
domain: d
descriptors:
  - key: a
    match: { in: { file: a.txt } }
    descriptors:
      - key: b
        match: { not: { cidr: { file: lists/b.list } } }
      - { key: c, match: { in: { file: a.txt } }, metadata: { match: { in: { file: no.txt } } } }
---
domain: e
descriptors: [{ key: d, match: { cidr: { file: e.txt } } }]
";
        let mut names = find_set_file_names(text.as_bytes());
        names.sort();
        assert_eq!(names, ["a.txt", "e.txt", "lists/b.list"]);
        assert!(find_set_file_names(b"match: { file: [").is_empty());
    }

    #[test]
    fn names_stay_below_the_directory_of_the_rule_file() {
        let resolve = |name: &str| resolve_set_file_path(Path::new("/rules/shop/a.yaml"), name);
        assert_eq!(resolve("lists/b.txt"), Ok(PathBuf::from("/rules/shop/lists/b.txt")));
        assert_eq!(resolve_set_file_path(Path::new("a.yaml"), "b.list"), Ok(PathBuf::from("b.list")));
        for name in
            ["", "/etc/passwd", "/etc/a.txt", "../a.txt", "x/../../a.txt", "a.yaml", "a", "a.json", "a\n.txt", "a#.txt"]
        {
            assert!(resolve(name).is_err(), "{name}");
        }
    }
}

#[test]
fn links_below_the_directory_are_read() {
    let dir = tree(&[
        "d/..2026/a.yaml",
        "d/README -> ../s",
        "s",
        "d/..data -> ..2026",
        "d/a.yaml -> ..data/a.yaml",
        "d/e/b.yaml",
        "d/c -> e",
    ]);
    let base = dir.path().join("d");
    let expected = ["a.yaml", "c/b.yaml", "e/b.yaml"].map(|name| base.join(name).display().to_string());
    assert_eq!(names(&read_within_deadline(paths(std::slice::from_ref(&base)))), expected);
    // The directory itself may be a link.
    let dir = tree(&["v2/a.yaml", "current -> v2"]);
    let current = dir.path().join("current");
    assert_eq!(
        names(&read_within_deadline(paths(std::slice::from_ref(&current)))),
        [current.join("a.yaml").display().to_string()]
    );
}

/// What lies outside is in no message, whichever file of the rules leads there.
#[test]
fn messages_show_nothing_of_files_that_links_lead_to() {
    const SECRET: &str = "s3cr3t-token";
    let rule = |rest: &str| format!("domain: d\n{rest}");
    let set = "descriptors:\n- {key: k, match: {cidr: {file: x.txt}}, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let table = "plans: {a: {unit: day, requests_per_unit: 1}}\ntables: {t: {file: x.csv}}\ndescriptors:\n- {key: k, plan: {from: t, default: a}}\n";
    for (name, rules) in [("x.yaml", ""), ("x.txt", set), ("x.csv", table)] {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("rules");
        fs::create_dir(&inside).unwrap();
        fs::write(dir.path().join("secret"), format!("{SECRET}: [{SECRET}\n")).unwrap();
        symlink("../secret", inside.join(name)).unwrap();
        fs::write(inside.join("a.yaml"), rule(rules)).unwrap();
        let mut given = vec![inside.clone()];
        if name == "x.yaml" {
            given.push(inside.join(name));
        }
        for given in given {
            let check = Command::new(kit::tollkeeper::program_path()).arg("check").arg(&given).output().unwrap();
            let output = String::from_utf8([check.stdout, check.stderr].concat()).unwrap();
            assert_eq!(check.status.code(), Some(1), "{name}: {output}");
            assert!(output.contains("a symbolic link leads out of the directory of the rules"), "{name}: {output}");
            assert!(!output.contains(SECRET), "{name}: {output}");
        }
    }
}
