//! Horizontal bars: a row for each, with its name, its range and its value.

use super::{Area, Drawn, builder, color, text, titled};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};
use serde::Deserialize;

const ROW_HEIGHT: u32 = 22;
/// Height of what is above and below the rows.
const AROUND: u32 = 110;
/// Height of a row's text, and of a limit's.
const TEXT_HEIGHT: i32 = 12;
/// Widest character of a label, at most, for the room that labels get.
const CHARACTER_WIDTH: u32 = 6;
/// Bottom and top of a bar in its row.
const BAR: (f64, f64) = (0.14, 0.86);
const LIMIT_COLOR: RGBColor = RGBColor(0xCF, 0x22, 0x2E);
/// Limits closer than this share of the scale have their names one above the other.
const LIMIT_DISTANCE: f64 = 0.25;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bars {
    pub(crate) title: String,
    /// What bars measure, with its unit.
    pub(crate) value_name: String,
    /// From top to bottom.
    pub(crate) bars: Vec<Bar>,
    /// Lines across all bars.
    pub(crate) limits: Vec<Limit>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bar {
    pub(crate) label: String,
    /// Bars of one series have one colour.
    pub(crate) series: usize,
    pub(crate) value: f64,
    /// The least and the highest value.
    pub(crate) range: (f64, f64),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Limit {
    pub(crate) label: String,
    pub(crate) value: f64,
}

impl Bars {
    pub(super) fn height(&self) -> u32 {
        AROUND + ROW_HEIGHT * self.bars.len() as u32
    }

    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        let bars = self.bars.iter().flat_map(|bar| [bar.value, bar.range.1]);
        bars.chain(self.limits.iter().map(|limit| limit.value))
    }

    pub(super) fn draw(&self, area: &Area<'_>, most: f64) -> Drawn {
        let longest = self.bars.iter().map(|bar| bar.label.chars().count()).max().unwrap_or_default();
        let rows = self.bars.len() as f64;
        let right = most * 1.05;
        let mut chart = builder(&titled(area, &self.title)?)
            .y_label_area_size(longest as u32 * CHARACTER_WIDTH + 8)
            .margin_right(60)
            .margin_top(if self.limits.is_empty() { 6 } else { 2 * TEXT_HEIGHT + 6 })
            .build_cartesian_2d(0.0..right, 0.0..rows.max(1.0))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .y_labels(0)
            .x_labels(7)
            .max_light_lines(0)
            .x_desc(&self.value_name)
            .draw()?;
        let digits = if most < 100.0 { 2 } else { 0 };
        let [left_text, right_text] =
            [HPos::Right, HPos::Left].map(|side| text(TEXT_HEIGHT, side, VPos::Center));
        for (number, bar) in self.bars.iter().enumerate() {
            let bottom = rows - 1.0 - number as f64;
            let middle = bottom + 0.5;
            let corners = [(0.0, bottom + BAR.0), (bar.value, bottom + BAR.1)];
            chart.draw_series([Rectangle::new(corners, color(bar.series).filled())])?;
            let (least, highest) = bar.range;
            let cap = |at: f64| PathElement::new([(at, middle - 0.12), (at, middle + 0.12)], BLACK);
            let across = PathElement::new([(least, middle), (highest, middle)], BLACK);
            chart.draw_series([across, cap(least), cap(highest)])?;
            let label = Text::new(bar.label.clone(), (-6, 0), left_text.clone());
            chart.draw_series([EmptyElement::at((0.0, middle)) + label])?;
            let value = Text::new(format!("{:.digits$}", bar.value), (6, 0), right_text.clone());
            chart.draw_series([EmptyElement::at((right, middle)) + value])?;
        }
        let mut limits: Vec<&Limit> = self.limits.iter().collect();
        limits.sort_by(|one, other| one.value.total_cmp(&other.value));
        let style = text(TEXT_HEIGHT, HPos::Center, VPos::Bottom).color(&LIMIT_COLOR);
        let (mut last, mut is_above) = (f64::NEG_INFINITY, false);
        for limit in limits {
            let line = [(limit.value, 0.0), (limit.value, rows)];
            chart.draw_series(DashedLineSeries::new(line, 5, 3, LIMIT_COLOR.stroke_width(1)))?;
            is_above = !is_above && limit.value - last < right * LIMIT_DISTANCE;
            last = limit.value;
            let name = format!("{} {:.digits$}", limit.label, limit.value);
            let up = if is_above { -TEXT_HEIGHT - 5 } else { -3 };
            let name = Text::new(name, (0, up), style.clone());
            chart.draw_series([EmptyElement::at((limit.value, rows)) + name])?;
        }
        Ok(())
    }
}
