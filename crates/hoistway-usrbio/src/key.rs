//! The names by which memory is registered in `3fs-virt/iovs`: they carry everything that the daemon must know.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};
use uuid::Uuid;

/// The use of a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The buffer's number, by which transfers name it.
    pub id: Uuid,
    /// Length of the blocks that transfers must not straddle; 0 for the whole buffer.
    pub block_bytes: usize,
    /// The ring's parameters, if it is a ring.
    pub ring: Option<RingKey>,
}

/// The parameters of a ring that the daemon must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingKey {
    /// Reads, or writes.
    pub direction: Direction,
    /// Positive: batches of exactly this size. Zero: all there is. Negative: batches of at most this size.
    pub io_depth: i32,
    /// Which of the daemon's queues.
    pub priority: RingPriority,
    /// Milliseconds that a batch may wait to fill.
    pub timeout_ms: u32,
    /// Bits of the protocol.
    pub flags: u64,
}

/// The direction of a ring: it reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From files into memory.
    #[default]
    Read,
    /// From memory into files.
    Write,
}

/// The daemon's queue that serves a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingPriority {
    /// Before all others.
    High,
    /// Like most.
    #[default]
    Normal,
    /// After all others.
    Low,
}

impl RingPriority {
    /// The link in [`IOVS`](crate::proto::IOVS) that names the semaphore by which the daemon learns of submissions.
    pub fn submit_link(self) -> &'static str {
        match self {
            Self::High => "submit-ios.ph",
            Self::Normal => "submit-ios",
            Self::Low => "submit-ios.pl",
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id.hyphenated())?;
        if self.block_bytes != 0 {
            write!(f, ".b{}", self.block_bytes)?;
        }
        let Some(ring) = &self.ring else { return Ok(()) };
        let direction = match ring.direction {
            Direction::Read => 'r',
            Direction::Write => 'w',
        };
        write!(f, ".{direction}{}", ring.io_depth)?;
        match ring.priority {
            RingPriority::High => f.write_str(".ph")?,
            RingPriority::Normal => {}
            RingPriority::Low => f.write_str(".pl")?,
        }
        if ring.timeout_ms != 0 {
            write!(f, ".t{}", ring.timeout_ms)?;
        }
        if ring.flags != 0 {
            write!(f, ".f{:b}", ring.flags)?;
        }
        Ok(())
    }
}

/// A name that is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not the name of a USRBIO registration")]
pub struct NotAKey;

impl FromStr for Key {
    type Err = NotAKey;

    fn from_str(name: &str) -> Result<Self, NotAKey> {
        let mut parts = name.split('.');
        let id = parts.next().and_then(|id| Uuid::try_parse(id).ok()).ok_or(NotAKey)?;
        let mut key = Self { id, block_bytes: 0, ring: None };
        for part in parts {
            let (kind, value) = part.split_at_checked(1).ok_or(NotAKey)?;
            match (kind, &mut key.ring) {
                ("b", None) => key.block_bytes = parsed(value).filter(|&bytes| bytes > 0).ok_or(NotAKey)?,
                ("r" | "w", ring @ None) => {
                    let direction = if kind == "r" { Direction::Read } else { Direction::Write };
                    let io_depth = parsed(value).ok_or(NotAKey)?;
                    *ring = Some(RingKey {
                        direction,
                        io_depth,
                        priority: RingPriority::Normal,
                        timeout_ms: 0,
                        flags: 0,
                    });
                }
                ("p", Some(ring)) => {
                    ring.priority = match value {
                        "h" => RingPriority::High,
                        "n" => RingPriority::Normal,
                        "l" => RingPriority::Low,
                        _ => return Err(NotAKey),
                    }
                }
                ("t", Some(ring)) => ring.timeout_ms = parsed(value).ok_or(NotAKey)?,
                ("f", Some(ring)) => ring.flags = u64::from_str_radix(value, 2).map_err(|_| NotAKey)?,
                _ => return Err(NotAKey),
            }
        }
        Ok(key)
    }
}

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "6e0b1a1c-53d5-4d8e-9a8e-0a1b2c3d4e5f";

    fn ring(direction: Direction, io_depth: i32) -> RingKey {
        RingKey { direction, io_depth, priority: RingPriority::Normal, timeout_ms: 0, flags: 0 }
    }

    #[test]
    fn names_are_what_the_daemon_expects() {
        let id = Uuid::try_parse(ID).unwrap();
        let cases = [
            (Key { id, block_bytes: 0, ring: None }, String::new()),
            (Key { id, block_bytes: 4096, ring: None }, ".b4096".into()),
            (Key { id, block_bytes: 0, ring: Some(ring(Direction::Read, -1)) }, ".r-1".into()),
            (Key { id, block_bytes: 0, ring: Some(ring(Direction::Write, 0)) }, ".w0".into()),
            (
                Key {
                    id,
                    block_bytes: 0,
                    ring: Some(RingKey {
                        priority: RingPriority::High,
                        timeout_ms: 7,
                        flags: 2,
                        ..ring(Direction::Read, 16)
                    }),
                },
                ".r16.ph.t7.f10".into(),
            ),
        ];
        for (key, suffix) in cases {
            let name = format!("{ID}{suffix}");
            assert_eq!(key.to_string(), name);
            assert_eq!(name.parse(), Ok(key));
        }
    }

    #[test]
    fn other_names_are_no_keys() {
        for name in ["", "submit-ios", "x", &ID[1..], &format!("{ID}.b0"), &format!("{ID}.b-1")] {
            assert_eq!(name.parse::<Key>(), Err(NotAKey), "{name}");
        }
        for suffix in [".", ".t5", ".ph", ".f1", ".rx", ".r1.r1", ".r1.f2", ".r1.pz", ".r1.t-1", ".é"] {
            assert_eq!(format!("{ID}{suffix}").parse::<Key>(), Err(NotAKey), "{suffix}");
        }
    }
}
