//! Plots as inline SVG. They contain numbers only, never text of the traffic.

use plotters::prelude::*;

use super::results::TimelineResults;

/// Size of a plot in pixels.
const SIZE: (u32, u32) = (1000, 280);
/// Attribute that SVG inside HTML does not need.
pub(crate) const NAMESPACE: &str = " xmlns=\"http://www.w3.org/2000/svg\"";

/// Plot that cannot be built.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PlotError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PlotError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// One line of a plot.
struct PlottedSeries<'r> {
    label: &'static str,
    counts: &'r [u64],
    style: ShapeStyle,
}

/// Plots requests and rejections over time.
///
/// # Errors
/// The plot cannot be built.
pub fn timeline_plot(timeline: &TimelineResults) -> Result<String, PlotError> {
    let mut all = vec![
        PlottedSeries { label: "requests", counts: &timeline.requests, style: RGBColor(130, 130, 130).stroke_width(1) },
        PlottedSeries { label: "rejected", counts: &timeline.rejected, style: RGBColor(179, 38, 30).stroke_width(2) },
    ];
    if let Some(before) = &timeline.rejected_before {
        let style = RGBColor(25, 90, 170).stroke_width(2);
        all.push(PlottedSeries { label: "rejected before", counts: before, style });
    }
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let span_seconds = timeline.span_seconds.max(1) as f64;
        let last = (timeline.requests.len().max(1)) as f64 * span_seconds;
        let per_second = |count: u64| count as f64 / span_seconds;
        let highest = all.iter().flat_map(|series| series.counts).copied().max().unwrap_or(0);
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..last, 0.0..(per_second(highest) * 1.4).max(1.0))?;
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
        area.present()?;
    }
    Ok(svg.replace(NAMESPACE, ""))
}
