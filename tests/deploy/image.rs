//! The Dockerfile, as far as it can be checked without a build: copied files exist and are not ignored, links are
//! names of the program, and the image runs as an unprivileged user.

use std::process::Command;

use kit::tollkeeper::program_path;
use kit::{read, repository};

fn dockerfile() -> String {
    // Joins continued lines.
    read(&repository("deploy/Dockerfile")).replace("\\\n", " ")
}

/// Arguments of each instruction with this name.
fn instructions(name: &str) -> Vec<Vec<String>> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let all = dockerfile();
    let lines = all.lines().filter_map(|line| line.strip_prefix(&format!("{name} ")));
    lines.map(words).collect()
}

#[test]
fn copied_files_exist_and_are_not_ignored() {
    let ignored = read(&repository(".dockerignore"));
    let sent: Vec<_> = ignored.lines().filter_map(|line| line.strip_prefix('!')).collect();
    assert!(ignored.lines().any(|line| line == "*"), "everything else stays");
    let copied = instructions("COPY").into_iter().filter(|words| !words[0].starts_with("--from"));
    let copied: Vec<String> = copied.flat_map(|words| words[..words.len() - 1].to_vec()).collect();
    assert_eq!(copied.len(), sent.len());
    for path in copied {
        assert!(repository(&path).exists() && sent.contains(&path.as_str()), "{path}");
    }
}

#[test]
fn compiler_meets_the_minimum_rust_version() {
    let version = dockerfile().lines().find_map(|line| {
        let image = line.strip_prefix("ARG BUILD_IMAGE=rust:")?;
        Some(image.split_once('-')?.0.to_owned())
    });
    let number = |version: &str| version.split('.').map(|part| part.parse().unwrap()).collect::<Vec<u32>>();
    let least = env!("CARGO_PKG_RUST_VERSION");
    assert!(number(&version.unwrap()) >= number(least));
}

#[test]
fn bases_are_pinned_by_digest() {
    let all = dockerfile();
    let bases: Vec<_> = all.lines().filter_map(|line| line.strip_prefix("ARG ")?.split_once("_IMAGE=")).collect();
    assert_eq!(bases.len(), 2);
    for (name, image) in bases {
        let (_, digest) = image.split_once("@sha256:").unwrap_or_else(|| panic!("{name}: {image}"));
        assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}: {image}");
    }
    // Every stage builds on one of them, or on nothing.
    for words in instructions("FROM") {
        assert!(
            ["${BUILD_IMAGE}", "${RUNTIME_IMAGE}", "scratch"].iter().any(|base| words.iter().any(|word| word == base)),
            "{words:?}"
        );
    }
}

#[test]
fn image_builds_with_the_release_profile() {
    let all = dockerfile();
    assert!(all.contains("cargo build --locked --release --bin tollkeeper "), "{all}");
    for other in ["RUSTFLAGS", "target-cpu", "musl", "--features", "CARGO_PROFILE"] {
        assert!(!all.contains(other), "{other} is another program");
    }
    assert!(all.contains("amd64)") && all.contains("arm64)"));
}

#[test]
fn image_runs_as_a_numeric_non_root_user() {
    let users = instructions("USER");
    let [user] = &users[..] else { panic!("{users:?}") };
    let (user, group) = user[0].split_once(':').unwrap();
    assert!(user.parse::<u32>().unwrap() > 0 && group.parse::<u32>().unwrap() > 0);
    // Manifests of envoyproxy/ratelimit set a command, which an entry point would treat as an argument.
    assert!(instructions("ENTRYPOINT").is_empty());
    assert_eq!(instructions("CMD"), [[r#"["/bin/tollkeeper","#, r#""serve"]"#]]);
}

#[test]
fn links_are_names_of_the_program() {
    let all = dockerfile();
    let names = all.split("for name in ").nth(1).unwrap().split(';').next().unwrap();
    let names: Vec<_> = names.split_whitespace().collect();
    assert_eq!(names, ["ratelimit", "config_check_cmd"]);
    let directory = tempfile::tempdir().unwrap();
    let rules = repository("config/example.yaml");
    for name in names {
        let link = directory.path().join(name);
        std::os::unix::fs::symlink(program_path(), &link).unwrap();
        let mut command = Command::new(&link);
        // Runs each link with an argument that only that program accepts.
        match name {
            "ratelimit" => command.arg("--version"),
            _ => command.arg("-config_dir").arg(rules.parent().unwrap()),
        };
        let response = command.output().unwrap();
        let text = String::from_utf8_lossy(&response.stdout) + String::from_utf8_lossy(&response.stderr);
        let expected = match name {
            "ratelimit" => "tollkeeper ",
            _ => "checking rate limit configs",
        };
        assert!(text.contains(expected), "{name}: {text}");
    }
}
