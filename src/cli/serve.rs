//! `serve`: run the service.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use super::Outcome;
use super::print::complain;
use crate::config::files::RuleLocation;
use crate::config::files::watch::WatchTiming;
use crate::config::source::{FilesConfig, SourceConfig};
use crate::config::yaml::Documents;
use crate::report::text::plain;
use crate::server;
use crate::server::error::ServerError;
use crate::settings::{Settings, reference};
use crate::telemetry::logs;

/// What `serve` takes.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Args {
    /// A rule file, or a directory of them; repeatable. Goes before RUNTIME_ROOT and its companions
    #[arg(long = "config", value_name = "PATH")]
    config: Vec<PathBuf>,
}

const HELP: &str = "\
Rules are read from --config, else from below RUNTIME_ROOT, and read again when they change or on SIGHUP; a set with \
mistakes is refused whole, and the last good one stays. SIGTERM and SIGINT drain and then end it, a second one at once.

Examples:
  tollkeeper serve --config config/example.yaml
  tollkeeper serve --config rules/ --config more.yaml
  RUNTIME_ROOT=/data RUNTIME_SUBDIRECTORY=ratelimit tollkeeper

Exit codes: 0 ended by a signal, 1 failed, 2 a setting or a certificate is wrong or a port is taken.

Everything else is set by variables of the environment; `tollkeeper check --env` says what becomes of each.

";

/// What stands below the flags in the long help: the environment too.
pub(super) fn help() -> String {
    HELP.to_owned() + &reference::help()
}

/// Serves until a signal ends it.
pub(super) fn run(args: &Args) -> Outcome {
    let (settings, notices) = match Settings::from_env(std::env::vars_os()) {
        Ok(read) => read,
        Err(problems) => {
            problems.problems.iter().for_each(complain);
            return Outcome::Misused;
        }
    };
    if let Err(error) = logs::init(settings.logs.level, settings.logs.format) {
        complain(error);
        return Outcome::Failed;
    }
    for notice in notices {
        tracing::warn!("{notice}");
    }
    let files = rule_source(args, &settings);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.enable_all();
    if let Some(threads) = settings.worker_threads {
        runtime.worker_threads(threads.get());
    }
    let runtime = match runtime.build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(format_args!("TOLLKEEPER_WORKER_THREADS: the threads can not be started: {error}"));
            return Outcome::Failed;
        }
    };
    let ended = runtime.block_on(server::run(settings, files));
    // Whatever still runs, such as a held answer, must not keep the process.
    runtime.shutdown_background();
    match ended {
        Ok(()) => Outcome::Done,
        Err(error) => {
            let misused =
                matches!(error, ServerError::Listen { .. } | ServerError::Traces(_) | ServerError::Certificate(_));
            tracing::error!(target: logs::FATAL, "{error}");
            if misused { Outcome::Misused } else { Outcome::Failed }
        }
    }
}

/// Serves as envoyproxy/ratelimit's binary does: manifests may carry arguments that mean nothing here. What `serve`
/// knows is taken, the rest only warned about.
pub(super) fn as_ratelimit(arguments: &[OsString]) -> Outcome {
    const CONFIG: &str = "--config";
    let mut args = Args::default();
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        let value = argument.as_bytes().strip_prefix(b"--config=").map(OsStr::from_bytes);
        let value = value.or_else(|| if argument == CONFIG { rest.next().map(OsString::as_os_str) } else { None });
        match value {
            Some(path) => args.config.push(path.into()),
            None => complain(format_args!("{}: argument without effect", plain(&argument.to_string_lossy()))),
        }
    }
    run(&args)
}

/// Source of the rules: `--config`, else the RUNTIME_* variables.
fn rule_source(args: &Args, settings: &Settings) -> SourceConfig {
    let rules = &settings.rules;
    let timing = WatchTiming {
        debounce: rules.reload_debounce,
        poll_interval: rules.poll_interval.unwrap_or(Duration::MAX),
        events: true,
    };
    if args.config.is_empty() {
        let location = RuleLocation::Runtime {
            root: rules.root.clone(),
            subdirectory: rules.subdirectory.to_string_lossy().into_owned(),
            app_directory: rules.app_directory.to_string_lossy().into_owned(),
            ignore_dotfiles: rules.ignore_dot_files,
            watch_root: rules.watch_root,
        };
        return SourceConfig::Files(FilesConfig { location, documents: Documents::FirstOnly, timing });
    }
    if std::env::vars_os().any(|(name, _)| name.as_encoded_bytes().starts_with(b"RUNTIME_")) {
        tracing::warn!("--config is given, so the RUNTIME_* variables are without effect");
    }
    let location = RuleLocation::Paths(args.config.clone());
    SourceConfig::Files(FilesConfig { location, documents: Documents::All, timing })
}
