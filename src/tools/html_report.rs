//! Results of `simulate` and `recommend` as HTML pages: one file without scripts, with every value escaped.
//!
//! Plots are inline SVG. They contain numbers only, never text of the traffic.
//!
//! Decides: what the page of `--report` shows, its escapes; how many plots.

use askama::Template;
use plotters::prelude::*;

use super::recommend::results::{CurvePoint, RecommendationResults};
use super::simulate::results::{
    LimitResults, RejectedKeyResults, SimulationResults, TimelineResults, list_changed_limits_first,
};
use crate::base::text::replace_unprintable;

/// Limits with a plot of their own.
const MAX_LIMIT_PLOTS: usize = 20;

/// Page of a simulation.
#[derive(Template)]
#[template(path = "simulate.html")]
struct SimulationPage<'r> {
    results: &'r SimulationResults,
    first: &'r str,
    last: &'r str,
    has_old: bool,
    /// SVG of all requests.
    plot: String,
    /// Changed limits first.
    limits: Vec<&'r LimitResults>,
    limit_plots: Vec<LimitPlot<'r>>,
    lists: Vec<TopKeyList<'r>>,
}

/// Plot of one limit.
struct LimitPlot<'r> {
    path: &'r str,
    plot: String,
}

/// List of top keys.
struct TopKeyList<'r> {
    title: &'static str,
    keys: &'r [RejectedKeyResults],
}

/// Page of a recommendation.
#[derive(Template)]
#[template(path = "recommend.html")]
struct RecommendationPage<'r> {
    results: &'r RecommendationResults,
    yaml: &'r str,
    uses: Vec<PeakUsePlot<'r>>,
    /// SVG of rejected keys by limit; empty without a limit.
    curve: String,
}

/// Plot of one period.
struct PeakUsePlot<'r> {
    period: &'r str,
    plot: String,
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

/// Plot that cannot be built.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PlotError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PlotError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// Formats results of a simulation as an HTML page.
///
/// # Errors
/// A plot or the template failed; results of a simulation make neither fail.
pub fn render_simulation(results: &SimulationResults) -> Result<String, PageError> {
    let mut rejecting: Vec<_> = results
        .limits
        .iter()
        .filter_map(|limit| Some((limit, limit.new.as_ref().filter(|new| new.rejected > 0)?)))
        .collect();
    rejecting.sort_by_key(|(limit, new)| (limit.change.is_none(), std::cmp::Reverse(new.rejected)));
    let plots = rejecting.iter().filter_map(|(limit, new)| Some((limit, new.timeline.as_ref()?)));
    let limit_plots = plots
        .take(MAX_LIMIT_PLOTS)
        .map(|(limit, timeline)| Ok(LimitPlot { path: &limit.path, plot: plot_timeline(timeline)? }));
    let changes = results.changes.as_ref();
    let lists = [
        TopKeyList { title: "Rejected keys", keys: &results.rejected_keys },
        TopKeyList { title: "Newly rejected keys", keys: changes.map_or(&[], |changes| &changes.newly_rejected_keys) },
        TopKeyList { title: "Newly admitted keys", keys: changes.map_or(&[], |changes| &changes.newly_admitted_keys) },
    ];
    let page = SimulationPage {
        results,
        first: results.traffic.first.as_deref().unwrap_or_default(),
        last: results.traffic.last.as_deref().unwrap_or_default(),
        has_old: results.old.is_some(),
        plot: plot_timeline(&results.timeline)?,
        limits: list_changed_limits_first(&results.limits),
        limit_plots: limit_plots.collect::<Result<_, PlotError>>()?,
        lists: lists.into_iter().filter(|list| !list.keys.is_empty()).collect(),
    };
    Ok(replace_unprintable(&page.render()?))
}

/// Formats results of a recommendation as an HTML page.
///
/// # Errors
/// A plot or the template failed; results of a recommendation make neither fail.
pub fn render_recommendation(results: &RecommendationResults) -> Result<String, PageError> {
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
        uses.push(PeakUsePlot { period: &used.period, plot: plot.draw()? });
    }
    let curve = StepPlot {
        points: &results.curve,
        x_text: "limit (requests_per_unit)",
        y_text: "% of keys rejected",
        marked,
        first_share: 1.0,
    };
    let curve = if results.curve.is_empty() { String::new() } else { curve.draw()? };
    let page = RecommendationPage { results, yaml: results.yaml.as_deref().unwrap_or_default(), uses, curve };
    Ok(replace_unprintable(&page.render()?))
}

/// Filters of the templates.
#[expect(unreachable_pub, reason = "the macro makes items with the visibility of the function and public ones")]
mod filters {
    use askama::Values;

    /// Formats a share as a percentage.
    #[askama::filter_fn]
    pub(super) fn percent(share: &f64, _: &dyn Values) -> askama::Result<String> {
        Ok(format!("{:.2} %", share * 100.0))
    }

