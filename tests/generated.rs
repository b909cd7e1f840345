//! Files of the repository that are written from the program, the chart's values or the `.proto` files.
//!
//! `.ci/generate` writes them; tests compare them. Read the difference before the commit. The program is built with the
//! committed [`PROTOBUF_CODE`]: after a change of a `.proto` file, run `.ci/generate` before code uses it.
//!
//! Decides: keys and values as bytes, domains as UTF-8 (prost).
//! Decides: the messages that reflection shows, with keys and values as `string`.

use std::fmt::Write as _;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use serde_json::{Map, Value, json};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::schema::{defaults_file_schema, rule_file_schema};
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::settings::documentation::format_settings_markdown;
use tollkeeper::tools::envoy_check::check_bootstrap;

/// Rejected rule files, each with its diagnostics beside it.
pub(crate) const BAD_RULES: &str = "tests/suite/rules/config/bad";
/// Envoy bootstraps: in `bad`, one per check with its findings beside it; `rules.yaml` has the rules for all of them.
pub(crate) const ENVOY_SAMPLES: &str = "tests/suite/tools/envoy_check";
/// Code from the files of `proto/`.
const PROTOBUF_CODE: &str = "proto/generated";
pub(crate) const VALUES: &str = "deploy/chart/values.yaml";
pub(crate) const VALUES_SCHEMA: &str = "deploy/chart/values.schema.json";
pub(crate) const CHART_README: &str = "deploy/chart/README.md";
const README_TABLE: [&str; 2] = ["<!-- values -->\n", "<!-- end of values -->"];

/// A file as it has to be.
pub(crate) struct GeneratedFile {
    /// Below the root of the repository.
    path: String,
    content: Vec<u8>,
}

impl GeneratedFile {
    fn new(path: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), content: content.into() }
    }

    fn is_up_to_date(&self) -> bool {
        fs::read(repository(&self.path)).is_ok_and(|committed| committed == self.content)
    }

    /// Writes the file if it differs; returns its path if so.
    pub(crate) fn write(&self) -> Option<&str> {
        if self.is_up_to_date() {
            return None;
        }
        let path = repository(&self.path);
        fs::write(&path, &self.content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Some(&self.path)
    }
}

/// Fails with the names of files that differ, and with the contents of small ones.
pub(crate) fn assert_up_to_date(files: &[GeneratedFile]) {
    let stale = files.iter().filter(|file| !file.is_up_to_date()).map(|file| {
        let content = str::from_utf8(&file.content).ok().filter(|content| content.len() < 2000);
        format!("{}\n{}", file.path, content.unwrap_or_default())
    });
    let stale: Vec<_> = stale.collect();
    assert!(stale.is_empty(), ".ci/generate writes these files anew; read the differences:\n{}", stale.join("\n"));
}

/// All files that are generated.
pub(crate) fn all_files() -> Vec<GeneratedFile> {
    [schemas(), settings(), rule_diagnostics(), envoy_findings(), chart_values(), generate_protobuf_files()]
        .into_iter()
        .flatten()
        .collect()
}

/// JSON Schemas of rule files and of files of defaults.
pub(crate) fn schemas() -> Vec<GeneratedFile> {
    [("config/rules.schema.json", rule_file_schema()), ("config/rule-defaults.schema.json", defaults_file_schema())]
        .map(|(path, schema)| GeneratedFile::new(path, format!("{schema:#}\n")))
        .into()
}

/// The page of settings, and the chart's list of their names.
pub(crate) fn settings() -> Vec<GeneratedFile> {
    let page = format_settings_markdown();
    // Families of names such as `DD_*` are no names.
    let names = page.lines().filter_map(|line| line.strip_prefix("- `")?.split(['`', '=']).next());
    let names: String = names.filter(|name| !name.ends_with('*')).map(|name| format!("{name}\n")).collect();
    vec![
        GeneratedFile::new("deploy/chart/files/settings.txt", names),
        GeneratedFile::new("docs/reference/settings.md", page),
    ]
}

