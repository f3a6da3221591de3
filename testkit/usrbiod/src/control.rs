//! Commands to a daemon in a process of its own: one a line, each answered by a line.

use crate::Daemon;
use std::io::{self, BufRead, Write};

pub(crate) const READY: &str = "ready";
pub(crate) const OK: &str = "ok";
pub(crate) const BEHAVE: &str = "behave";
pub(crate) const RESTART: &str = "restart";
pub(crate) const REGISTRATIONS: &str = "registrations";
pub(crate) const TRANSFERS: &str = "transfers";

/// Carries out commands until there are no more: then the process that started the daemon has ended.
///
/// `behave FAULT...`, `restart`, `registrations` and `transfers` are answered by `ok` and what was asked for, or by
/// what is wrong.
///
/// # Errors
/// Those of reading and writing.
pub fn serve_commands(daemon: &Daemon, commands: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    writeln!(answers, "{READY}")?;
    answers.flush()?;
    for line in commands.lines() {
        let line = line?;
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match command {
            BEHAVE => rest.parse().map(|faults| {
                daemon.behave(faults);
                String::new()
            }),
            RESTART => daemon.restart().map(|()| String::new()).map_err(|error| error.to_string()),
            REGISTRATIONS => Ok(daemon.registrations().join(" ")),
            TRANSFERS => Ok(daemon.transfers().to_string()),
            _ => Err(format!("{command} is no command")),
        };
        match answer {
            Ok(answer) => writeln!(answers, "{OK} {answer}")?,
            Err(problem) => writeln!(answers, "error {problem}")?,
        }
        answers.flush()?;
    }
    Ok(())
}
