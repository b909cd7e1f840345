//! Pods that Helm starts beside the service: their commands run here with the real program.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use super::{RENDERINGS, Rendering, helm, list};
use kit::tollkeeper::{self, program_path};

/// Command and arguments of the first container, with the program of the test.
fn command(spec: &serde_json::Value) -> Vec<&str> {
    let container = &spec["containers"][0];
    let words = [list(&container["command"]), list(&container["args"])].into_iter().flatten();
    let words: Vec<_> = words.map(|word| word.as_str().unwrap()).collect();
    assert_eq!(words[0], "/bin/tollkeeper");
    words
}

/// Writes a ConfigMap as the kubelet mounts it: links to links, so that all files change at once.
fn mount(directory: &Path, name: &str, text: &str) {
    fs::create_dir(directory.join("..2026_01_01")).unwrap();
    fs::write(directory.join("..2026_01_01").join(name), text).unwrap();
    symlink("..2026_01_01", directory.join("..data")).unwrap();
    symlink(Path::new("..data").join(name), directory.join(name)).unwrap();
}

/// Runs the rule check of the chart on a ConfigMap with this file.
fn check(text: &str) -> Output {
    let job = RENDERINGS[0].of_kind("Job").next().unwrap();
    let directory = tempfile::tempdir().unwrap();
    mount(directory.path(), "shop.yaml", text);
    let mut program = Command::new(program_path());
    for word in &command(&job["spec"]["template"]["spec"])[1..] {
        program.arg(if *word == "/rules" { directory.path().as_os_str() } else { word.as_ref() });
    }
    program.env_clear().output().unwrap()
}

#[test]
fn rule_check_fails_on_wrong_rules_only() {
    let right = check("domain: shop\ndescriptors:\n- key: login\n  rate_limit: { unit: day, requests_per_unit: 1 }\n");
    assert_eq!(right.status.code(), Some(0), "{}", String::from_utf8_lossy(&right.stderr));
    let wrong = check("domain: shop\ndescriptors:\n- key: login\n  rate_limit: { unit: dya, requests_per_unit: 1 }\n");
    assert_eq!(wrong.status.code(), Some(1), "{}", String::from_utf8_lossy(&wrong.stdout));
}

#[test]
fn call_of_helm_test_is_answered() {
    let rendering = Rendering::new("chart", helm(&[]).unwrap());
    let words = command(&rendering.of_kind("Pod").next().unwrap()["spec"]);
    let service = tollkeeper::with_rules("domain: shop\n").start();
    let call = |port: u16| {
        let address = format!("--addr=127.0.0.1:{port}");
        let mut program = Command::new(program_path());
        for word in &words[1..] {
            program.arg(if word.starts_with("--addr=") { &address } else { *word });
        }
        program.env_clear().output().unwrap()
    };
    let answered = call(service.grpc_port());
    assert!(answered.status.success(), "{}", String::from_utf8_lossy(&answered.stderr));
    assert!(String::from_utf8_lossy(&answered.stdout).contains("source=helm"));
    let port = service.grpc_port();
    drop(service);
    assert_eq!(call(port).status.code(), Some(1));
}
