//! Results of a benchmark: where they go, and what is computed of them. `hoistway kv bench` has them too.

use crate::{charts::Figure, failure::Failure, output};
use clap::Args;
use hoistway::save::write_whole;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where results go.
#[derive(Debug, Args)]
pub(crate) struct Output {
    /// Write all measurements and their summary (CSV) and charts (SVG) into this directory
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Output {
    /// Creates the directory. A benchmark that could not write its results fails before it measures. The names of its charts begin
    /// with one of these.
    pub(crate) fn prepare(&self, charts: &[&str]) -> Result<(), Failure> {
        let Some(directory) = &self.output_dir else { return Ok(()) };
        fs::create_dir_all(directory).map_err(Failure::output)?;
        // Which charts there will be depends on what is measured.
        for entry in fs::read_dir(directory).map_err(Failure::output)? {
            let entry = entry.map_err(Failure::output)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".svg") && charts.iter().any(|chart| name.starts_with(chart)) {
                Figure::check_place(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes `<name>_raw.csv`, `<name>_summary.csv` and the figures into the directory.
    pub(crate) fn write_files(
        &self,
        name: &str,
        measurements: &[impl Serialize],
        summaries: &[impl Serialize],
        figures: Vec<(String, Figure)>,
    ) -> Result<(), Failure> {
        let Some(directory) = &self.output_dir else { return Ok(()) };
        write_rows(&directory.join(format!("{name}_raw.csv")), measurements)?;
        write_rows(&directory.join(format!("{name}_summary.csv")), summaries)?;
        figures.into_iter().try_for_each(|(name, figure)| figure.write(&directory.join(name)))
    }

    /// Prints results as JSON, or the table for people.
    pub(crate) fn print(&self, results: &impl Serialize, table: &str) -> Result<(), Failure> {
        if self.json { output::write_json(results) } else { output::write_text(table) }
    }
}

fn write_rows(path: &Path, rows: &[impl Serialize]) -> Result<(), Failure> {
    let mut table = csv::Writer::from_writer(Vec::new());
    rows.iter().try_for_each(|row| table.serialize(row)).map_err(Failure::output)?;
    let text = table.into_inner().map_err(csv::IntoInnerError::into_error).map_err(Failure::output)?;
    Ok(write_whole(path, &text)?)
}

/// Where values lie.
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) mean: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// The standard deviation.
    pub(crate) deviation: f64,
}

impl Spread {
    /// Describes at least one value.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count as f64;
        Self {
            median: f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]),
            mean,
            min: sorted[0],
            max: sorted[count - 1],
            deviation: variance.sqrt(),
        }
    }
}
