//! `hoistway doctor`.

use crate::{arguments, failure::Failure, output};
use console::Style;
use hoistway::doctor::{Check, Status, examine};
use std::fmt::Write;

pub(crate) fn run(arguments: &arguments::Doctor) -> Result<(), Failure> {
    let checks = examine(&arguments.paths);
    let written = if arguments.json {
        output::write_json(&checks)
    } else {
        output::write_labelled(&as_text(&checks), INDENT, label)
    };
    // A reader that stops early still gets the verdict.
    if checks.iter().any(|check| check.status == Status::Broken) { Err(Failure::Broken) } else { written }
}

/// Columns of the verdicts, with the space behind them.
const INDENT: usize = 8;

fn label(line: &str) -> Option<(usize, Style)> {
    let style = Style::new();
    let verdict = line.split(' ').next()?;
    let coloured = match verdict {
        "ok" => style.green(),
        "absent" => style.dim(),
        "slower" => style.yellow(),
        "broken" => style.red().bold(),
        _ => return None,
    };
    Some((verdict.len(), coloured))
}

fn as_text(checks: &[Check]) -> String {
    let mut text = String::new();
    for Check { name, status, finding, fix, .. } in checks {
        let mark = match status {
            Status::Ok => "ok    ",
            Status::Absent => "absent",
            Status::Slower => "slower",
            Status::Broken => "broken",
        };
        let _ = writeln!(text, "{mark}  {name}: {finding}");
        if !fix.is_empty() {
            let advice = if *status == Status::Absent { "if wanted" } else { "to fix" };
            let _ = writeln!(text, "        {advice}: {fix}");
        }
    }
    text
}
