//! Throughput of each buffer size with each chunk size, as colours: a chart for each route and number of processes.

use super::{Problem, SIZE, bars::text, processes};
use crate::bench::tables::Summary;
use plotters::{coord::Shift, prelude::*, style::text_anchor::VPos};
use std::{io, path::Path};

/// Colours of no throughput and of the highest.
const COLORS: [(u8, u8, u8); 2] = [(239, 246, 255), (8, 64, 129)];
/// A combination that was not measured.
const UNKNOWN: RGBColor = RGBColor(224, 224, 224);

/// Draws `heatmap_<route>_<processes>procs.svg`.
pub(super) fn draw(directory: &Path, summaries: &[Summary]) -> io::Result<()> {
    let kind = |own: &Summary| (own.backend, own.num_processes);
    // Combinations of one kind were measured one after the other.
    for own in summaries.chunk_by(|one, other| kind(one) == kind(other)) {
        let (route, count) = kind(&own[0]);
        let path = directory.join(format!("heatmap_{route}_{count}procs.svg"));
        let title = format!("{route}, {}: GB/s, median", processes(count));
        chart(&path, &title, own).map_err(io::Error::other)?;
    }
    Ok(())
}

fn chart<'a>(path: &'a Path, title: &str, summaries: &[Summary]) -> Result<(), Problem<'a>> {
    let buffers = sizes(summaries.iter().map(|own| own.buffer_size_mb));
    let chunks = sizes(summaries.iter().map(|own| own.chunk_size_mb));
    let most = summaries.iter().map(|own| own.throughput_gbps_median).fold(f64::MIN_POSITIVE, f64::max);
    let area: DrawingArea<SVGBackend<'a>, Shift> = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..buffers.len() as f64, 0.0..chunks.len() as f64)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(0)
        .y_labels(0)
        .x_desc("buffer size, MiB")
        .y_desc("chunk size, MiB")
        .draw()?;
    for (column, buffer) in buffers.iter().enumerate() {
        for (row, chunk) in chunks.iter().enumerate() {
            let found = summaries
                .iter()
                .find(|own| (own.buffer_size_mb, own.chunk_size_mb) == (*buffer, *chunk))
                .map(|own| own.throughput_gbps_median);
            let (x, y) = (column as f64, row as f64);
            let color = found.map_or(UNKNOWN, |value| shade(value / most));
            chart.draw_series([Rectangle::new([(x, y), (x + 1.0, y + 1.0)], color.filled())])?;
            chart.draw_series([Rectangle::new([(x, y), (x + 1.0, y + 1.0)], WHITE)])?;
            if let Some(value) = found {
                let ink = if value / most > 0.5 { WHITE } else { BLACK };
                let label = Text::new(format!("{value:.2}"), (0, 0), text(15, VPos::Center).color(&ink));
                chart.draw_series([EmptyElement::at((x + 0.5, y + 0.5)) + label])?;
            }
        }
    }
    let across = buffers.iter().enumerate().map(|(column, buffer)| {
        let label = Text::new(buffer.to_string(), (0, 6), text(13, VPos::Top));
        EmptyElement::at((column as f64 + 0.5, 0.0)) + label
    });
    chart.draw_series(across)?;
    let up = chunks.iter().enumerate().map(|(row, chunk)| {
        let label = Text::new(chunk.to_string(), (-24, 0), text(13, VPos::Center));
        EmptyElement::at((0.0, row as f64 + 0.5)) + label
    });
    chart.draw_series(up)?;
    area.present()
}

/// Each size once, smallest first.
fn sizes(found: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sizes: Vec<f64> = found.collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    sizes
}

/// The colour of a share of the highest throughput.
fn shade(share: f64) -> RGBColor {
    let [low, high] = COLORS;
    let mix = |low: u8, high: u8| (f64::from(low) + (f64::from(high) - f64::from(low)) * share).round() as u8;
    RGBColor(mix(low.0, high.0), mix(low.1, high.1), mix(low.2, high.2))
}
