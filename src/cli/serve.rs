//! `serve`: run the service.

use std::ffi::OsString;
use std::path::PathBuf;

use super::{Outcome, complain};
use crate::config::source::Layout;
use crate::config::yaml::Documents;
use crate::server::{self, RuleFiles, ServerError};
use crate::settings::Settings;
use crate::telemetry::logs;

/// What `serve` takes.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Args {
    /// A rule file, or a directory of them; repeatable. Goes before RUNTIME_ROOT and its companions
    #[arg(long = "config", value_name = "PATH")]
    config: Vec<PathBuf>,
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
    let files = rule_files(args, &settings);
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
            let misused = matches!(error, ServerError::Listen { .. });
            complain(error);
            if misused { Outcome::Misused } else { Outcome::Failed }
        }
    }
}

/// Serves as envoyproxy/ratelimit's binary does: manifests may carry arguments that mean nothing here.
pub(super) fn as_ratelimit(arguments: &[OsString]) -> Outcome {
    for argument in &arguments[1..] {
        complain(format_args!("{}: argument without effect", argument.display()));
    }
    run(&Args::default())
}

/// Where the rules are: `--config`, else the RUNTIME_* variables.
fn rule_files(args: &Args, settings: &Settings) -> RuleFiles {
    if args.config.is_empty() {
        let rules = &settings.rules;
        return RuleFiles {
            layout: Layout::Runtime {
                root: rules.root.clone(),
                subdirectory: rules.subdirectory.to_string_lossy().into_owned(),
                app_directory: rules.app_directory.to_string_lossy().into_owned(),
                ignore_dotfiles: rules.ignore_dot_files,
                watch_root: rules.watch_root,
            },
            documents: Documents::FirstOnly,
        };
    }
    if std::env::vars_os().any(|(name, _)| name.as_encoded_bytes().starts_with(b"RUNTIME_")) {
        tracing::warn!("--config is given, so the RUNTIME_* variables are without effect");
    }
    RuleFiles { layout: Layout::Paths(args.config.clone()), documents: Documents::All }
}
