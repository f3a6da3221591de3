//! Why an object could not be read or written, sorted by what the caller can do about it.

use std::{fmt, io, ops::Range};

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation on an object that failed.
#[derive(Debug, thiserror::Error)]
#[error("{url}{}: {problem}", Bytes(range))]
pub struct Error {
    /// The URL of the object, without its query and without secrets.
    pub url: String,
    /// The bytes that were asked for, if it was a read.
    pub range: Option<Range<u64>>,
    /// What went wrong.
    #[source]
    pub problem: Problem,
}

/// What went wrong. Texts hold nothing secret: of what a server says, they have its status and its error code alone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The URL or an option cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// There is no such object.
    #[error("there is no such object ({said})")]
    NotFound {
        /// What the server said.
        said: String,
    },
    /// The object has no bytes.
    #[error("the object is empty")]
    Empty,
    /// The server refuses to show the object.
    #[error("the server denies access ({said}); check the credentials, their permissions, and the region")]
    Denied {
        /// What the server said.
        said: String,
    },
    /// No credentials were found.
    #[error("{0}")]
    Credentials(String),
    /// The object is another one than the one that was opened.
    #[error("the object changed after it was opened: {0}; open it again")]
    Changed(String),
    /// The server did not answer with the bytes that were asked for.
    #[error("the server's answer cannot be used: {0}")]
    WrongAnswer(String),
    /// The server redirects to another place.
    #[error(
        "the server redirects ({said}), and this redirect is not followed; give the URL that it leads to, or for a model on the \
         hub hf://org/model"
    )]
    Redirected {
        /// What the server said.
        said: String,
    },
    /// The bucket is in another region than the one that was asked.
    #[error(
        "the bucket is in region {region} ({said}); set AWS_REGION={region} or the store option region={region}"
    )]
    OtherRegion {
        /// The region that the server says.
        region: String,
        /// What else the server said.
        said: String,
    },
    /// The server gives no strong ETag, so that a change of the object could go unnoticed.
    #[error(
        "the server gives no strong ETag ({said}), so that a change of the object could go unnoticed; the store option \
         unpinned=true compares its length and date instead"
    )]
    NoETag {
        /// What the server said.
        said: String,
    },
    /// The server refuses the request.
    #[error("the server refuses the request ({said})")]
    Refused {
        /// The status of its answer.
        status: u16,
        /// What the server said.
        said: String,
    },
    /// All bytes of the object have come, and are not those that the store has.
    #[error(
        "the bytes that came have the {checksum} {found}, and the store says {expected}; load it again, or, if the \
         store's checksum is wrong, set the store option checksums=off"
    )]
    Damaged {
        /// The name of the checksum, such as `CRC-32C`.
        checksum: &'static str,
        /// What the store says, in base64.
        expected: String,
        /// What the bytes have that came.
        found: String,
    },
    /// Repeated attempts failed.
    #[error("{}{last}", Attempts(*attempts))]
    Unreliable {
        /// How many; 0 if requests of others failed, and none was made for this read.
        attempts: u32,
        /// Why the last one failed.
        last: String,
    },
    /// The answer to the request that writes an object, or completes its upload, did not come or was an error after which either
    /// is possible, and the store does not show whether it did so.
    #[error(
        "it is not known whether the object was replaced: {0}; load it and compare, or save it again: the name stands for the old \
         object or for the whole new one"
    )]
    Doubtful(String),
    /// The store shows the new object, and says a checksum of it that its bytes had not when they were sent.
    #[error("the store has replaced the object, and what it has is damaged: {0}; save it again")]
    StoredDamaged(String),
    /// The answer to a request that begins an upload was lost.
    #[error("{0}; the store may hold an upload without parts until a lifecycle rule of the bucket aborts it")]
    MayBeOpen(String),
    /// An upload that failed could not be aborted.
    #[error(
        "the parts that were uploaded could not be removed ({0}): they are stored, and paid for, until the upload is aborted by \
         hand or by a lifecycle rule of the bucket"
    )]
    LeftOpen(String),
    /// An upload to Azure failed, and blocks of it were sent, which no request removes.
    #[error(
        "the blocks that were sent cannot be removed: the store keeps them, unseen, until the next save to this name, or for a week"
    )]
    BlocksLeft,
    /// No trusted encrypted connection can be made.
    #[error("no trusted connection: {0}")]
    Tls(String),
    /// The caller stopped the operation.
    #[error("the operation was stopped")]
    Stopped,
}

impl Problem {
    /// Returns the kind of system error that comes closest.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Invalid(_) => io::ErrorKind::InvalidInput,
            Self::NotFound { .. } => io::ErrorKind::NotFound,
            Self::Denied { .. } | Self::Credentials(_) => io::ErrorKind::PermissionDenied,
            Self::Unreliable { .. } | Self::Doubtful(_) | Self::LeftOpen(_) | Self::MayBeOpen(_) => {
                io::ErrorKind::TimedOut
            }
            Self::Tls(_) => io::ErrorKind::ConnectionRefused,
            Self::Changed(_)
            | Self::WrongAnswer(_)
            | Self::Redirected { .. }
            | Self::OtherRegion { .. }
            | Self::NoETag { .. }
            | Self::Empty
            | Self::Damaged { .. }
            | Self::StoredDamaged(_)
            | Self::BlocksLeft
            | Self::Refused { .. } => io::ErrorKind::InvalidData,
            Self::Stopped => io::ErrorKind::Other,
        }
    }

    pub(crate) fn of(self, url: &str, range: Option<Range<u64>>) -> Error {
        Error { url: url.to_owned(), range, problem: self }
    }
}

/// The attempts of a read, in the words of an error.
struct Attempts(u32);

impl fmt::Display for Attempts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("the server cannot be asked: "),
            1 => f.write_str("the request failed: "),
            count => write!(f, "{count} attempts failed, the last because "),
        }
    }
}

/// The bytes of a read, in the words of an error.
struct Bytes<'a>(&'a Option<Range<u64>>);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |range| write!(f, ", bytes {}..{}", range.start, range.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_attempts_are_told_as_many_as_there_were() {
        for (attempts, told) in [
            (0, "the server cannot be asked: it is away"),
            (1, "the request failed: it is away"),
            (2, "2 attempts failed, the last because it is away"),
        ] {
            assert_eq!(Problem::Unreliable { attempts, last: "it is away".into() }.to_string(), told);
        }
    }
}
