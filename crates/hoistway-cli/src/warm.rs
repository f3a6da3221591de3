//! `hoistway warm`.

use crate::{arguments, failure::Failure, output};
use bytesize::ByteSize;
use std::ops::ControlFlow;

pub(crate) fn run(arguments: &arguments::Warm) -> Result<(), Failure> {
    let checkpoint = arguments.paths.open()?;
    let bar = output::progress_bar(checkpoint.catalog().files().iter().map(|file| file.len).sum());
    let report = checkpoint.warm(|bytes| {
        bar.inc(bytes);
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let report = report?;
    if arguments.json {
        return output::write_json(&report);
    }
    let cached = match report.cached_bytes {
        Some(cached) if cached < report.bytes => {
            format!("the page cache kept only {}: there is too little memory for more", ByteSize(cached))
        }
        Some(_) => "all of it is in the page cache".into(),
        None => "the system does not say what the page cache kept".into(),
    };
    let read = match report.read_bytes {
        Some(read) => {
            format!("{} read, {} cached before", ByteSize(read), ByteSize(report.bytes.saturating_sub(read)))
        }
        None => "read, whatever was cached before".into(),
    };
    let files = if report.files == 1 { "file" } else { "files" };
    let text = format!(
        "{} in {} {files}: {read}, in {:.3} s; {cached}",
        ByteSize(report.bytes),
        report.files,
        report.seconds,
    );
    output::write_text(&text)
}