/// Diagnostics of [`BAD_RULES`].
pub(crate) fn rule_diagnostics() -> Vec<GeneratedFile> {
    let diagnostics = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let options = CompileOptions { memcache: name.starts_with("memcache_"), ..CompileOptions::default() };
        let text = match compile_texts(&[rule_text(name, fs::read(&path).unwrap())], &options) {
            Ok(_) => "loads".to_owned(),
            Err(found) => format!("{found}\n"),
        };
        GeneratedFile::new(format!("{BAD_RULES}/{}.txt", stem(&path)), text)
    };
    yaml_files(BAD_RULES).into_iter().map(diagnostics).collect()
}

/// Findings in the bad samples of [`ENVOY_SAMPLES`].
pub(crate) fn envoy_findings() -> Vec<GeneratedFile> {
    let rules = rule_text("rules.yaml", read(&format!("{ENVOY_SAMPLES}/rules.yaml")).into_bytes());
    let rules = RuleSet::new(compile_texts(&[rules], &CompileOptions::default()).expect("good rules").domains);
    let findings = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let found = check_bootstrap(&Arc::from(stem(&path)), &text, Some(&rules)).expect("it is YAML");
        let lines = found.kept().iter().map(|one| {
            let (severity, check) = (one.severity.name(), one.check.name());
            let place = format!("{}:{} {}", one.line, one.column, one.path);
            format!(
                "{severity} {check}\n  at: {place}\n  {}\n  so: {}\n  fix: {}\n",
                one.message, one.consequence, one.fix
            )
        });
        GeneratedFile::new(format!("{ENVOY_SAMPLES}/bad/{}.txt", stem(&path)), lines.collect::<String>())
    };
    yaml_files(&format!("{ENVOY_SAMPLES}/bad")).into_iter().map(findings).collect()
}

/// The schema of the chart's values and the table of them, with the comments of [`VALUES`] as descriptions.
pub(crate) fn chart_values() -> Vec<GeneratedFile> {
    let schema = described(serde_json::from_str(&read(VALUES_SCHEMA)).unwrap());
    let readme = readme_with_table(&read(CHART_README), &leaves(&default_values(), &schema, &[]));
    vec![GeneratedFile::new(VALUES_SCHEMA, format!("{schema:#}\n")), GeneratedFile::new(CHART_README, readme)]
}

