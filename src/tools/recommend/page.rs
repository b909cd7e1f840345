//! Results as one HTML page: without scripts, without other files, and with every value escaped.

use askama::Template;

use super::plot::{StepPlot, step_plot};
use super::results::RecommendationResults;
use crate::base::text::replace_unprintable;
use crate::tools::simulate::page::PageError;

/// The page.
#[derive(Template)]
#[template(path = "recommend.html")]
struct RecommendationPage<'r> {
    results: &'r RecommendationResults,
    yaml: &'r str,
    uses: Vec<UsePlot<'r>>,
    /// SVG of rejected keys by limit; empty without a limit.
    curve: String,
}

/// Plot of one period.
struct UsePlot<'r> {
    period: &'r str,
    plot: String,
}

/// Formats results as an HTML page.
///
/// # Errors
/// A plot or the template failed; results of a recommendation make neither fail.
pub fn html(results: &RecommendationResults) -> Result<String, PageError> {
    let recommended = results.limits.iter().find(|limit| limit.recommended);
    let marked = recommended.and_then(|limit| limit.requests_per_unit).map(u64::from);
    let mut uses = Vec::new();
    for used in &results.uses {
        let plot = StepPlot {
            points: &used.distribution,
            x_text: "hits in the busiest span of this length",
            y_text: "% of keys",
            marked: None,
            first_share: 0.0,
        };
        uses.push(UsePlot { period: &used.period, plot: step_plot(plot)? });
    }
    let curve = StepPlot {
        points: &results.curve,
        x_text: "limit (requests_per_unit)",
        y_text: "% of keys rejected",
        marked,
        first_share: 1.0,
    };
    let curve = if results.curve.is_empty() { String::new() } else { step_plot(curve)? };
    let page = RecommendationPage { results, yaml: results.yaml.as_deref().unwrap_or_default(), uses, curve };
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
}
