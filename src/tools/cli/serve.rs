//! `serve`: runs the service.
//!
//! Decides: which source of rules is used: `--config`, `RUNTIME_*` or xDS (`choose_rule_source`).
//! Decides: whether all documents of a file are read (`--config`) or the first document (`RUNTIME_*`).
//! Decides: how many threads decide; exit codes of the server.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::print::{CommandOutcome, print_error};
use crate::base::text::escape_unprintable;
use crate::rules::files::RuleFilesLocation;
use crate::rules::files::watch::WatchTiming;
use crate::rules::source::{FilesConfig, SourceConfig};
use crate::rules::xds::XdsConfig;
use crate::rules::yaml::DocumentSelection;
use crate::serve::server;
use crate::serve::server::error::ServerError;
use crate::settings::{Settings, documentation};
use crate::telemetry::logs;

/// Arguments of `serve`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Args {
    /// Rule file or directory of rule files; repeatable. Takes precedence over the RUNTIME_ variables
    #[arg(long = "config", value_name = "PATH")]
    config: Vec<PathBuf>,
    /// Port of the gRPC listener, in place of GRPC_PORT
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Keep counters in this Redis, in place of BACKEND_TYPE, REDIS_SOCKET_TYPE and REDIS_URL
    #[arg(long, value_name = "HOST:PORT")]
    redis: Option<String>,
}

const HELP: &str = "\
Rules are read from --config, or else from files below RUNTIME_ROOT or a control plane (CONFIG_TYPE), and reloaded when they change or on SIGHUP. A set \
with errors is rejected as a whole, and the last valid one stays in use. SIGTERM and SIGINT drain and then stop the \
service, in a terminal at once unless TOLLKEEPER_DRAIN_PERIOD is set; a second signal stops it at once.

Examples:
  tollkeeper serve --config config/example.yaml
  tollkeeper serve --config rules/ --config more.yaml
  tollkeeper serve --config rules/ --port 9081 --redis localhost:6379
  RUNTIME_ROOT=/data RUNTIME_SUBDIRECTORY=ratelimit tollkeeper

Exit codes: 0 stopped by a signal, 1 failed, 2 a setting or certificate is invalid or a port is in use.

All other settings are environment variables, listed here as NAME=default; `tollkeeper check --env` checks them.

";

/// Formats the help below the flags, with all environment variables.
pub(super) fn format_help() -> String {
    HELP.to_owned() + &documentation::format_environment_help()
}

/// Adds to an error about an unexpected argument, which is a rule file, that `--config` comes before it.
pub(super) fn suggest_config_flag(error: &mut clap::Error) {
    let kind = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return,
    };
    let Some(ContextValue::String(argument)) = error.get(kind) else { return };
    let is_rule_file =
        [".yaml", ".yml", ".json"].iter().any(|ending| argument.ends_with(ending)) || Path::new(argument).is_dir();
    if is_rule_file && !argument.starts_with('-') {
        let tip = format!("write `--config {}`", escape_unprintable(argument));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
}

/// Serves until a signal stops the process.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let (mut settings, notices) = match Settings::from_env(apply_flags_to_environment(args, std::env::vars_os())) {
        Ok(read) => read,
        Err(problems) => {
            problems.problems.iter().for_each(print_error);
            return CommandOutcome::UsageError;
        }
    };
    if let Err(error) = logs::init(settings.logs.level, settings.logs.format) {
        print_error(error);
        return CommandOutcome::Failure;
    }
    for notice in notices {
        tracing::warn!("{notice}");
    }
    if is_started_by_hand() && std::env::var_os("TOLLKEEPER_DRAIN_PERIOD").is_none() {
        settings.shutdown.drain_period = Duration::ZERO;
    }
    let files = choose_rule_source(args, &settings);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all();
    if let Some(threads) = settings.worker_threads {
        runtime.worker_threads(threads.get());
    }
    let runtime = match runtime.build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(format_args!("TOLLKEEPER_WORKER_THREADS: the threads cannot be started: {error}"));
            return CommandOutcome::Failure;
        }
    };
    let ended = runtime.block_on(server::run_server(settings, files));
    // Tasks that still run, such as a delayed response, must not keep the process alive.
    runtime.shutdown_background();
    match ended {
        Ok(()) => CommandOutcome::Success,
        Err(error) => {
            let ServerError::Startup(problems) = error else {
                tracing::error!(target: logs::FATAL_TARGET, "{error}");
                return CommandOutcome::Failure;
            };
            for problem in problems {
                tracing::error!(target: logs::FATAL_TARGET, "{problem}");
            }
            CommandOutcome::UsageError
        }
    }
}

/// The environment with the variables that flags stand for.
fn apply_flags_to_environment(
    args: &Args,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (OsString, OsString)> {
    let mut given: Vec<(&str, OsString)> = Vec::new();
    given.extend(args.port.map(|port| ("GRPC_PORT", port.to_string().into())));
    if let Some(address) = &args.redis {
        given.push(("BACKEND_TYPE", "redis".into()));
        given.push(("REDIS_SOCKET_TYPE", "tcp".into()));
        given.push(("REDIS_URL", address.into()));
    }
    let names: Vec<OsString> = given.iter().map(|(name, _)| name.into()).collect();
    let given = given.into_iter().map(|(name, value)| (name.into(), value));
    environment.filter(move |(name, _)| !names.contains(name)).chain(given)
}

/// True in a terminal, where nobody needs time to notice the end, and Ctrl-C should end the service.
fn is_started_by_hand() -> bool {
    std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Serves under the name of envoyproxy/ratelimit's binary: unknown arguments of its manifests cause only a warning.
pub(super) fn run_as_ratelimit(arguments: &[OsString]) -> CommandOutcome {
    const CONFIG_FLAG: &str = "--config";
    let mut args = Args::default();
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        let value = argument.as_bytes().strip_prefix(b"--config=").map(OsStr::from_bytes);
        let value = value.or_else(|| if argument == CONFIG_FLAG { rest.next().map(OsString::as_os_str) } else { None });
        match value {
            Some(path) => args.config.push(path.into()),
            None => {
                print_error(format_args!(
                    "{}: this argument has no effect",
                    escape_unprintable(&argument.to_string_lossy())
                ));
            }
        }
    }
    run(&args)
}

/// Chooses the source of rules: the files of `--config`, or else the control plane or the RUNTIME_ variables.
fn choose_rule_source(args: &Args, settings: &Settings) -> SourceConfig {
    let rules = &settings.rules;
    let timing = WatchTiming::from(rules);
    if let Some(xds) = settings.xds.as_ref().filter(|_| args.config.is_empty()) {
        return SourceConfig::Xds(Box::new(XdsConfig::new(xds.clone())));
    }
    if args.config.is_empty() {
        let location = RuleFilesLocation::from(rules);
        return SourceConfig::Files(FilesConfig { location, documents: DocumentSelection::FirstOnly, timing });
    }
    if settings.xds.is_some() {
        tracing::warn!("--config is given, so CONFIG_TYPE=GRPC_XDS_SOTW has no effect");
    }
    if std::env::vars_os().any(|(name, _)| name.as_encoded_bytes().starts_with(b"RUNTIME_")) {
        tracing::warn!("--config is given, so the RUNTIME_ variables have no effect");
    }
    let location = RuleFilesLocation::Paths(args.config.clone());
    SourceConfig::Files(FilesConfig { location, documents: DocumentSelection::All, timing })
}
