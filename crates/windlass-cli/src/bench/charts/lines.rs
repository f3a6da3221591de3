//! Throughput against buffer or chunk size, a line for each route and number of processes.

use super::{Problem, SIZE, processes, routes};
use crate::bench::tables::Summary;
use plotters::{coord::Shift, prelude::*};
use std::{io, path::Path};

/// What a chart has on its horizontal axis; there is one chart for each value of the other.
struct Axis {
    name: &'static str,
    across: fn(&Summary) -> f64,
    other_name: &'static str,
    other: fn(&Summary) -> f64,
}

const AXES: [Axis; 2] = [
    Axis {
        name: "buffer",
        across: |own| own.buffer_size_mb,
        other_name: "chunk",
        other: |own| own.chunk_size_mb,
    },
    Axis {
        name: "chunk",
        across: |own| own.chunk_size_mb,
        other_name: "buffer",
        other: |own| own.buffer_size_mb,
    },
];

/// Draws `throughput_by_<axis>_<other>_<MiB>.svg`.
pub(super) fn draw(directory: &Path, summaries: &[Summary]) -> io::Result<()> {
    for axis in AXES {
        let mut others: Vec<f64> = summaries.iter().map(axis.other).collect();
        others.sort_by(f64::total_cmp);
        others.dedup();
        for other in others {
            let own: Vec<&Summary> = summaries.iter().filter(|own| (axis.other)(own) == other).collect();
            let name = format!("throughput_by_{}_{}_{other}MiB.svg", axis.name, axis.other_name);
            chart(&directory.join(name), &axis, other, &own).map_err(io::Error::other)?;
        }
    }
    Ok(())
}

fn chart<'a>(path: &'a Path, axis: &Axis, other: f64, summaries: &[&Summary]) -> Result<(), Problem<'a>> {
    let area: DrawingArea<SVGBackend<'a>, Shift> = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!(
        "{}: throughput by {} size, {}s of {other} MiB",
        routes(summaries),
        axis.name,
        axis.other_name
    );
    let most = |value: fn(&Summary) -> f64| summaries.iter().map(|own| value(own)).fold(0.0, f64::max);
    let mut series: Vec<_> = summaries.iter().map(|own| (own.backend, own.num_processes)).collect();
    series.dedup();
    // Room above the lines for the legend.
    let headroom = 1.1 + 0.05 * series.len() as f64;
    let (right, top) = (most(axis.across) * 1.05, most(|own| own.throughput_gbps_median) * headroom);
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..right.max(f64::MIN_POSITIVE), 0.0..top.max(f64::MIN_POSITIVE))?;
    chart.configure_mesh().x_desc(format!("{} size, MiB", axis.name)).y_desc("GB/s, median").draw()?;
    for (number, (route, count)) in series.into_iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let own = summaries.iter().filter(|own| (own.backend, own.num_processes) == (route, count));
        let mut points: Vec<(f64, f64)> =
            own.map(|own| ((axis.across)(own), own.throughput_gbps_median)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        let label = format!("{route}, {}", processes(count));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(4))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()
}
