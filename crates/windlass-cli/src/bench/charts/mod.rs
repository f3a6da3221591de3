//! Charts of what was measured: `lines` against sizes, `bars` of routes, and `heat_map` of both sizes at once.

mod bars;
mod heat_map;
mod lines;

pub(super) use bars::{Bars, draw as draw_bars};

use super::tables::Summary;
use plotters::prelude::*;
use std::{io, path::Path};
use windlass::counted;

const SIZE: (u32, u32) = (800, 500);

type Problem<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// Draws all charts of `windlass bench read`.
pub(super) fn draw(directory: &Path, summaries: &[Summary]) -> io::Result<()> {
    lines::draw(directory, summaries)?;
    heat_map::draw(directory, summaries)?;
    let all: Vec<&Summary> = summaries.iter().collect();
    let mut combinations: Vec<_> = all.iter().map(|own| (own.num_processes, own.backend)).collect();
    combinations.sort_by_key(|(count, _)| *count);
    combinations.dedup();
    let best = |(count, route)| {
        let own = all.iter().filter(|own| (own.num_processes, own.backend) == (count, route));
        let most = own.map(|own| own.throughput_gbps_median).fold(0.0, f64::max);
        (processes(count), route.name().to_owned(), most)
    };
    let bars = Bars {
        title: format!("{}: throughput with the best sizes", routes(&all)),
        group_name: "processes",
        value_name: "GB/s, median",
        values: combinations.into_iter().map(best).collect(),
    };
    draw_bars(&directory.join("throughput_by_processes.svg"), &bars)
}

/// The routes that were measured, for a title.
fn routes(summaries: &[&Summary]) -> String {
    let mut names: Vec<&str> = summaries.iter().map(|own| own.backend.name()).collect();
    names.dedup();
    names.join(", ")
}

fn processes(count: u16) -> String {
    counted(count, "process", "processes")
}
