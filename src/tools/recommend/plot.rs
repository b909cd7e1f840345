//! Plots of a recommendation as inline SVG. They contain numbers only, never text of the traffic.

use plotters::prelude::*;

use super::results::CurvePoint;
use crate::tools::simulate::plot::{NAMESPACE, PlotError};

/// Size of a plot in pixels.
const SIZE: (u32, u32) = (1000, 280);

/// Axes of a step plot.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPlot<'a> {
    /// Points by ascending number; the share holds from its number to the next.
    pub(super) points: &'a [CurvePoint],
    /// Description of the numbers.
    pub(super) x_text: &'static str,
    /// Description of the shares.
    pub(super) y_text: &'static str,
    /// Number to mark.
    pub(super) marked: Option<u64>,
    /// Share before the first number, 0 to 1.
    pub(super) first_share: f64,
}

/// Plots shares of keys over numbers, which have a logarithmic axis.
///
/// # Errors
/// The plot cannot be built.
pub(super) fn step_plot(plot: StepPlot<'_>) -> Result<String, PlotError> {
    let StepPlot { points, x_text, y_text, marked, first_share } = plot;
    let first = points.first().map_or(1, |point| point.number).max(1) as f64;
    let last = points.last().map_or(1, |point| point.number).max(1) as f64;
    let (start, end) = (first / 1.3, last * 1.3);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d((start..end).log_scale(), 0.0..105.0)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|number| format!("{number:.0}"))
            .x_desc(x_text)
            .y_desc(y_text)
            .draw()?;
        let mut steps = vec![(start, first_share * 100.0)];
        for point in points {
            let number = (point.number.max(1)) as f64;
            let before = steps.last().map_or(0.0, |(_, share)| *share);
            steps.extend([(number, before), (number, point.share * 100.0)]);
        }
        let share = steps.last().map_or(0.0, |(_, share)| *share);
        steps.push((end, share));
        chart.draw_series(LineSeries::new(steps, RGBColor(25, 90, 170).stroke_width(2)))?;
        if let Some(marked) = marked.filter(|marked| *marked > 0) {
            let at = marked as f64;
            chart.draw_series(LineSeries::new([(at, 0.0), (at, 105.0)], RGBColor(179, 38, 30).stroke_width(1)))?;
        }
        area.present()?;
    }
    Ok(svg.replace(NAMESPACE, ""))
}
