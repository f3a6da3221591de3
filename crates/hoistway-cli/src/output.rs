//! Writing results, and showing progress to those who watch.

use crate::failure::Failure;
use console::{Style, Term, measure_text_width};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::{
    borrow::Cow,
    io::{self, IsTerminal, Write},
};

/// Text that stays on its line and does nothing to a terminal. Names and metadata come from files that anyone may
/// have written, escape sequences included.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unprintable) {
        return text.into();
    }
    let escape = |c: char| if is_unprintable(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect::<String>().into()
}

/// Whether a character shows as nothing, or changes how others show: controls, marks of direction and of no width, and
/// line ends that are no control.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{AD}'
                | '\u{61C}'
                | '\u{180E}'
                | '\u{200B}'..='\u{200F}'
                | '\u{2028}'..='\u{202E}'
                | '\u{2060}'..='\u{206F}'
                | '\u{FEFF}'
                | '\u{FFF9}'..='\u{FFFB}'
                | '\u{E0000}'..='\u{E007F}'
        )
}

/// Writes lines for people to standard output; see [`printable`].
pub(crate) fn write_text(text: &str) -> Result<(), Failure> {
    let lines: Vec<_> = text.lines().map(printable).collect();
    write(format!("{}\n", lines.join("\n")).as_bytes())
}

/// Writes lines for people as [`write_text`] does. A terminal gets them no wider than it is, their continuations `indent`
/// columns in. `label_of` says how many bytes at the start of a line are its label, and how that looks in colour.
pub(crate) fn write_labelled(
    text: &str,
    indent: usize,
    label_of: impl Fn(&str) -> Option<(usize, Style)>,
) -> Result<(), Failure> {
    let width = Term::stdout().size_checked().map_or(usize::MAX, |(_rows, columns)| columns.into());
    let mut shown = String::new();
    for line in text.lines() {
        let line = wrapped(&printable(line), width, indent);
        let (label, rest, style) = label_of(&line)
            .and_then(|(len, style)| Some((line.get(..len)?, line.get(len..)?, style)))
            .unwrap_or(("", &line, Style::new()));
        shown += &format!("{}{rest}\n", style.apply_to(label));
    }
    write(shown.as_bytes())
}

/// A line of which none of the parts is wider than `width`, as far as there are spaces to break it at.
fn wrapped(line: &str, width: usize, indent: usize) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in line.split_inclusive(' ') {
        if column > indent && column + measure_text_width(word.trim_end()) > width {
            text.truncate(text.trim_end().len());
            text += &format!("\n{:indent$}", "");
            column = indent;
        }
        text += word;
        column += measure_text_width(word);
    }
    text
}

/// Writes a result to standard output.
pub(crate) fn write(bytes: &[u8]) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    output.write_all(bytes).and_then(|()| output.flush()).map_err(Failure::output)
}

/// The version of the JSON that commands print. It changes if a field goes or means something else, and not if one is added.
const FORMAT_VERSION: u32 = 1;

#[derive(Serialize)]
struct Versioned<'a, T> {
    format_version: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// Writes a result as a JSON object, which begins with its version. `docs/schemas` has a schema for each command.
pub(crate) fn write_json(value: &impl Serialize) -> Result<(), Failure> {
    let versioned = Versioned { format_version: FORMAT_VERSION, value };
    let mut text = serde_json::to_vec_pretty(&versioned).map_err(Failure::output)?;
    text.push(b'\n');
    write(&text)
}

/// A bar on standard error that shows bytes, rate and time left; nothing if that is no terminal.
pub(crate) fn progress_bar(total_bytes: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
    let template = "{bar:30} {binary_bytes}/{binary_total_bytes} {decimal_bytes_per_sec} {eta}";
    let bar = bar
        .with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    // Before the first bytes have come, which may take seconds.
    bar.tick();
    bar
}

#[cfg(test)]
mod tests {
    use super::wrapped;

    #[test]
    fn long_lines_go_on_below_what_they_explain() {
        assert_eq!(wrapped("ok      kernel: Linux", 80, 8), "ok      kernel: Linux");
        assert_eq!(
            wrapped("slower  io_uring: it is forbidden here", 24, 8),
            "slower  io_uring: it is\n        forbidden here"
        );
    }

    #[test]
    fn a_word_that_is_wider_than_the_terminal_stays_whole() {
        assert_eq!(wrapped("ok  /a/long/path is here", 8, 4), "ok  /a/long/path\n    is\n    here");
    }
}
