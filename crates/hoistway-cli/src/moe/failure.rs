//! Errors about experts as messages and exit codes.

use crate::failure::{self, Failure};
use hoistway_experts::{Error, policy::ShapeError, replay::ReplayError, trace::TraceError};
use std::io;

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        let code = match &error {
            TraceError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => 3,
            TraceError::Io { .. } => 5,
            _ => 4,
        };
        Self::told(error.to_string(), code)
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        let code = match &error {
            ReplayError::NoDecode => 4,
            _ => 2,
        };
        Self::told(error.to_string(), code)
    }
}

impl From<ShapeError> for Failure {
    fn from(error: ShapeError) -> Self {
        Self::told(error.to_string(), 4)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Engine(error) => failure::exit_code(error),
            Error::InvalidOption { .. } => 2,
            Error::InvalidExperts { .. } | Error::InvalidConfig { .. } | Error::InvalidPack { .. } => 4,
            Error::BudgetTooSmall { .. } => 7,
            _ => 1,
        };
        Self::told(error.to_string(), code)
    }
}
