//! Groups of bars, one colour for each series.

use super::{Problem, SIZE};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::{io, path::Path};

/// Share of a group's width that its bars take.
const FILLED: f64 = 0.8;

/// What a chart shows.
pub(in crate::bench) struct Bars {
    pub(in crate::bench) title: String,
    /// What distinguishes groups.
    pub(in crate::bench) group_name: &'static str,
    /// What bars measure, with its unit.
    pub(in crate::bench) value_name: &'static str,
    /// Group, series and value of each bar. Groups and series are drawn in the order of their first bars.
    pub(in crate::bench) values: Vec<(String, String, f64)>,
}

/// Writes a chart as SVG.
pub(in crate::bench) fn draw(path: &Path, bars: &Bars) -> io::Result<()> {
    chart(path, bars).map_err(io::Error::other)
}

fn chart<'a>(path: &'a Path, bars: &Bars) -> Result<(), Problem<'a>> {
    let groups = distinct(bars.values.iter().map(|(group, _, _)| group));
    let series = distinct(bars.values.iter().map(|(_, series, _)| series));
    let most = bars.values.iter().map(|(_, _, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let area: DrawingArea<SVGBackend<'a>, Shift> = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(&bars.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        // Room above the bars for the legend.
        .build_cartesian_2d(0.0..groups.len().max(1) as f64, 0.0..most * 1.25)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .x_desc(bars.group_name)
        .y_desc(bars.value_name)
        .draw()?;
    let above = text(11, VPos::Bottom);
    for (number, name) in series.iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let own = bars.values.iter().filter(|(_, series, _)| series == *name);
        let places = own.filter_map(|(group, _, value)| {
            let group = groups.iter().position(|name| *name == group)? as f64;
            let width = FILLED / series.len() as f64;
            let left = group + (1.0 - FILLED) / 2.0 + width * number as f64;
            Some((left, left + width * 0.95, *value))
        });
        let places: Vec<_> = places.collect();
        let rectangles = places
            .iter()
            .map(|&(left, right, value)| Rectangle::new([(left, 0.0), (right, value)], color.filled()));
        chart
            .draw_series(rectangles)?
            .label(name.as_str())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
        chart.draw_series(places.iter().map(|&(left, right, value)| {
            let digits = if most < 100.0 { 2 } else { 0 };
            let label = Text::new(format!("{value:.digits$}"), (0, -3), above.clone());
            EmptyElement::at(((left + right) / 2.0, value)) + label
        }))?;
    }
    let below = text(13, VPos::Top);
    chart.draw_series(groups.iter().enumerate().map(|(number, name)| {
        EmptyElement::at((number as f64 + 0.5, 0.0)) + Text::new((*name).clone(), (0, 6), below.clone())
    }))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()
}

/// Black text that is centred on its position.
pub(super) fn text(height: i32, vertical: VPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", height).into_font()).pos(Pos::new(HPos::Center, vertical))
}

/// Each name once, in the order of its first appearance.
fn distinct<'a>(names: impl Iterator<Item = &'a String>) -> Vec<&'a String> {
    let mut found: Vec<&String> = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}
