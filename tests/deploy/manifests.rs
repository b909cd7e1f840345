//! Properties of all manifests, of the chart and of kustomize: valid, restricted, and true to the program's settings.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{RENDERINGS, Rendering, list, validate};
use kit::tollkeeper::program_path;
use kit::{read, repository};

/// Specs of all pods, with the names of their controllers.
fn pods(rendering: &Rendering) -> Vec<(String, &Value)> {
    let name = |it: &Value| format!("{}, {}", rendering.name, it["metadata"]["name"]);
    let makers = ["Deployment", "StatefulSet", "Job"].into_iter().flat_map(|kind| rendering.of_kind(kind));
    let made = makers.map(|it| (name(it), &it["spec"]["template"]));
    made.chain(rendering.of_kind("Pod").map(|it| (name(it), it))).collect()
}

#[test]
fn manifests_match_kubernetes_schemas() {
    let expected = [
        &["PodDisruptionBudget", "ServiceAccount", "ConfigMap", "Service", "Deployment"][..],
        &["NetworkPolicy", "HorizontalPodAutoscaler", "PrometheusRule", "ServiceMonitor", "Deployment", "ConfigMap"],
        &["NetworkPolicy", "ServiceAccount", "ConfigMap", "Service", "Deployment", "PodDisruptionBudget"],
        &["NetworkPolicy", "HorizontalPodAutoscaler", "StatefulSet", "Deployment", "Service"],
    ];
    for (rendering, kinds) in RENDERINGS.iter().zip(expected) {
        let judged = validate(&rendering.yaml).unwrap_or_else(|wrong| panic!("{}:\n{wrong}", rendering.name));
        print!("{}:\n{judged}", rendering.name);
        for kind in kinds {
            assert!(judged.lines().any(|line| line.starts_with(&format!("{kind} "))), "{}: {kind}", rendering.name);
        }
    }
}

#[test]
fn schema_check_rejects_bad_manifests() {
    let full = &RENDERINGS[1].yaml;
    for (right, wrong, kind) in [
        ("enableServiceLinks: false", "enableServiceLink: false", "Deployment"),
        ("    interval: 30s", "    intervall: 30s", "ServiceMonitor"),
        ("    - alert: TollkeeperAbsent", "    - alarm: TollkeeperAbsent", "PrometheusRule"),
        ("maxReplicas: 12", "maxReplicas: many", "HorizontalPodAutoscaler"),
    ] {
        assert!(full.contains(right), "{right}");
        let problem = validate(&full.replace(right, wrong)).unwrap_err();
        assert!(problem.contains(kind), "{wrong}: {problem}");
    }
}

