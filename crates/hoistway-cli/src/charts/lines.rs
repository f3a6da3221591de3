//! Lines of values against sizes. Sizes have a logarithmic axis, since most are powers of two.

use super::{Area, Drawn, builder, color, sizes, text, titled};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};
use serde::Deserialize;

/// Height of a series in the legend, and of what is around all of them. Lines stay below the legend.
const LEGEND_ROW: u32 = 15;
const LEGEND_MARGIN: u32 = 24;
/// Most of the height that lines leave to the legend.
const MOST_LEGEND: f64 = 0.6;
/// Height of what is above and below the lines.
const AROUND: u32 = 90;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lines {
    pub(crate) title: String,
    /// What sizes are of, with their unit.
    pub(crate) size_name: String,
    /// What lines measure, with its unit.
    pub(crate) value_name: String,
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Line {
    pub(crate) label: String,
    /// Sizes and values, smallest size first.
    pub(crate) points: Vec<(f64, f64)>,
}

impl Lines {
    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        self.lines.iter().flat_map(|line| line.points.iter().map(|point| point.1))
    }

    pub(super) fn draw(&self, area: &Area<'_>, most: f64) -> Drawn {
        let position = |size: f64| size.max(f64::MIN_POSITIVE).log2();
        let sizes = sizes(self.lines.iter().flat_map(|line| line.points.iter().map(|point| point.0)));
        let [left, right] = [sizes.first(), sizes.last()].map(|size| size.copied().map_or(0.0, position));
        let legend = LEGEND_ROW * self.lines.len() as u32 + LEGEND_MARGIN;
        let height = area.dim_in_pixel().1.saturating_sub(AROUND).max(1);
        let top = most / (1.0 - (f64::from(legend) / f64::from(height)).min(MOST_LEGEND));
        let mut chart =
            builder(&titled(area, &self.title)?).build_cartesian_2d(left - 0.3..right + 0.3, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .x_labels(0)
            .x_desc(&self.size_name)
            .y_desc(&self.value_name)
            .draw()?;
        let below = text(12, HPos::Center, VPos::Top);
        chart.draw_series(sizes.iter().map(|&size| {
            EmptyElement::at((position(size), 0.0)) + Text::new(size.to_string(), (0, 6), below.clone())
        }))?;
        for (number, line) in self.lines.iter().enumerate() {
            let style = color(number).stroke_width(2);
            let points = line.points.iter().map(|&(size, value)| (position(size), value));
            chart
                .draw_series(LineSeries::new(points, style).point_size(4))?
                .label(&line.label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
    }
}
