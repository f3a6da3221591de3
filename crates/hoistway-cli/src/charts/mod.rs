//! Charts as SVG: a figure is a grid of panels, each with `bars`, `lines` or a `heat_map`.
//!
//! Benchmarks describe figures and know nothing of drawing. The harness in `bench/` describes its own as JSON.

mod bars;
mod heat_map;
mod lines;

pub(crate) use bars::{Bar, Bars};
pub(crate) use heat_map::{Cell, HeatMap};
pub(crate) use lines::{Line, Lines};

use crate::failure::Failure;
use hoistway::save::{refuse_others, write_whole};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use serde::Deserialize;
use std::{io, path::Path};

/// Width and height of a panel that has its row for itself, and of one beside others. Bars have a height of their own.
const SIZES: [(u32, u32); 2] = [(800, 440), (640, 340)];
const TITLE_HEIGHT: u32 = 44;
/// Colours of series, again from the first after the last. White text is readable on each.
const SERIES: [RGBColor; 8] = [
    RGBColor(0x1F, 0x6F, 0xEB),
    RGBColor(0x8C, 0x95, 0x9F),
    RGBColor(0xBC, 0x4C, 0x00),
    RGBColor(0x1A, 0x7F, 0x37),
    RGBColor(0x82, 0x50, 0xDF),
    RGBColor(0xBF, 0x39, 0x89),
    RGBColor(0x1B, 0x7C, 0x83),
    RGBColor(0x9A, 0x67, 0x00),
];
/// Values outside of these have no scale.
const VALUES: (f64, f64) = (1e-9, 1e18);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Panels below a title.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Figure {
    pub(crate) title: String,
    /// Panels in a row.
    pub(crate) columns: usize,
    pub(crate) scale: Scale,
    pub(crate) panels: Vec<Panel>,
}

/// The range of values that a panel shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scale {
    /// That of the panel's values.
    Own,
    /// That of all panels' values.
    Shared,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Panel {
    Bars(Bars),
    Lines(Lines),
    HeatMap(HeatMap),
}

impl Figure {
    /// Returns a figure of one panel, which the title describes.
    pub(crate) fn of(title: String, panel: Panel) -> Self {
        Self { title, columns: 1, scale: Scale::Own, panels: vec![panel] }
    }

    /// Fails if a file is there that is no chart, which [`write`](Self::write) does not replace.
    pub(crate) fn check_place(path: &Path) -> hoistway::Result<()> {
        refuse_others(path, "a chart", |begins| {
            let is_svg = || begins.windows(4).any(|window| window == b"<svg");
            begins.starts_with(b"<svg") || (begins.starts_with(b"<?xml") && is_svg())
        })
    }

    /// Writes the figure as SVG.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(io::Error::other).map_err(Failure::output)?;
        Self::check_place(path)?;
        Ok(write_whole(path, svg.as_bytes())?)
    }

    fn draw(&self, svg: &mut String) -> Drawn {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let rows = self.panels.len().div_ceil(columns);
        let (width, height) = SIZES[usize::from(columns > 1)];
        let height = self.panels.iter().map(|panel| panel.height(height)).max().unwrap_or_default();
        let size = (width * columns as u32, height * rows as u32 + TITLE_HEIGHT);
        let area = SVGBackend::with_string(svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        let most = self.panels.iter().map(Panel::most).fold(0.0, f64::max);
        let below = area.titled(&self.title, text(20, HPos::Center, VPos::Top))?;
        for (panel, area) in self.panels.iter().zip(below.split_evenly((rows, columns))) {
            let most = if self.scale == Scale::Shared { most } else { panel.most() };
            panel.draw(&area, most.clamp(VALUES.0, VALUES.1))?;
        }
        area.present()
    }
}

impl Panel {
    fn height(&self, usual: u32) -> u32 {
        match self {
            Self::Bars(bars) => bars.height(),
            Self::Lines(_) | Self::HeatMap(_) => usual,
        }
    }

    /// The highest value.
    fn most(&self) -> f64 {
        let values: &mut dyn Iterator<Item = f64> = match self {
            Self::Bars(bars) => &mut bars.values(),
            Self::Lines(lines) => &mut lines.values(),
            Self::HeatMap(map) => &mut map.values(),
        };
        values.fold(0.0, f64::max)
    }

    fn draw(&self, area: &Area<'_>, most: f64) -> Drawn {
        match self {
            Self::Bars(bars) => bars.draw(area, most),
            Self::Lines(lines) => lines.draw(area, most),
            Self::HeatMap(map) => map.draw(area, most),
        }
    }
}

/// Returns the area below a panel's title, if it has one.
fn titled<'a>(area: &Area<'a>, title: &str) -> Result<Area<'a>, DrawingAreaErrorKind<io::Error>> {
    if title.is_empty() { Ok(area.clone()) } else { area.titled(title, text(15, HPos::Center, VPos::Top)) }
}

fn builder<'a, 'b>(area: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(12).x_label_area_size(40).y_label_area_size(64);
    builder
}

/// Black text at a side of its position, or centred on it.
fn text(height: i32, across: HPos, up: VPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", height).into_font()).pos(Pos::new(across, up))
}

fn color(series: usize) -> RGBColor {
    SERIES[series % SERIES.len()]
}

/// Each size once, smallest first.
pub(crate) fn sizes(found: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sizes: Vec<f64> = found.collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    sizes
}
