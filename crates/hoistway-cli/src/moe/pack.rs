//! `hoistway moe pack`.

use super::arguments;
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::{Cancel, counted};
use hoistway_experts::{
    catalog::ExpertCatalog,
    pack::{self, PackOptions},
};

/// The exit code of a program that Ctrl-C has ended, as shells have it.
const INTERRUPTED: u8 = 130;

pub(super) fn run(arguments: &arguments::Pack) -> Result<(), Failure> {
    let cancel = cancelled_when_interrupted()?;
    let checkpoint = arguments.paths.open()?;
    // Experts are the same, however many a token uses.
    let catalog = ExpertCatalog::of_checkpoint(&checkpoint, Some(1))?;
    let path = arguments.output.clone().or_else(|| pack::path_of(&catalog));
    let path = path.filter(|_| !catalog.experts().is_empty()).ok_or_else(|| {
        Failure::told("the checkpoint has no experts: only models with experts can be packed", 4)
    })?;
    let options = PackOptions::default().cancel(cancel.clone());
    let passes = if arguments.check { 1 } else { 2 };
    let bar = output::progress_bar(catalog.total_expert_bytes().saturating_mul(passes));
    let done = match arguments.check {
        true => pack::check(&catalog, &path, &options, |bytes| bar.inc(bytes)),
        false => pack::write(&checkpoint, &catalog, &path, &options, |bytes| bar.inc(bytes)),
    };
    bar.finish_and_clear();
    let report = match done {
        Err(_) if cancel.is_cancelled() => {
            return Err(Failure::told("interrupted: nothing was packed", INTERRUPTED));
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

/// A token that Ctrl-C, SIGTERM and SIGHUP cancel.
fn cancelled_when_interrupted() -> Result<Cancel, Failure> {
    let cancel = Cancel::default();
    let token = cancel.clone();
    ctrlc::set_handler(move || token.cancel())
        .map_err(|error| Failure::told(format!("cannot wait for Ctrl-C: {error}"), 1))?;
    Ok(cancel)
}
