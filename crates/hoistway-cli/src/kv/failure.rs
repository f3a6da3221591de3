//! Errors of the KV store as messages and exit codes.

use crate::failure::{self, Failure};
use hoistway_kv::Error;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::told(error.to_string(), exit_code(error))
    }
}

fn exit_code(error: Error) -> u8 {
    match error {
        Error::InvalidKey { .. } | Error::InvalidOption { .. } | Error::InvalidRequest(_) => 2,
        Error::NotAStore { .. } => 3,
        Error::UnknownFormat { .. } => 4,
        Error::Io { .. } | Error::ReadOnly { .. } => 5,
        Error::RouteUnavailable { .. } => 6,
        Error::Device(error) => failure::exit_code(&error.into()),
        _ => 1,
    }
}