/// Code of the messages and services of `proto/`, and the descriptor set that reflection shows to clients.
///
/// They differ in one point. The code takes `Entry.key` and `Entry.value` as bytes, as the files of `proto/` say, because
/// Envoy puts raw header bytes there; the set says `string`, as Envoy's own files do, so that requests written as text
/// need no base64. On the wire both are the same. The service of quotas is not in the set: its streams are no use to tools, and its lists of entries
/// are maps elsewhere.
pub(crate) fn generate_protobuf_files() -> Vec<GeneratedFile> {
    /// The service that clients call.
    const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";
    /// What Envoys and control planes have beside it.
    const OTHERS: [&str; 3] = [
        "envoy/service/rate_limit_quota/v3/rlqs.proto",
        "envoy/service/discovery/v3/ads.proto",
        "ratelimit/config/ratelimit/v3/rls_conf.proto",
    ];
    let include = [repository("proto")];
    let mut shown = protox::compile([SERVICE], &include).unwrap();
    for file in &mut shown.file {
        file.source_code_info = None;
        let entries = file.message_type.iter_mut().flat_map(|message| &mut message.nested_type);
        for entry in entries.filter(|nested| nested.name() == "Entry") {
            entry.field.iter_mut().for_each(|field| field.set_type(Type::String));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .bytes(".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry")
        .bytes(".envoy.service.rate_limit_quota.v3.BucketId.BucketEntry")
        .include_file("pb.rs")
        .emit_rerun_if_changed(false)
        .out_dir(&folder)
        .compile_fds(protox::compile(iter::once(SERVICE).chain(OTHERS), &include).unwrap())
        .unwrap();
    let code = fs::read_dir(&folder).unwrap().map(|file| {
        let file = file.unwrap();
        let path = format!("{PROTOBUF_CODE}/{}", file.file_name().to_str().unwrap());
        GeneratedFile::new(path, fs::read(file.path()).unwrap())
    });
    code.chain([GeneratedFile::new("proto/descriptors.bin", shown.encode_to_vec())]).collect()
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml_files(folder: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(repository(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    files
}

fn stem(path: &Path) -> &str {
    path.file_stem().unwrap().to_str().unwrap()
}

fn rule_text(name: &str, bytes: Vec<u8>) -> RuleText {
    RuleText { name: name.into(), bytes, documents: DocumentSelection::All }
}

/// The chart's values with their defaults.
pub(crate) fn default_values() -> Value {
    serde_saphyr::from_str(&read(VALUES)).unwrap_or_else(|error| panic!("{VALUES}: {error}"))
}

/// A value that the schema describes on its own.
pub(crate) struct Leaf {
    pub(crate) path: Vec<String>,
    default: Value,
    pub(crate) schema: Value,
}

/// Leaves of the schema in the order of `values.yaml`. Objects without known properties are leaves.
pub(crate) fn leaves(values: &Value, schema: &Value, path: &[String]) -> Vec<Leaf> {
    let Some(properties) = schema["properties"].as_object() else {
        return vec![Leaf { path: path.to_vec(), default: values.clone(), schema: schema.clone() }];
    };
    let all = values.as_object().unwrap_or_else(|| panic!("{path:?} has no defaults"));
    let below = |key: &String| [path, std::slice::from_ref(key)].concat();
    all.iter()
        .flat_map(|(key, value)| {
            let inner = properties.get(key).unwrap_or_else(|| panic!("{:?} is not in the schema", below(key)));
            leaves(value, inner, &below(key))
        })
        .collect()
}

/// The schema with the comments of `values.yaml` as descriptions.
fn described(mut schema: Value) -> Value {
    for (path, comment) in comments(&read(VALUES)) {
        let mut at = Some(&mut schema);
        for key in &path {
            at = at.and_then(|schema| schema.get_mut("properties")?.get_mut(key));
        }
        // Keys below a leaf, such as resources.limits, are no values of their own.
        let Some(place) = at.and_then(Value::as_object_mut).filter(|_| !comment.is_empty()) else { continue };
        place.shift_remove("description");
        let rest = std::mem::take(place);
        *place = Map::from_iter([("description".to_owned(), json!(comment))].into_iter().chain(rest));
    }
    schema
}

/// Comment directly above each key of `values.yaml`, by the key's path.
fn comments(yaml: &str) -> Vec<(Vec<String>, String)> {
    let mut path: Vec<(usize, String)> = Vec::new();
    let (mut comment, mut all) = (String::new(), Vec::new());
    for line in yaml.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(words) = text.strip_prefix("# ") {
            let space = if comment.is_empty() { "" } else { " " };
            write!(comment, "{space}{words}").unwrap();
            continue;
        }
        let is_key = text.starts_with(|first: char| first.is_ascii_alphabetic());
        if let Some((key, _)) = text.split_once(':').filter(|_| is_key) {
            path.retain(|(outer, _)| *outer < indent);
            path.push((indent, key.to_owned()));
            let keys = path.iter().map(|(_, key)| key.clone()).collect();
            all.push((keys, std::mem::take(&mut comment)));
        }
        comment.clear();
    }
    all
}

/// The README with this table of values.
fn readme_with_table(text: &str, leaves: &[Leaf]) -> String {
    let mut table = "\n| value | default | description |\n|---|---|---|\n".to_owned();
    for leaf in leaves {
        let (path, default) = (leaf.path.join("."), leaf.default.to_string());
        let description = leaf.schema["description"].as_str().unwrap_or_default().replace('|', "\\|");
        writeln!(table, "| `{path}` | `{default}` | {description} |").unwrap();
    }
    let (before, rest) = text.split_once(README_TABLE[0]).unwrap();
    let (_, after) = rest.split_once(README_TABLE[1]).unwrap();
    [before, README_TABLE[0], &table, "\n", README_TABLE[1], after].concat()
}