#[test]
fn pods_run_with_restricted_security_context() {
    for (name, template) in RENDERINGS.iter().flat_map(pods) {
        let (spec, pod) = (&template["spec"], &template["spec"]["securityContext"]);
        assert_eq!(spec["automountServiceAccountToken"], false, "{name}");
        // A Service called `redis` would set REDIS_PORT, which is a setting.
        assert_eq!(spec["enableServiceLinks"], false, "{name}");
        assert_eq!(pod["runAsNonRoot"], true, "{name}");
        assert!(pod["runAsUser"].as_u64().is_some_and(|user| user > 0), "{name}");
        assert_eq!(pod["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        // Containers of the test's own values are not the chart's.
        for container in list(&spec["containers"]).iter().filter(|it| it["name"] != "shipper") {
            let security = &container["securityContext"];
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(security["capabilities"]["drop"], serde_json::json!(["ALL"]), "{name}");
            assert!(container["resources"]["requests"]["cpu"].is_string(), "{name}");
            assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
            let serves = spec["restartPolicy"] != "Never";
            assert_eq!(container["readinessProbe"].is_object(), serves, "{name}");
            assert_eq!(container["livenessProbe"].is_object(), serves, "{name}");
        }
    }
    for account in RENDERINGS.iter().flat_map(|rendering| rendering.of_kind("ServiceAccount")) {
        assert_eq!(account["automountServiceAccountToken"], false);
    }
}

/// True if all of `these` labels are among `those`.
fn selects(selector: &Value, labels: &Value) -> bool {
    let selector = selector.as_object().expect("a selector has labels");
    assert!(!selector.is_empty(), "an empty selector is everybody");
    selector.iter().all(|(label, value)| labels[label] == *value)
}

/// Names of the ConfigMaps that are mounted as rules.
fn rules_config_maps(spec: &Value) -> Vec<&str> {
    let Some(volume) = list(&spec["volumes"]).iter().find(|volume| volume["name"] == "rules") else {
        return Vec::new();
    };
    let projected = list(&volume["projected"]["sources"]).iter();
    let sources = projected.chain(std::iter::once(volume)).filter_map(|source| source["configMap"]["name"].as_str());
    sources.collect()
}

#[test]
fn references_between_objects_resolve() {
    for rendering in RENDERINGS.iter() {
        let name = rendering.name;
        let pods = pods(rendering);
        let selected = |selector: &Value| pods.iter().any(|(_, pod)| selects(selector, &pod["metadata"]["labels"]));
        for service in rendering.of_kind("Service") {
            let pods = pods.iter().filter(|(_, pod)| selects(&service["spec"]["selector"], &pod["metadata"]["labels"]));
            assert_eq!(pods.count(), 1, "{name}: {service}");
        }
        for kind in ["Deployment", "StatefulSet", "PodDisruptionBudget"] {
            for it in rendering.of_kind(kind) {
                assert!(selected(&it["spec"]["selector"]["matchLabels"]), "{name}: {kind}");
            }
        }
        for policy in rendering.of_kind("NetworkPolicy") {
            assert!(selected(&policy["spec"]["podSelector"]["matchLabels"]), "{name}: {policy}");
        }
        for scaler in rendering.of_kind("HorizontalPodAutoscaler") {
            let target = scaler["spec"]["scaleTargetRef"]["name"].as_str().unwrap();
            assert!(rendering.named("Deployment", target).is_some(), "{name}: {target}");
            assert!(rendering.deployment()["spec"]["replicas"].is_null(), "{name}: set back by each apply");
        }
        for monitor in rendering.of_kind("ServiceMonitor") {
            let matches =
                |service: &Value| selects(&monitor["spec"]["selector"]["matchLabels"], &service["metadata"]["labels"]);
            let service = rendering.of_kind("Service").find(|service| matches(service)).expect("a Service to scrape");
            let port = &monitor["spec"]["endpoints"][0]["port"];
            assert!(list(&service["spec"]["ports"]).iter().any(|it| it["name"] == *port), "{name}: {port}");
        }
        let spec = &rendering.deployment()["spec"]["template"]["spec"];
        let account = spec["serviceAccountName"].as_str().unwrap();
        assert!(rendering.named("ServiceAccount", account).is_some(), "{name}: {account}");
        let makers = ["Deployment", "Job"].into_iter().flat_map(|kind| rendering.of_kind(kind));
        for rules in makers.flat_map(|it| rules_config_maps(&it["spec"]["template"]["spec"])) {
            assert!(rendering.named("ConfigMap", rules).is_some(), "{name}: {rules}");
        }
    }
}

#[test]
fn grpc_calls_are_balanced_over_replicas() {
    for rendering in RENDERINGS.iter() {
        let name = rendering.name;
        let headless = |service: &&Value| service["spec"]["clusterIP"] == "None";
        let service = rendering.of_kind("Service").find(headless).unwrap_or_else(|| panic!("{name}: not headless"));
        // Clients connect to the pods, so a port of a headless Service cannot differ from the pod's.
        for port in list(&service["spec"]["ports"]) {
            let ports = list(&rendering.container()["ports"]);
            let target = ports.iter().find(|it| it["name"] == port["targetPort"]).expect("a port of the container");
            assert_eq!(port["port"], target["containerPort"], "{name}");
        }
        let port = |name: &str| {
            let ports = list(&rendering.container()["ports"]);
            ports.iter().find(|it| it["name"] == name).unwrap()["containerPort"].to_string()
        };
        let set = |name: &str, default: &str| {
            let all = rendering.environment();
            all.iter().find(|(other, _)| *other == name).map_or(default, |(_, value)| *value).to_owned()
        };
        assert_eq!((port("grpc"), port("http")), (set("GRPC_PORT", "8081"), set("PORT", "8080")), "{name}");
        assert_eq!(format!(":{}", port("metrics")), rendering.setting("PROMETHEUS_ADDR"), "{name}");
        let age = rendering.setting("GRPC_MAX_CONNECTION_AGE");
        assert!(["5m", "2m30s"].contains(&age), "{name}: {age}");
    }
}

#[test]
fn termination_grace_period_covers_the_drain() {
    let seconds = |text: &str| text.strip_suffix('s').unwrap().parse::<u64>().unwrap();
    for rendering in RENDERINGS.iter() {
        let grace = rendering.deployment()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64();
        let drain = seconds(rendering.setting("TOLLKEEPER_DRAIN_PERIOD"));
        let drain_timeout = seconds(rendering.setting("TOLLKEEPER_SHUTDOWN_TIMEOUT"));
        // DNS answers may be cached for 30 s, and Envoy asks every 5 s: until then it uses the addresses of replicas
        // that stop.
        assert!(
            drain > 30 + 5 && drain < drain_timeout && grace > Some(drain_timeout),
            "{}: {drain} {drain_timeout} {grace:?}",
            rendering.name
        );
    }
}

#[test]
fn rules_are_mounted_at_the_configured_path_and_reloadable() {
    for rendering in RENDERINGS.iter() {
        let name = rendering.name;
        let directory = ["RUNTIME_ROOT", "RUNTIME_SUBDIRECTORY", "RUNTIME_APPDIRECTORY"];
        let directory = directory.map(|part| rendering.setting(part)).join("/");
        let mounts = list(&rendering.container()["volumeMounts"]);
        let mount = mounts.iter().find(|mount| mount["name"] == "rules").unwrap();
        assert_eq!(mount["mountPath"], directory.as_str(), "{name}");
        assert!(mounts.iter().all(|mount| mount["subPath"].is_null()), "{name}: a subPath is never updated");
        // `..data` is a link that is swapped; the directory behind it must not be read as well.
        assert_eq!(rendering.setting("RUNTIME_WATCH_ROOT"), "false", "{name}");
        assert_eq!(rendering.setting("RUNTIME_IGNOREDOTFILES"), "true", "{name}");
        // The pod template must not change with the rules, or a change would restart the pods.
        let pod = &rendering.deployment()["spec"]["template"];
        let annotations = pod["metadata"]["annotations"].as_object();
        assert!(annotations.is_none_or(|all| all.keys().all(|key| !key.contains("checksum"))), "{name}");
        let config_maps = rules_config_maps(&pod["spec"]);
        assert!(!config_maps.is_empty(), "{name}");
        let without_hash = config_maps.iter().all(|name| name.ends_with("-rules"));
        assert!(without_hash, "{name}: {config_maps:?} has a hash, so each change restarts");
    }
}

#[test]
fn shipped_rules_pass_check() {
    for rendering in RENDERINGS.iter() {
        let directory = tempfile::tempdir().unwrap();
        let all = rendering.of_kind("ConfigMap");
        let rules = all.filter(|it| it["metadata"]["name"].as_str().is_some_and(|name| name.ends_with("-rules")));
        for (file, text) in rules.flat_map(|it| it["data"].as_object().unwrap()) {
            fs::write(directory.path().join(file), text.as_str().unwrap()).unwrap();
        }
        let checked = Command::new(program_path()).arg("check").arg(directory.path()).output().unwrap();
        assert!(checked.status.success(), "{}: {}", rendering.name, String::from_utf8_lossy(&checked.stderr));
        let files = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(files, if rendering.name == "chart, all values" { 3 } else { 1 }, "{}", rendering.name);
    }
}

#[test]
fn settings_are_documented_ones() {
    let page = read(&repository("docs/reference/settings.md"));
    let known: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("- `")?.split(['`', '=']).next()).collect();
    assert!(known.len() > 50);
    for rendering in RENDERINGS.iter() {
        for variable in list(&rendering.container()["env"]) {
            let name = variable["name"].as_str().unwrap();
            assert!(known.contains(&name), "{}: {name} is no setting", rendering.name);
        }
    }
}

#[test]
fn replica_without_valid_rules_is_unhealthy_in_each_rendering() {
    for rendering in RENDERINGS.iter() {
        let environment = rendering.environment();
        let mut healthy = environment.iter().filter(|(name, _)| *name == "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED");
        assert_eq!(healthy.next().map(|(_, value)| value.to_string()), Some("true".to_owned()), "{}", rendering.name);
    }
}

#[test]
fn settings_pass_check_env() {
    for rendering in RENDERINGS.iter() {
        let mut check = Command::new(program_path());
        check.args(["check", "--env", "--format", "json"]).env_clear().envs(rendering.environment());
        let report: Value = serde_json::from_slice(&check.output().unwrap().stdout).unwrap();
        for row in report["environment"].as_array().unwrap() {
            // The files of volumes are only in the container.
            let is_missing_file = row["why"].as_str().is_some_and(|why| why.contains("No such file"));
            let is_wrong = row["prevents_start"] == true || row["disposition"] == "unusable";
            assert!(!is_wrong || is_missing_file, "{}: {row:#}", rendering.name);
        }
    }
}
