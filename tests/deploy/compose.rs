//! `deploy/compose.yaml`, as far as it can be checked without Docker: its schema, Envoy's bootstrap and the rules in
//! it, which run together here, and the file that a release publishes.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use super::{run_tool, tool};
use kit::envoy::{Envoy, validate};
use kit::json_schema::schema_errors;
use kit::tollkeeper::{program_path, with_rules};
use kit::{read, repository};

const FILE: &str = "deploy/compose.yaml";

/// The schema of the Compose specification.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let text = fs::read_to_string(tool("COMPOSE")).expect("deploy/install-tools.sh installs the schema");
    serde_json::from_str(&text).unwrap()
});

fn parse(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}"))
}

/// The text of a file in `configs`.
fn config(compose: &str, name: &str) -> String {
    let content = parse(compose)["configs"][name]["content"].as_str().map(str::to_owned);
    content.unwrap_or_else(|| panic!("no configs.{name}.content"))
}

fn assert_valid(text: &str) {
    assert_eq!(schema_errors(&SCHEMA, &parse(text)), [""; 0]);
}

#[test]
fn compose_file_fits_the_specification() {
    let text = read(&repository(FILE));
    assert_valid(&text);
    let wrong = parse(&text.replace("depends_on:", "depends_upon:"));
    assert!(!schema_errors(&SCHEMA, &wrong).is_empty(), "the schema tells");
    // Compose would replace what follows a dollar in these texts.
    for name in ["rules", "envoy"] {
        assert!(!config(&text, name).contains('$'), "{name}");
    }
}

#[test]
fn images_of_compose_have_versions_and_ports_stay_on_this_machine() {
    let file = parse(&read(&repository(FILE)));
    for (name, service) in file["services"].as_object().unwrap() {
        let image = service["image"].as_str().unwrap();
        let (_, tag) = image.rsplit_once(':').unwrap_or_else(|| panic!("{name}: {image}"));
        assert!(tag != "latest" && (tag.contains(|c: char| c.is_ascii_digit()) || tag == "local}"), "{name}: {image}");
        for port in service["ports"].as_array().into_iter().flatten() {
            assert!(port.as_str().unwrap().starts_with("127.0.0.1:"), "{name}: {port}");
        }
    }
}

#[test]
fn settings_and_rules_of_compose_are_valid() {
    let text = read(&repository(FILE));
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.yaml");
    fs::write(&rules, config(&text, "rules")).unwrap();
    let checked = run_tool(Command::new(program_path()).arg("check").arg(&rules), "").unwrap();
    assert!(checked.contains("1 file, 0 errors, 0 warnings"), "{checked}");
    let service = &parse(&text)["services"]["tollkeeper"];
    let mut check = Command::new(program_path());
    check.args(["check", "--env"]).env_clear();
    for (name, value) in service["environment"].as_object().unwrap() {
        check.env(name, value.as_str().unwrap());
    }
    run_tool(&mut check, "").unwrap();
    let arguments: Vec<_> = service["command"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(arguments, ["/bin/tollkeeper", "serve", "--config", "/rules/rules.yaml"]);
    assert_eq!(service["configs"][0]["target"], arguments[3]);
}

/// Envoy and tollkeeper with the texts of the file: five requests pass, the sixth is rejected.
#[test]
fn envoy_and_tollkeeper_of_compose_limit_logins() {
    let text = read(&repository(FILE));
    let directory = tempfile::tempdir().unwrap();
    let bootstrap = directory.path().join("envoy.yaml");
    fs::write(&bootstrap, config(&text, "envoy")).unwrap();
    let validated = validate(&bootstrap);
    assert!(validated.status.success(), "{validated:?}");

    let tollkeeper = with_rules(&config(&text, "rules")).start();
    let envoy = Envoy::start_file(FILE, &[tollkeeper.grpc_port()], |text| {
        config(&text, "envoy").replace("address: tollkeeper,", "address: 127.0.0.1,").replace("0.0.0.0", "127.0.0.1")
    });
    let request = envoy.get("/").header("x-login", "ann");
    let statuses: Vec<_> = (0..6).map(|_| request.send().status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
    assert_eq!(envoy.stat("cluster.upstream.ratelimit.error"), 0);
}

#[test]
fn released_compose_file_names_its_image() {
    let directory = tempfile::tempdir().unwrap();
    let mut script = Command::new(repository(".ci/release-compose"));
    run_tool(script.args(["9.8.7", "registry.example/edge/tollkeeper"]).arg(directory.path()), "").unwrap();
    let text = read(&directory.path().join("compose.yaml"));
    assert_valid(&text);
    let service = &parse(&text)["services"]["tollkeeper"];
    assert_eq!(service["image"], "${TOLLKEEPER_IMAGE:-registry.example/edge/tollkeeper:9.8.7}");
    assert!(service["build"].is_null() && !text.contains("-f deploy/"), "{text}");
}
