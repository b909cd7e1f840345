//! Values of the chart: rejected values, and the effect of the others on the manifests.

use serde_json::{Value, json};

use super::{RENDERINGS, Rendering, documents, helm, list, run_tool, tool};
use crate::generated::{self, assert_up_to_date};
use kit::{read, repository};

fn rendered(arguments: &[&str]) -> Rendering {
    Rendering::new("chart", helm(arguments).unwrap_or_else(|problem| panic!("{arguments:?}: {problem}")))
}

/// Checks that the chart rejects these values with an error that contains all `words`.
fn assert_rejected(values: &[&str], words: &[&str]) {
    let arguments: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
    let problem = helm(&arguments).err().unwrap_or_else(|| panic!("{values:?} were taken"));
    for word in words {
        assert!(problem.contains(word), "{values:?}: {word:?} is not in {problem}");
    }
}

#[test]
fn several_replicas_without_redis_are_rejected() {
    let fix = ["set redis.url", "allowReplicasOnMemory"];
    let all = |own: &[&'static str]| [own, &fix].concat();
    assert_rejected(&["replicaCount=2"], &all(&["replicaCount is 2"]));
    assert_rejected(&["autoscaling.enabled=true"], &all(&["autoscaling.maxReplicas is 10"]));
    assert_rejected(
        &["autoscaling.enabled=true", "autoscaling.minReplicas=1"],
        &all(&["autoscaling.maxReplicas is 10"]),
    );
    assert_rejected(&["replicaCount=3", "settings.LOG_LEVEL=info"], &all(&["replicaCount is 3"]));

    for (taken, replicas) in [
        (&["replicaCount=3", "redis.url=redis:6379"][..], json!(3)),
        (&["replicaCount=3", "allowReplicasOnMemory=true"], json!(3)),
        (&["replicaCount=3", "settings.REDIS_URL=redis:6379"], json!(3)),
        (&["replicaCount=3", "extraEnv[0].name=REDIS_URL", "extraEnv[0].value=redis:6379"], json!(3)),
        (&["autoscaling.enabled=true", "redis.url=redis:6379"], Value::Null),
        (&["autoscaling.enabled=true", "autoscaling.minReplicas=1", "autoscaling.maxReplicas=1"], Value::Null),
    ] {
        let arguments: Vec<&str> = taken.iter().flat_map(|value| ["--set", value]).collect();
        assert_eq!(rendered(&arguments).deployment()["spec"]["replicas"], replicas, "{taken:?}");
    }
}

#[test]
fn contradictory_values_are_rejected_with_a_fix() {
    for (values, words) in [
        (&["autoscaling.enabled=true", "autoscaling.minReplicas=20"][..], &["autoscaling.minReplicas"][..]),
        (&["existingSecret=mine", "existingSecretKeys.redisAuth=secret"], &["set redis.url"]),
        (&["redis.tls.enabled=true"], &["set redis.url"]),
        (&["existingSecret=mine"], &["existingSecretKeys", "name them"]),
        (&["existingSecretKeys.adminToken=token"], &["set existingSecret"]),
        (&["tls.enabled=true"], &["tls.existingSecret"]),
        (&["tls.clientCAKey=ca.crt"], &["set tls.enabled"]),
        (&["tls.http=true"], &["set tls.enabled"]),
        (&["tls.enabled=true", "tls.existingSecret=pair", "tls.clientSAN=a"], &["set tls.clientCAKey"]),
        (&["redis.url=redis:6379", "redis.tls.enabled=true", "redis.tls.certKey=a"], &["redis.tls.keyKey"]),
        (&["shutdown.drainSeconds=60"], &["shutdown.timeoutSeconds must be longer"]),
        (&["serviceMonitor.enabled=true", "metrics.enabled=false"], &["set metrics.enabled"]),
        (&["settings.GRPC_PORT=1"], &["settings.GRPC_PORT", "ports.grpc"]),
        (&["extraEnv[0].name=RUNTIME_ROOT"], &["extraEnv", "RUNTIME_ROOT"]),
        (&["extraEnv[0].name=GRPC_MAX_CONNECTION_AGE"], &["put it into the value settings"]),
    ] {
        assert_rejected(values, words);
    }
}

#[test]
fn invalid_values_are_rejected() {
    for (value, place) in [
        ("replicaCout=2", "replicaCout"),
        ("image.sha=1", "sha"),
        ("replicaCount=many", "replicaCount"),
        ("replicaCount=-1", "replicaCount"),
        ("minReadySeconds=-1", "minReadySeconds"),
        ("ruleCheck.ttlSecondsAfterFinished=0", "ttlSecondsAfterFinished"),
        ("image.digest=latest", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("redis.type=ring", "type"),
        ("memoryBytes=256Mi", "memoryBytes"),
        ("maxConnectionAge=5", "maxConnectionAge"),
        ("ports.grpc=70000", "grpc"),
        ("secret.adminToken=0123456789abcdef", "secret"),
        ("global.imageRegistry=https://mirror.example", "imageRegistry"),
        ("sidecars[0].image=shipper", "name"),
        ("extraObjects[0].kind=ConfigMap", "apiVersion"),
        ("dnsPolicy=Never", "dnsPolicy"),
        ("podDisruptionBudget.unhealthyPodEvictionPolicy=Never", "unhealthyPodEvictionPolicy"),
        ("networkPolicy.redisPorts[0]=70000", "redisPorts"),
        ("test.descriptor=login", "descriptor"),
        ("service.type=NodePort", "type"),
        ("settings.log_level=info", "log_level"),
        ("rules.notes\\.txt=domain: a", "notes.txt"),
        ("probes.readiness.path=/ready", "path"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("existingConfigMaps[0]=Not_A_Name", "existingConfigMaps"),
        ("fullnameOverride=edge.limits", "fullnameOverride"),
    ] {
        assert_rejected(&[value], &["values don't meet the specifications of the schema", place]);
    }
}

#[test]
fn image_is_named_by_tag_or_digest() {
    let digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let with_digest = format!("image.digest={digest}");
    let version = env!("CARGO_PKG_VERSION");
    for (values, image) in [
        (&[][..], format!("registry.example/tollkeeper:{version}")),
        (&["--set", "image.tag=edge"], "registry.example/tollkeeper:edge".to_owned()),
        (&["--set", "image.tag=edge", "--set", &with_digest], format!("registry.example/tollkeeper@{digest}")),
    ] {
        let rendering = rendered(values);
        let pods = [&["Deployment"][..], &["Job", "Pod"]].concat();
        let images: Vec<_> = pods.into_iter().flat_map(|kind| rendering.of_kind(kind)).map(first_image).collect();
        assert_eq!(images, [&image, &image, &image]);
    }
    let chart = &documents(&read(&repository("deploy/chart/Chart.yaml")))[0];
    assert_eq!((&chart["version"], &chart["appVersion"]), (&json!(version), &json!(version)));
    let plain = &RENDERINGS[2];
    assert_eq!(plain.container()["image"], format!("tollkeeper:{version}"));
}

/// Image of the first container of a pod or of an object that creates pods.
fn first_image(manifest: &Value) -> &str {
    let spec = if manifest["kind"] == "Pod" { &manifest["spec"] } else { &manifest["spec"]["template"]["spec"] };
    spec["containers"][0]["image"].as_str().unwrap()
}

/// The volume of that name, and where it is mounted.
fn volume<'a>(rendering: &'a Rendering, name: &str) -> Option<(&'a Value, &'a str)> {
    let pod = &rendering.deployment()["spec"]["template"]["spec"];
    let volume = list(&pod["volumes"]).iter().find(|volume| volume["name"] == name)?;
    let mount = list(&rendering.container()["volumeMounts"]).iter().find(|mount| mount["name"] == name).unwrap();
    Some((volume, mount["mountPath"].as_str().unwrap()))
}

#[test]
fn secrets_are_mounted_as_files_not_environment() {
    assert!(RENDERINGS[0].of_kind("Secret").next().is_none() && volume(&RENDERINGS[0], "secrets").is_none());
    // Each setting names a file in the volume of its Secret.
    let (volume, mount) = volume(&RENDERINGS[1], "secrets").unwrap();
    let items = list(&volume["secret"]["items"]);
    let settings = [
        "TOLLKEEPER_ADMIN_TOKEN_FILE",
        "TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE",
        "TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE",
        "REDIS_AUTH_FILE",
        "REDIS_PERSECOND_AUTH_FILE",
        "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE",
        "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE",
    ];
    let keys = [
        "token",
        "global-password",
        "global-sentinel-password",
        "redis-password",
        "second-password",
        "second-sentinel-password",
        "sentinel-password",
    ];
    assert_eq!(items.len(), settings.len());
    for (setting, key) in settings.into_iter().zip(keys) {
        let file = RENDERINGS[1].setting(setting).strip_prefix(mount).and_then(|file| file.strip_prefix('/'));
        let item = items.iter().find(|item| item["path"].as_str() == file);
        assert_eq!(item.unwrap_or_else(|| panic!("{setting}"))["key"], key);
    }
}

/// The chart finds secrets among settings by their names; this compares its pattern with the table of settings.
#[test]
fn secret_settings_are_rejected_in_plain_values() {
    let page = read(&repository("docs/reference/settings.md"));
    let items = page.lines().filter_map(|line| line.strip_prefix("- `")?.split_once("` ("));
    let secrets: Vec<_> = items.filter(|(_, rest)| rest.starts_with("secret text)")).map(|(name, _)| name).collect();
    assert!(secrets.len() >= 4, "{secrets:?}");
    // Variants are listed by name only.
    let names = page.lines().filter_map(|line| line.strip_prefix("- `")?.strip_suffix('`'));
    let is_secret_variant = |name: &&str| {
        ["_LOGS", "_METRICS", "_TRACES", "_PERSECOND"]
            .iter()
            .any(|infix| name.contains(infix) && secrets.contains(&name.replacen(infix, "", 1).as_str()))
    };
    let variants: Vec<_> = names.filter(is_secret_variant).collect();
    assert!(variants.len() >= 5, "{variants:?}");
    for name in secrets.iter().chain(&variants).copied() {
        let value = format!("settings.{name}=0123456789abcdef");
        assert_rejected(&["redis.url=redis:6379", &value], &[name, "is a secret"]);
    }
    let problem = helm(&["--set", "redis.url=redis://ann:sesame@redis:6379"]).err().unwrap();
    assert!(!problem.contains("sesame"), "{problem}");
}

#[test]
fn unknown_settings_are_rejected_with_the_nearest_name() {
    for (wrong, right) in [
        ("LOG_LEVLE", "LOG_LEVEL"),
        ("LOG_LEVEL_", "LOG_LEVEL"),
        ("OG_LEVEL", "LOG_LEVEL"),
        ("TOLLKEEPER_STORE_TIMOUT", "TOLLKEEPER_STORE_TIMEOUT"),
        ("SHADOWMODE", "SHADOW_MODE"),
    ] {
        let value = format!("settings.{wrong}=1");
        assert_rejected(&[&value], &[&format!("settings.{wrong} is no setting: did you mean {right}?")]);
    }
}

/// The chart refuses names that are not in its list; this compares the list with the table of settings.
#[test]
fn settings_of_the_chart_are_those_of_the_program() {
    assert_up_to_date(&generated::settings());
}

#[test]
fn certificates_are_mounted_at_the_configured_paths() {
    let full = &RENDERINGS[1];
    let (grpc, mount) = volume(full, "tls").unwrap();
    assert_eq!(grpc["secret"]["secretName"], "limiter-tls");
    assert_eq!(full.setting("GRPC_SERVER_USE_TLS"), "true");
    assert_eq!(full.setting("GRPC_SERVER_TLS_CERT"), format!("{mount}/tls.crt"));
    assert_eq!(full.setting("GRPC_SERVER_TLS_KEY"), format!("{mount}/tls.key"));
    assert_eq!(full.setting("GRPC_CLIENT_TLS_CACERT"), format!("{mount}/ca.crt"));
    assert_eq!(full.setting("GRPC_CLIENT_TLS_SAN"), "gateway.example");
    assert_eq!(full.setting("TOLLKEEPER_HTTP_TLS_CERT"), format!("{mount}/tls.crt"));
    for (rendering, scheme) in [(full, "HTTPS"), (&RENDERINGS[0], "HTTP")] {
        for probe in ["readinessProbe", "livenessProbe"] {
            assert_eq!(rendering.container()[probe]["httpGet"]["scheme"], scheme, "{probe}");
        }
    }
    let (redis, mount) = volume(full, "redis-tls").unwrap();
    assert_eq!(redis["secret"]["secretName"], "redis-tls");
    assert_eq!(full.setting("REDIS_TLS_CACERT"), format!("{mount}/ca.crt"));
    assert_eq!(full.setting("REDIS_TLS_CLIENT_CERT"), format!("{mount}/tls.crt"));
    assert!(RENDERINGS[0].environment().iter().all(|(name, _)| !name.contains("TLS")));
}

#[test]
fn extra_objects_are_added_and_existing_ones_are_used() {
    let full = &RENDERINGS[1];
    assert!(volume(full, "scratch").is_some_and(|(_, mount)| mount == "/tmp"));
    assert_eq!(full.container()["envFrom"][0]["configMapRef"]["name"], "fleet");
    let env = list(&full.container()["env"]);
    assert!(env.iter().any(|it| it["name"] == "TOLLKEEPER_REPLICAS" && it["valueFrom"].is_object()));
    // Numbers in a values file are floats: none may be rendered as 1e+06.
    assert_eq!(full.setting("TOLLKEEPER_LOG_MAX"), "1000000");
    assert_eq!(full.setting("NEAR_LIMIT_RATIO"), "0.75");
    let mut names: Vec<_> = env.iter().map(|it| it["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "a name twice");

    // A configured selector stays, and the default is that of the release.
    let spread = &RENDERINGS[0].deployment()["spec"]["template"]["spec"]["topologySpreadConstraints"][0];
    assert_eq!(spread["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"], "edge");
}

#[test]
fn changed_rules_change_only_the_config_map() {
    let with = |limit: u32| {
        let rule =
            format!("domain: a\ndescriptors:\n- key: k\n  rate_limit:\n    unit: day\n    requests_per_unit: {limit}");
        rendered(&["--set", &format!("rules.a\\.yaml={rule}")])
    };
    let (before, after) = (with(1), with(2));
    let changed = before.manifests.iter().zip(&after.manifests).filter(|(before, after)| before != after);
    let changed: Vec<_> = changed.map(|(before, _)| before["metadata"]["name"].as_str().unwrap()).collect();
    // The second is that of the rule check.
    assert_eq!(changed, ["edge-tollkeeper-rules", "edge-tollkeeper-rule-check"]);
}

#[test]
fn helm_lint_passes() {
    let mut lint = std::process::Command::new(tool("HELM"));
    lint.args(["lint", "deploy/chart", "--strict", "--kube-version", "1.34.0"]);
    run_tool(lint.args(["-f", "tests/deploy/full.values.yaml"]), "").unwrap();
}

#[test]
fn template_unit_tests_pass() {
    let mut unit_tests = std::process::Command::new(tool("UNITTEST"));
    let report =
        run_tool(unit_tests.args(["--strict", "deploy/chart"]), "").unwrap_or_else(|report| panic!("{report}"));
    assert!(report.contains("Tests: "), "{report}");
}

#[test]
fn image_repository_is_required() {
    let mut command = std::process::Command::new(tool("HELM"));
    command.args(["template", "edge", "deploy/chart", "--kube-version", "1.34.0"]);
    let problem = run_tool(&mut command, "").unwrap_err();
    assert!(problem.contains("image.repository is not set") && problem.contains("docker build"), "{problem}");
}

#[test]
fn rules_beyond_one_mebibyte_are_rejected_with_a_fix() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("values.yaml");
    let text = |size: usize| json!({ "rules": { "a.yaml": format!("domain: a\n#{}", "x".repeat(size)) } }).to_string();
    std::fs::write(&file, text(1 << 20)).unwrap();
    let problem = helm(&["-f", file.to_str().unwrap()]).unwrap_err();
    assert!(problem.contains("rules has 1048593 bytes") && problem.contains("existingConfigMaps"), "{problem}");
    std::fs::write(&file, text((1 << 20) - 17)).unwrap();
    helm(&["-f", file.to_str().unwrap()]).unwrap();
}

/// Manifests of a chart that has this one as a dependency, or Helm's error.
fn with_parent(arguments: &[&str]) -> Result<String, String> {
    let directory = tempfile::tempdir().unwrap();
    let chart = directory.path().join("parent");
    std::fs::create_dir_all(chart.join("charts")).unwrap();
    std::os::unix::fs::symlink(repository("deploy/chart"), chart.join("charts/tollkeeper")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let dependency = json!({ "name": "tollkeeper", "version": version, "condition": "tollkeeper.enabled" });
    let parent = json!({ "apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency] });
    std::fs::write(chart.join("Chart.yaml"), parent.to_string()).unwrap();
    let mut command = std::process::Command::new(tool("HELM"));
    command.args(["template", "edge", "--kube-version", "1.34.0"]).arg(chart);
    run_tool(command.args(arguments), "")
}

#[test]
fn chart_is_usable_as_a_dependency() {
    let image = "tollkeeper.image.repository=edge/tollkeeper";
    let own = ["--set", image, "--set", "tollkeeper.enabled=true"];
    let global = ["--set", "global.imageRegistry=mirror.example,global.imagePullSecrets={mirror},global.other=1"];
    let enabled = Rendering::new("dependency", with_parent(&[&own[..], &global].concat()).unwrap());
    assert_eq!(enabled.container()["image"], format!("mirror.example/edge/tollkeeper:{}", env!("CARGO_PKG_VERSION")));
    assert_eq!(enabled.deployment()["spec"]["template"]["spec"]["imagePullSecrets"], json!([{ "name": "mirror" }]));
    assert!(enabled.yaml.contains("name: edge-tollkeeper"));
    let disabled = with_parent(&["--set", "tollkeeper.enabled=false"]).unwrap();
    assert_eq!(documents(&disabled).len(), 0, "{disabled}");
}

#[test]
fn chart_metadata_holds_the_icon_and_no_address() {
    let text = read(&repository("deploy/chart/Chart.yaml"));
    let chart = &documents(&text)[0];
    let icon = chart["icon"].as_str().unwrap().strip_prefix("data:image/svg+xml;base64,").unwrap();
    let mut decode = std::process::Command::new("base64");
    let icon = run_tool(decode.arg("--decode"), icon).unwrap();
    assert_eq!(icon.trim_end(), read(&repository("deploy/chart/icon.svg")).trim_end());
    assert!(chart["maintainers"][0]["name"].is_string());
    assert_eq!(chart["annotations"]["artifacthub.io/license"], env!("CARGO_PKG_LICENSE"));
    // Nothing is published under a fixed address.
    assert!(!text.contains("https://"), "{text}");
}
