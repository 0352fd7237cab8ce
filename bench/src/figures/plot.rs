//! Figures as SVG.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// One line of a figure: its name, and its points.
pub(crate) struct Series {
    /// As the legend has it.
    pub name: String,
    /// In order.
    pub points: Vec<(f64, f64)>,
}

/// Draws lines over a common axis, on which `ticks` are named at 0, 1, 2 … where there are any.
pub(crate) fn lines(
    file: &Path,
    title: &str,
    axes: (&str, &str),
    ticks: &[String],
    series: &[Series],
) -> Result<()> {
    draw((file, title), axes, ticks, series, true)
}

/// Draws points that nothing joins.
pub(crate) fn points(file: &Path, title: &str, axes: (&str, &str), series: &[Series]) -> Result<()> {
    draw((file, title), axes, &[], series, false)
}

fn draw(
    (file, title): (&Path, &str),
    (x, y): (&str, &str),
    ticks: &[String],
    series: &[Series],
    joined: bool,
) -> Result<()> {
    let points = || series.iter().flat_map(|s| &s.points);
    let most = |part: fn(&(f64, f64)) -> f64| points().map(part).fold(1e-9, f64::max);
    let (right, top) = (most(|p| p.0), most(|p| p.1) * 1.1);
    let drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(file, (720, 420)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..right * 1.02, 0.0..top)?;
        let tick = |at: &f64| match ticks.get(at.round() as usize) {
            Some(name) if (at - at.round()).abs() < 1e-6 => name.clone(),
            _ if ticks.is_empty() => format!("{at:.0}"),
            _ => String::new(),
        };
        let labels = if ticks.is_empty() { 10 } else { ticks.len() };
        chart.configure_mesh().x_desc(x).y_desc(y).x_labels(labels).x_label_formatter(&tick).draw()?;
        for (at, line) in series.iter().enumerate() {
            let color = Palette99::pick(at).to_rgba();
            let joining = line.points.iter().copied().filter(|_| joined);
            chart
                .draw_series(LineSeries::new(joining, color.stroke_width(2)))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
            chart.draw_series(line.points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()?;
        area.present()?;
        Ok(())
    };
    drawn().map_err(|error| anyhow!("{}: {error}", file.display()))
}
