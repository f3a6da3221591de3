//! Errors as people and scripts see them: a sentence on standard error, and an exit code.

use crate::output;
use hoistway::{Error, plan::PlanError};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library refused.
    Hoistway(Error),
    /// What was found is not what was expected: a line each.
    Different(Vec<String>),
    /// Something on this machine keeps loads from working; the details are printed already.
    Broken,
    /// A process of this command's has failed.
    Told(Told),
    /// Standard output could not be written.
    Output(io::Error),
}

/// An error that another process has had.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) message: String,
    pub(crate) exit_code: u8,
}

impl From<&Error> for Told {
    fn from(error: &Error) -> Self {
        Self { message: error.to_string(), exit_code: exit_code(error) }
    }
}

impl From<Error> for Told {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Hoistway(error)
    }
}

impl Failure {
    /// What else a command has to say, with the exit code for that.
    pub(crate) fn told(message: impl Into<String>, exit_code: u8) -> Self {
        Self::Told(Told { message: message.into(), exit_code })
    }

    pub(crate) fn output(error: impl Into<io::Error>) -> Self {
        Self::Output(error.into())
    }

    /// Prints what happened, and returns the exit code.
    pub(crate) fn report(self) -> u8 {
        let (lines, code) = match self {
            // The reader of our output has seen enough: no error, as for other filters.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
            Self::Output(error) => (vec![format!("cannot write the output: {error}")], 5),
            Self::Different(lines) => (lines, 4),
            Self::Broken => (vec!["loads cannot work here; see above".into()], 1),
            Self::Told(Told { message, exit_code }) => (vec![message], exit_code),
            Self::Hoistway(error) => {
                let code = exit_code(&error);
                (vec![error.to_string()], code)
            }
        };
        for line in lines {
            // If nothing listens, the exit code has to do.
            let _ = writeln!(io::stderr(), "hoistway: {}", output::printable(&line));
        }
        code
    }
}

pub(crate) fn exit_code(error: &Error) -> u8 {
    match error {
        // What the file holds cannot be loaded, whatever is asked for.
        Error::Plan(PlanError::UnknownType { .. } | PlanError::ByteOrder { .. }) => 4,
        Error::InvalidOption { .. } | Error::Plan(_) => 2,
        Error::NotFound { .. } | Error::NoSuchTensor { .. } => 3,
        Error::InvalidFile { .. }
        | Error::InvalidIndex { .. }
        | Error::InvalidManifest { .. }
        | Error::DuplicateTensor { .. }
        | Error::Truncated { .. }
        | Error::Changed { .. }
        | Error::DigestMismatch { .. }
        | Error::ChecksumMismatch { .. } => 4,
        Error::Io { .. } | Error::System { .. } | Error::Device { .. } => 5,
        Error::RouteUnavailable { .. } | Error::DeviceUnavailable { .. } => 6,
        Error::MemoryBudget { .. } | Error::Allocation { .. } => 7,
        _ => 1,
    }
}
