//! `hoistway doctor`.

use crate::{arguments, failure::Failure, output};
use console::Style;
use hoistway::{
    catalog::OpenOptions,
    doctor::{Check, Status, examine_with},
};
use std::fmt::Write;

pub(crate) fn run(arguments: &arguments::Doctor) -> Result<(), Failure> {
    let options = OpenOptions::default().store(arguments::store_options(&arguments.store)?);
    let checks = examine_with(&arguments.paths, &options);
    let written = if arguments.json {
        output::write_json(&std::collections::BTreeMap::from([("checks", &checks)]))
    } else {
        let text = as_text(&checks) + &verdict(&checks);
        output::write_labelled(&text, INDENT, label)
    };
    // A reader that stops early still gets the verdict.
    if checks.iter().any(|check| check.status == Status::Broken) { Err(Failure::Broken) } else { written }
}

/// Columns of the statuses, with the space behind them.
const INDENT: usize = 8;

fn label(line: &str) -> Option<(usize, Style)> {
    let style = Style::new();
    let status = line.split(' ').next()?;
    let coloured = match status {
        "ok" => style.green(),
        "absent" => style.dim(),
        "slower" => style.yellow(),
        "broken" => style.red().bold(),
        "verdict" => style.bold(),
        _ => return None,
    };
    Some((status.len(), coloured))
}

/// What all checks together mean for loads. `Checks` of the Python package says the same.
fn verdict(checks: &[Check]) -> String {
    let named = |status| {
        let names: Vec<&str> =
            checks.iter().filter(|check| check.status == status).map(|check| check.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let says = match (named(Status::Broken), named(Status::Slower)) {
        (Some(broken), _) => format!("loads fail here: {broken}"),
        (None, Some(slower)) => format!("loads work here, slower than they could: {slower}"),
        (None, None) => "loads work here, and nothing that was examined slows them".into(),
    };
    format!("verdict {says}\n")
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