    /// Formats seconds; less than one in milliseconds.
    #[askama::filter_fn]
    pub(super) fn seconds(seconds: &f64, _: &dyn Values) -> askama::Result<String> {
        Ok(if *seconds < 1.0 { format!("{:.1} ms", seconds * 1000.0) } else { format!("{seconds:.1} s") })
    }

    /// Formats microseconds as milliseconds.
    #[askama::filter_fn]
    pub(super) fn milliseconds(micros: &u64, _: &dyn Values) -> askama::Result<String> {
        Ok(format!("{:.1} ms", *micros as f64 / 1000.0))
    }
}

/// Draws a plot as SVG, without the attribute that SVG inside HTML does not need.
fn draw_svg(
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<(), PlotError>,
) -> Result<String, PlotError> {
    /// Size of a plot in pixels.
    const PLOT_SIZE: (u32, u32) = (1000, 280);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, PLOT_SIZE).into_drawing_area();
        draw(&area)?;
        area.present()?;
    }
    Ok(svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", ""))
}

/// Starts a chart with room for the texts of its axes.
fn start_chart<'a, 'b>(
    area: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(10).x_label_area_size(36).y_label_area_size(64);
    builder
}

/// One line of a plot.
struct PlottedSeries<'r> {
    label: &'static str,
    counts: &'r [u64],
    style: ShapeStyle,
}

/// Plots requests and rejections over time.
fn plot_timeline(timeline: &TimelineResults) -> Result<String, PlotError> {
    let mut all = vec![
        PlottedSeries { label: "requests", counts: &timeline.requests, style: RGBColor(130, 130, 130).stroke_width(1) },
        PlottedSeries { label: "rejected", counts: &timeline.rejected, style: RGBColor(179, 38, 30).stroke_width(2) },
    ];
    if let Some(before) = &timeline.rejected_before {
        let style = RGBColor(25, 90, 170).stroke_width(2);
        all.push(PlottedSeries { label: "rejected before", counts: before, style });
    }
    let span_seconds = timeline.span_seconds.max(1) as f64;
    let last = (timeline.requests.len().max(1)) as f64 * span_seconds;
    let per_second = |count: u64| count as f64 / span_seconds;
    let highest = all.iter().flat_map(|series| series.counts).copied().max().unwrap_or(0);
    draw_svg(|area| {
        let mut chart = start_chart(area).build_cartesian_2d(0.0..last, 0.0..(per_second(highest) * 1.4).max(1.0))?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("seconds from the start")
            .y_desc("per second")
            .draw()?;
        for PlottedSeries { label, counts, style } in all {
            // A step for each span.
            let points = counts.iter().enumerate().flat_map(|(index, count)| {
                let (start, end) = (index as f64 * span_seconds, (index + 1) as f64 * span_seconds);
                [(start, per_second(*count)), (end, per_second(*count))]
            });
            let sample = move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], style);
            chart.draw_series(LineSeries::new(points, style))?.label(label).legend(sample);
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .position(SeriesLabelPosition::UpperRight)
            .draw()?;
        Ok(())
    })
}

/// Step plot of the share of rejected keys by the size of the limit, on a logarithmic axis.
#[derive(Clone, Copy, Debug)]
struct StepPlot<'a> {
    /// Points by ascending number; the share holds from its number to the next.
    points: &'a [CurvePoint],
    /// Description of the numbers.
    x_text: &'static str,
    /// Description of the shares.
    y_text: &'static str,
    /// Number to mark.
    marked: Option<u64>,
    /// Share before the first number, 0 to 1.
    first_share: f64,
}

impl StepPlot<'_> {
    fn draw(self) -> Result<String, PlotError> {
        let Self { points, x_text, y_text, marked, first_share } = self;
        let first = points.first().map_or(1, |point| point.number).max(1) as f64;
        let last = points.last().map_or(1, |point| point.number).max(1) as f64;
        let (start, end) = (first / 1.3, last * 1.3);
        let mut steps = vec![(start, first_share * 100.0)];
        for point in points {
            let number = (point.number.max(1)) as f64;
            let before = steps.last().map_or(0.0, |(_, share)| *share);
            steps.extend([(number, before), (number, point.share * 100.0)]);
        }
        let share = steps.last().map_or(0.0, |(_, share)| *share);
        steps.push((end, share));
        draw_svg(|area| {
            let mut chart = start_chart(area).build_cartesian_2d((start..end).log_scale(), 0.0..105.0)?;
            chart
                .configure_mesh()
                .disable_x_mesh()
                .light_line_style(TRANSPARENT)
                .x_label_formatter(&|number| format!("{number:.0}"))
                .x_desc(x_text)
                .y_desc(y_text)
                .draw()?;
            chart.draw_series(LineSeries::new(steps, RGBColor(25, 90, 170).stroke_width(2)))?;
            if let Some(marked) = marked.filter(|marked| *marked > 0) {
                let at = marked as f64;
                chart.draw_series(LineSeries::new([(at, 0.0), (at, 105.0)], RGBColor(179, 38, 30).stroke_width(1)))?;
            }
            Ok(())
        })
    }
}
