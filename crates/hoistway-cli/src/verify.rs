//! `hoistway verify`.

use crate::{arguments, failure::Failure, output};
use hoistway::{counted, verify::Manifest};
use std::{fmt::Write, ops::ControlFlow};

pub(crate) fn run(arguments: &arguments::Verify) -> Result<(), Failure> {
    let expected = arguments.against.as_deref().map(Manifest::read).transpose()?;
    // Before all is read.
    arguments.save.as_deref().map(Manifest::check_place).transpose()?;
    let checkpoint = arguments.paths.open()?;
    let total = checkpoint.catalog().tensors().iter().map(|tensor| tensor.bytes.len()).sum();
    let bar = output::progress_bar(total);
    let found = Manifest::of(&checkpoint, |bytes| {
        bar.inc(bytes);
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let found = found?;
    if let Some(path) = &arguments.save {
        found.write(path)?;
    }
    let mut differences = expected.as_ref().map(|expected| expected.differences(&found)).unwrap_or_default();
    let written = match (&arguments.against, arguments.json) {
        (_, true) => output::write_json(&found),
        (None, false) => output::write_text(&as_text(&found)),
        (Some(path), false) if differences.is_empty() => {
            let tensors = counted(found.tensors.len(), "tensor matches", "tensors match");
            output::write_text(&format!("{tensors} {}", path.display()))
        }
        (Some(_), false) => Ok(()),
    };
    // A reader that stops early still gets the verdict.
    match &arguments.against {
        Some(path) if !differences.is_empty() => {
            let count = differences.len();
            let noun = if count == 1 { "difference" } else { "differences" };
            differences.push(format!("{count} {noun} from {}", path.display()));
            Err(Failure::Different(differences))
        }
        _ => written,
    }
}

fn as_text(manifest: &Manifest) -> String {
    let mut text = String::new();
    for (name, entry) in &manifest.tensors {
        let _ =
            writeln!(text, "{}  {} {} {:?}", entry.digest, output::printable(name), entry.dtype, entry.shape);
    }
    text
}
