//! Results as one HTML page: without scripts, without other files, and with every value escaped.

use askama::Template;

use super::plot::{PlotError, timeline_plot};
use super::results::{RejectedKeyResults, SimulationResults};

use crate::base::text::replace_unprintable;

/// Limits with a plot of their own.
const MAX_LIMIT_PLOTS: usize = 20;

/// The page.
#[derive(Template)]
#[template(path = "simulate.html")]
struct ReportPage<'r> {
    results: &'r SimulationResults,
    first: &'r str,
    last: &'r str,
    has_old: bool,
    /// SVG of all requests.
    plot: String,
    limit_plots: Vec<LimitPlot<'r>>,
    lists: Vec<KeyList<'r>>,
}

/// Plot of one limit.
struct LimitPlot<'r> {
    path: &'r str,
    plot: String,
}

/// List of top keys.
struct KeyList<'r> {
    title: &'static str,
    keys: &'r [RejectedKeyResults],
}

/// Page that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// A plot failed.
    #[error("the plot cannot be built: {0}")]
    Plot(#[from] PlotError),
    /// The template failed.
    #[error("the page cannot be built: {0}")]
    Template(#[from] askama::Error),
}

/// Formats results as an HTML page.
///
/// # Errors
/// A plot or the template failed; results of a simulation make neither fail.
pub fn html(results: &SimulationResults) -> Result<String, PageError> {
    let mut rejecting: Vec<_> = results
        .limits
        .iter()
        .filter_map(|limit| Some((limit, limit.new.as_ref().filter(|new| new.rejected > 0)?)))
        .collect();
    rejecting.sort_by_key(|(_, new)| std::cmp::Reverse(new.rejected));
    let plots = rejecting.iter().filter_map(|(limit, new)| Some((limit, new.timeline.as_ref()?)));
    let limit_plots = plots
        .take(MAX_LIMIT_PLOTS)
        .map(|(limit, timeline)| Ok(LimitPlot { path: &limit.path, plot: timeline_plot(timeline)? }));
    let changes = results.changes.as_ref();
    let lists = [
        KeyList { title: "Rejected keys", keys: &results.rejected_keys },
        KeyList { title: "Newly rejected keys", keys: changes.map_or(&[], |changes| &changes.newly_rejected_keys) },
        KeyList { title: "Newly admitted keys", keys: changes.map_or(&[], |changes| &changes.newly_admitted_keys) },
    ];
    let page = ReportPage {
        results,
        first: results.traffic.first.as_deref().unwrap_or_default(),
        last: results.traffic.last.as_deref().unwrap_or_default(),
        has_old: results.old.is_some(),
        plot: timeline_plot(&results.timeline)?,
        limit_plots: limit_plots.collect::<Result<_, PlotError>>()?,
        lists: lists.into_iter().filter(|list| !list.keys.is_empty()).collect(),
    };
    Ok(replace_unprintable(&page.render()?))
}

/// Filters of the template.
#[expect(unreachable_pub, reason = "the macro makes items with the visibility of the function and public ones")]
mod filters {
    use askama::Values;

    /// Formats a share as a percentage.
    #[askama::filter_fn]
    pub(super) fn percent(share: &f64, _: &dyn Values) -> askama::Result<String> {
        Ok(format!("{:.2} %", share * 100.0))
    }

    /// Formats seconds.
    #[askama::filter_fn]
    pub(super) fn seconds(seconds: &f64, _: &dyn Values) -> askama::Result<String> {
        Ok(format!("{seconds:.1} s"))
    }

    /// Formats microseconds as milliseconds.
    #[askama::filter_fn]
    pub(super) fn milliseconds(micros: &u64, _: &dyn Values) -> askama::Result<String> {
        Ok(format!("{:.1} ms", *micros as f64 / 1000.0))
    }
}
