//! Lines of text with their numbers, none longer than a limit.
#![forbid(unsafe_code)]

use super::{TraceError, TraceProblem};
use std::io::{BufRead, Read};

/// Bytes of the longest line: that of a model of 4096 layers.
const MAX_LINE_BYTES: usize = 1 << 20;

/// The lines of an input. Empty ones are left out, and counted.
pub(super) struct Lines<'a, R> {
    name: &'a str,
    input: R,
    buffer: Vec<u8>,
    number: u32,
}

impl<'a, R: BufRead> Lines<'a, R> {
    pub(super) fn new(name: &'a str, input: R) -> Self {
        Self { name, input, buffer: Vec::new(), number: 0 }
    }

    /// Returns the next line without its end, with its number from 1, or `None` at the end of the input.
    pub(super) fn next(&mut self) -> Result<Option<(u32, &str)>, TraceError> {
        loop {
            self.buffer.clear();
            self.number = self.number.saturating_add(1);
            let read =
                self.input.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut self.buffer);
            let read = read.map_err(|source| TraceError::Io {
                operation: "reading",
                name: self.name.to_owned(),
                source,
            })?;
            if read == 0 {
                return Ok(None);
            }
            if read > MAX_LINE_BYTES {
                return Err(self.invalid(TraceProblem::LongLine { limit_bytes: MAX_LINE_BYTES }));
            }
            if !self.buffer.trim_ascii().is_empty() {
                break;
            }
        }
        let (name, number) = (self.name, self.number);
        match std::str::from_utf8(self.buffer.trim_ascii()) {
            Ok(text) => Ok(Some((number, text))),
            Err(_) => {
                let line = Some(number.into());
                Err(TraceError::Invalid { name: name.to_owned(), line, problem: TraceProblem::NotText })
            }
        }
    }

    /// Says what is wrong with the line that was returned last.
    pub(super) fn invalid(&self, problem: TraceProblem) -> TraceError {
        TraceError::Invalid { name: self.name.to_owned(), line: Some(self.number.into()), problem }
    }
}
