//! `windlass verify`.

use crate::{arguments, failure::Failure, output};
use std::fmt::Write;
use windlass::{Checkpoint, verify::Manifest};

pub(crate) fn run(arguments: &arguments::Verify) -> Result<(), Failure> {
    let expected = arguments.against.as_deref().map(Manifest::read).transpose()?;
    let checkpoint = Checkpoint::open(&arguments.paths.paths)?;
    let total = checkpoint.catalog().tensors().iter().map(|tensor| tensor.bytes.len()).sum();
    let bar = output::progress_bar(total);
    let found = Manifest::of(&checkpoint, |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let found = found?;
    if let Some(path) = &arguments.save {
        found.write(path)?;
    }
    if arguments.json {
        output::write_json(&found)?;
    } else if expected.is_none() {
        let mut text = String::new();
        for (name, entry) in &found.tensors {
            let _ = writeln!(text, "{}  {name} {} {:?}", entry.digest, entry.dtype, entry.shape);
        }
        output::write(text.as_bytes())?;
    }
    let Some(expected) = expected else { return Ok(()) };
    let differences = expected.differences(&found);
    let (path, count) = (arguments.against.as_deref().unwrap_or("".as_ref()).display(), found.tensors.len());
    if differences.is_empty() {
        if !arguments.json {
            output::write(format!("{count} tensors match {path}\n").as_bytes())?;
        }
        return Ok(());
    }
    let summary = format!("{} differences from {path}", differences.len());
    Err(Failure::Different(format!("{}\nwindlass: {summary}", differences.join("\nwindlass: "))))
}
