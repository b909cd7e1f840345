//! Values of the chart: rejected values, and the effect of the others on the manifests.

use serde_json::{Value, json};

use super::{RENDERINGS, Rendering, documents, helm, list, run_tool, tool};
use crate::kit::{read, repository};

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
        (&["secret.redisAuth=secret"], &["set redis.url"]),
        (&["redis.tls.enabled=true"], &["set redis.url"]),
        (&["existingSecret=mine"], &["existingSecretKeys", "name them"]),
        (&["existingSecretKeys.adminToken=token"], &["set existingSecret"]),
        (
            &["existingSecret=mine", "existingSecretKeys.adminToken=token", "secret.adminToken=0123456789abcdef"],
            &["secret.adminToken"],
        ),
        (&["existingConfigMap=mine", "rules.a\\.yaml=domain: a"], &["keep one"]),
        (&["tls.enabled=true"], &["tls.existingSecret"]),
        (&["tls.clientCAKey=ca.crt"], &["set tls.enabled"]),
        (&["tls.http=true"], &["set tls.enabled"]),
        (&["tls.enabled=true", "tls.existingSecret=pair", "tls.clientSAN=a"], &["set tls.clientCAKey"]),
        (&["redis.url=redis:6379", "redis.tls.enabled=true", "redis.tls.certKey=a"], &["redis.tls.keyKey"]),
        (&["shutdown.drainSeconds=25"], &["shutdown.timeoutSeconds must be longer"]),
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
        ("image.digest=latest", "digest"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("redis.type=ring", "type"),
        ("memoryBytes=256Mi", "memoryBytes"),
        ("maxConnectionAge=5", "maxConnectionAge"),
        ("ports.grpc=70000", "grpc"),
        ("secret.adminToken=short", "adminToken"),
        ("settings.log_level=info", "log_level"),
        ("rules.notes\\.txt=domain: a", "notes.txt"),
        ("probes.readiness.path=/ready", "path"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("existingConfigMap=Not_A_Name", "existingConfigMap"),
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
        (&[][..], format!("ghcr.io/tollkeeper/tollkeeper:{version}")),
        (&["--set", "image.tag=edge"], "ghcr.io/tollkeeper/tollkeeper:edge".to_owned()),
        (&["--set", "image.tag=edge", "--set", &with_digest], format!("ghcr.io/tollkeeper/tollkeeper@{digest}")),
    ] {
        assert_eq!(rendered(values).container()["image"], image.as_str());
    }
    let chart = &documents(&read(&repository("deploy/chart/Chart.yaml")))[0];
    assert_eq!((&chart["version"], &chart["appVersion"]), (&json!(version), &json!(version)));
    let plain = &RENDERINGS[2];
    assert_eq!(plain.container()["image"], format!("ghcr.io/tollkeeper/tollkeeper:{version}"));
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
    let of_chart =
        rendered(&["--set=redis.url=redis:6379,secret.redisAuth=ann:open sesame,secret.adminToken=0123456789abcdef"]);
    let secret = of_chart.named("Secret", "edge-tollkeeper").unwrap();
    assert_eq!(
        secret["data"],
        json!({ "admin-token": "MDEyMzQ1Njc4OWFiY2RlZg==", "redis-auth": "YW5uOm9wZW4gc2VzYW1l" })
    );
    let deployment = of_chart.deployment().to_string();
    assert!(!deployment.contains("sesame") && !deployment.contains("0123456789abcdef"), "{deployment}");

    // Each setting names a file in the volume of its Secret.
    for (rendering, settings) in [
        (&of_chart, &["TOLLKEEPER_REDIS_AUTH_FILE", "TOLLKEEPER_ADMIN_TOKEN_FILE"][..]),
        (
            &RENDERINGS[1],
            &["TOLLKEEPER_REDIS_AUTH_FILE", "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE", "TOLLKEEPER_ADMIN_TOKEN_FILE"],
        ),
    ] {
        let (volume, mount) = volume(rendering, "secrets").unwrap();
        let items = list(&volume["secret"]["items"]);
        assert_eq!(items.len(), settings.len());
        for setting in settings {
            let file = rendering.setting(setting).strip_prefix(mount).and_then(|file| file.strip_prefix('/'));
            assert!(items.iter().any(|item| item["path"].as_str() == file), "{setting}");
        }
    }
    let keys = list(&volume(&RENDERINGS[1], "secrets").unwrap().0["secret"]["items"]).iter();
    let keys: Vec<_> = keys.map(|item| item["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["token", "redis-password", "sentinel-password"]);
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

    let other = rendered(&["--set", "existingConfigMap=mine-rules"]);
    assert_eq!(other.of_kind("ConfigMap").count(), 0);
    assert_eq!(volume(&other, "rules").unwrap().0["configMap"]["name"], "mine-rules");
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
    let changed: Vec<_> = changed.map(|(before, _)| before["kind"].as_str().unwrap()).collect();
    assert_eq!(changed, ["ConfigMap"]);
}

#[test]
fn helm_lint_passes() {
    let mut lint = std::process::Command::new(tool("HELM"));
    lint.args(["lint", "deploy/chart", "--strict", "--kube-version", "1.34.0"]);
    run_tool(lint.args(["-f", "tests/deploy/full.values.yaml"]), "").unwrap();
    // The schema has every value and accepts its default.
    let values = &documents(&read(&repository("deploy/chart/values.yaml")))[0];
    let schema: Value = serde_json::from_str(&read(&repository("deploy/chart/values.schema.json"))).unwrap();
    let known = |schema: &Value| schema["properties"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let written: Vec<_> = values.as_object().unwrap().keys().cloned().collect();
    let missing: Vec<_> = known(&schema).into_iter().filter(|key| key != "global" && !written.contains(key)).collect();
    assert!(missing.is_empty(), "values.yaml does not show {missing:?}");
}
