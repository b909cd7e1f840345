//! `events`: prints the records of a decision log's stream, as one consumer of a group.
//!
//! Decides: the default name of a consumer of `events` (HOST-PID, `consume_stream`).

pub(super) mod args;
mod record_printer;
mod stderr_messages;

use std::sync::Arc;
use std::{io, process};

use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use self::args::{AckTrigger, Args};
use self::record_printer::{Acknowledger, GroupRecordPrinter, OutstandingRecords};
use self::stderr_messages::{EventsError, StderrPrinter};
use super::print::{CommandOutcome, print_error};
use super::traffic_input::read_stream_settings;
use crate::base::text::escape_unprintable;
use crate::decide::log::redis_stream::consumer_group::{ConsumerName, GroupConsumer};
use crate::settings::decision_log::RedisStreamSettings;

/// Prints records until there are no more, or until a signal.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let settings = match read_stream_settings(&args.stream, args.url.as_deref()) {
        Ok(settings) => settings,
        Err(problem) => {
            print_error(escape_unprintable(&problem));
            return CommandOutcome::UsageError;
        }
    };
    let runtime = match Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_error(error);
            return CommandOutcome::Failure;
        }
    };
    let outcome = runtime.block_on(consume_stream(args, &settings));
    // A write to a pipe that is not read would block the end.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => CommandOutcome::Success,
        Err(EventsError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => CommandOutcome::Success,
        Err(error) => {
            print_error(escape_unprintable(&error.to_string()));
            CommandOutcome::Failure
        }
    }
}

async fn consume_stream(args: &Args, settings: &RedisStreamSettings) -> Result<(), EventsError> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let consumer_name = args.consumer.clone().unwrap_or_else(|| format!("{}-{}", host(), process::id()));
    let group_consumer =
        GroupConsumer::start(settings, ConsumerName { group: args.group.clone(), consumer: consumer_name.clone() });
    let messages = Arc::new(StderrPrinter::new(args));
    let outstanding = Arc::new(OutstandingRecords::default());
    let mut acknowledgements = (args.ack == AckTrigger::Stdin).then(|| {
        Acknowledger::start(
            group_consumer.open_another_connection(),
            Arc::clone(&outstanding),
            Arc::clone(&messages),
            args.claim_after / 3,
        )
    });
    let mut printer = GroupRecordPrinter::new(args, group_consumer, consumer_name, outstanding, Arc::clone(&messages));
    let outcome = {
        let acknowledge = async {
            match &mut acknowledgements {
                Some(acknowledgements) => acknowledgements.acknowledge_until_end_of_input().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = interrupt.recv() => Ok(()),
            _ = terminate.recv() => Ok(()),
            outcome = acknowledge => outcome,
            outcome = printer.print_until_end() => outcome,
        }
    };
    printer.acknowledge_at_end().await;
    messages.print_unprinted_totals();
    outcome
}
