//! Values of two sizes as colours: a cell for each pair.

use super::{Area, Drawn, builder, sizes, text, titled};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};
use serde::Deserialize;

/// Colours of zero and of the highest value.
const COLORS: [(u8, u8, u8); 2] = [(239, 246, 255), (8, 64, 129)];
/// A pair that was not measured.
const UNKNOWN: RGBColor = RGBColor(224, 224, 224);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeatMap {
    pub(crate) title: String,
    /// What sizes from left to right are of, with their unit.
    pub(crate) across_name: String,
    /// What sizes from bottom to top are of, with their unit.
    pub(crate) up_name: String,
    pub(crate) cells: Vec<Cell>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cell {
    pub(crate) across: f64,
    pub(crate) up: f64,
    pub(crate) value: f64,
}

impl HeatMap {
    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        self.cells.iter().map(|cell| cell.value)
    }

    pub(super) fn draw(&self, area: &Area<'_>, most: f64) -> Drawn {
        let columns = sizes(self.cells.iter().map(|cell| cell.across));
        let rows = sizes(self.cells.iter().map(|cell| cell.up));
        let mut chart = builder(&titled(area, &self.title)?)
            .y_label_area_size(72)
            .build_cartesian_2d(0.0..columns.len().max(1) as f64, 0.0..rows.len().max(1) as f64)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_labels(0)
            .y_labels(0)
            .x_desc(&self.across_name)
            .y_desc(&self.up_name)
            .draw()?;
        for (column, across) in columns.iter().enumerate() {
            for (row, up) in rows.iter().enumerate() {
                let found = self.cells.iter().find(|cell| (cell.across, cell.up) == (*across, *up));
                let (x, y) = (column as f64, row as f64);
                let color = found.map_or(UNKNOWN, |cell| shade(cell.value / most));
                chart.draw_series([Rectangle::new([(x, y), (x + 1.0, y + 1.0)], color.filled())])?;
                chart.draw_series([Rectangle::new([(x, y), (x + 1.0, y + 1.0)], WHITE)])?;
                if let Some(&Cell { value, .. }) = found {
                    let ink = if value / most > 0.5 { WHITE } else { BLACK };
                    let style = text(15, HPos::Center, VPos::Center).color(&ink);
                    let label = Text::new(format!("{value:.2}"), (0, 0), style);
                    chart.draw_series([EmptyElement::at((x + 0.5, y + 0.5)) + label])?;
                }
            }
        }
        chart.draw_series(columns.iter().enumerate().map(|(column, size)| {
            let label = Text::new(size.to_string(), (0, 6), text(12, HPos::Center, VPos::Top));
            EmptyElement::at((column as f64 + 0.5, 0.0)) + label
        }))?;
        chart.draw_series(rows.iter().enumerate().map(|(row, size)| {
            let label = Text::new(size.to_string(), (-6, 0), text(12, HPos::Right, VPos::Center));
            EmptyElement::at((0.0, row as f64 + 0.5)) + label
        }))?;
        Ok(())
    }
}

/// The colour of a share of the highest value.
fn shade(share: f64) -> RGBColor {
    let [low, high] = COLORS;
    let mix = |low: u8, high: u8| (f64::from(low) + (f64::from(high) - f64::from(low)) * share).round() as u8;
    RGBColor(mix(low.0, high.0), mix(low.1, high.1), mix(low.2, high.2))
}
