//! `hoistway moe pack`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::{Cancel, counted};
use hoistway_experts::{
    Error,
    catalog::ExpertCatalog,
    pack::{self, PackOptions},
};
use std::process;

/// The exit code of a program that Ctrl-C has ended, as shells have it.
const INTERRUPTED: u8 = 130;

pub(super) fn run(arguments: &arguments::Pack) -> Result<(), Failure> {
    let checkpoint = arguments.paths.open()?;
    // Experts are the same, however many a token uses.
    let catalog = ExpertCatalog::of_checkpoint(&checkpoint, Some(1))?;
    let path = arguments.output.clone().or_else(|| pack::path_of(&catalog));
    let path = path.filter(|_| !catalog.experts().is_empty()).ok_or_else(|| {
        Failure::told("the checkpoint has no experts: only models with experts can be packed", 4)
    })?;
    // Opening a model that does not answer ends as signals are set to end it.
    let options = PackOptions::default().cancel(cancelled_when_interrupted()?);
    // Once from the model, and once from the pack.
    let bar = output::progress_bar(catalog.total_expert_bytes().saturating_mul(2));
    let done = match arguments.check {
        true => pack::check(&checkpoint, &catalog, &path, &options, |bytes| bar.inc(bytes)),
        false => pack::write(&checkpoint, &catalog, &path, &options, |bytes| bar.inc(bytes)),
    };
    bar.finish_and_clear();
    let report = match done {
        Err(Error::Engine(hoistway::Error::Cancelled)) => {
            let left = if arguments.check { "the check is not complete" } else { "nothing was packed" };
            return Err(Failure::told(format!("interrupted: {left}"), INTERRUPTED));
        }
        done => done?,
    };
    if arguments.json {
        return output::write_json(&report);
    }
    output::write_text(&format!(
        "{}: {} of {}, {} in {:.1} s",
        report.path.display(),
        counted(report.experts, "expert", "experts"),
        ByteSize(report.bytes),
        if arguments.check { "all as they were packed, read" } else { "written and read again" },
        report.seconds,
    ))
}

/// A token that Ctrl-C, SIGTERM and SIGHUP cancel. The second of these ends the process.
fn cancelled_when_interrupted() -> Result<Cancel, Failure> {
    let cancel = Cancel::default();
    let token = cancel.clone();
    ctrlc::set_handler(move || {
        if token.is_cancelled() {
            process::exit(INTERRUPTED.into());
        }
        token.cancel();
    })
    .map_err(|error| Failure::told(format!("cannot wait for Ctrl-C: {error}"), 1))?;
    Ok(cancel)
}
