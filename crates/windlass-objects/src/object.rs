//! One object, pinned when it is opened.

use crate::{
    Problem, Result, StoreOptions,
    client::Client,
    http::{Answer, Waiting},
    location::Location,
    pace::Fault,
    pin::{Part, Pin, Tag},
};
use http::header::{IF_MATCH, RANGE};
use std::{
    ops::Range,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

/// Bytes that the first request asks for: the header of most checkpoints is among them.
pub const HEAD_BYTES: usize = 1 << 20;

/// An object that was opened. Bytes are read of the version that it had then, or not at all.
#[derive(Debug)]
pub struct Object {
    location: Location,
    client: Arc<Client>,
    pin: Pin,
    changed: OnceLock<String>,
}

impl Object {
    /// Opens an object by its URL, and returns it with its first [`HEAD_BYTES`].
    ///
    /// # Errors
    /// [`Problem::Invalid`], [`Problem::NotFound`], [`Problem::Denied`], [`Problem::Credentials`], [`Problem::NoETag`],
    /// [`Problem::WrongAnswer`] if the server sends no ranges, and others.
    pub fn open_with_head(url: &str, options: &StoreOptions) -> Result<(Self, Vec<u8>)> {
        let options = options.resolved(variable);
        let failed = |problem: Problem| problem.of(&crate::shown(url), None);
        let location = Location::parse(url, &options).map_err(failed)?;
        let client = Client::of(&location, &options);
        let stop = AtomicBool::new(false);
        let first = client.pace().persist(&stop, |waiting| first(&client, &location, waiting));
        let (pin, head) = first.map_err(failed)?;
        if let (Tag::Date(date), false) = (&pin.tag, options.unpinned) {
            let said = date.as_ref().map_or("and no date", |_| "but a date");
            return Err(failed(Problem::NoETag { said: said.into() }));
        }
        Ok((Self { location, client, pin, changed: OnceLock::new() }, head))
    }

    /// Opens an object by its URL.
    ///
    /// # Errors
    /// Those of [`Object::open_with_head`].
    pub fn open(url: &str, options: &StoreOptions) -> Result<Self> {
        Self::open_with_head(url, options).map(|(object, _)| object)
    }

    /// Returns the URL without its query.
    pub fn url(&self) -> &str {
        &self.location.shown
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty object is no special case")]
    pub fn len(&self) -> u64 {
        self.pin.len
    }

    /// Returns the server that is asked, such as `https://storage.example:9000`.
    pub fn server(&self) -> String {
        self.client.origin().url()
    }

    /// Returns whether an ETag tells its version, rather than length and date.
    pub fn has_etag(&self) -> bool {
        matches!(self.pin.tag, Tag::Strong(_))
    }

    /// Returns what is different, once an answer has shown that the object changed.
    pub fn change(&self) -> Option<&str> {
        self.changed.get().map(String::as_str)
    }

    /// Fills `target` with the bytes from `offset` on, and returns how many there were: fewer at the end of the object. Waits,
    /// and tries again what may succeed. Ends soon after `stop` is set. Of a read that fails, `target` may have any part.
    ///
    /// # Errors
    /// [`Problem::Changed`], [`Problem::WrongAnswer`], [`Problem::Unreliable`] and others.
    pub fn read(&self, offset: u64, target: &mut [u8], stop: &AtomicBool) -> Result<usize> {
        let left = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = left.min(target.len());
        let target = &mut target[..len];
        let mut filled = 0;
        if target.is_empty() {
            return Ok(0);
        }
        let read = self.client.pace().persist(stop, |waiting| {
            let before = filled;
            let start = offset + before as u64;
            let range = start..offset + target.len() as u64;
            let result = self.attempt(range, &mut target[before..], &mut filled, waiting);
            result.map_err(|fault| match fault {
                Fault::Again { why, busy, .. } => Fault::Again { why, busy, progressed: filled > before },
                fault => fault,
            })
        });
        read.map_err(|problem| {
            if let Problem::Changed(change) = &problem {
                let _ = self.changed.set(change.clone());
            }
            problem.of(self.url(), Some(offset + filled as u64..offset + len as u64))
        })?;
        Ok(len)
    }

    /// One request for `range`. Adds the bytes that came to `filled`.
    fn attempt(
        &self,
        range: Range<u64>,
        target: &mut [u8],
        filled: &mut usize,
        waiting: &Waiting<'_>,
    ) -> Result<(), Fault> {
        let mut headers = vec![(RANGE, format!("bytes={}-{}", range.start, range.end - 1))];
        if let Tag::Strong(etag) = &self.pin.tag {
            headers.push((IF_MATCH, etag.clone()));
        }
        let answer = self.client.get(&self.location.target, &headers, waiting).map_err(as_change)?;
        let part = part_of(&answer)?;
        self.pin.check(&part.pin)?;
        if part.range != range {
            let Range { start, end } = part.range;
            let what = format!("206 with bytes {start}..{end} for bytes {}..{}", range.start, range.end);
            return Err(Problem::WrongAnswer(what).into());
        }
        body(&self.client, answer, target, filled, waiting)
    }
}

/// The version of an object, and its first bytes.
fn first(client: &Client, location: &Location, waiting: &Waiting<'_>) -> Result<(Pin, Vec<u8>), Fault> {
    let headers = [(RANGE, format!("bytes=0-{}", HEAD_BYTES - 1))];
    let answer = client.get(&location.target, &headers, waiting).map_err(|fault| match fault {
        Fault::Final(Problem::Refused { status: 416, .. }) => {
            Problem::Invalid("the object is empty".into()).into()
        }
        fault => fault,
    })?;
    let part = part_of(&answer)?;
    let expected = part.pin.len.min(HEAD_BYTES as u64);
    if part.range != (0..expected) {
        let Range { start, end } = part.range;
        return Err(
            Problem::WrongAnswer(format!("206 with bytes {start}..{end} for bytes 0..{expected}")).into()
        );
    }
    let mut head = vec![0; expected as usize];
    body(client, answer, &mut head, &mut 0, waiting)?;
    Ok((part.pin, head))
}

/// What an answer to a request for a range says of its body.
fn part_of(answer: &Answer) -> Result<Part, Problem> {
    if answer.status != 206 {
        let what = format!("status {} for a range: the server sends whole objects alone", answer.status);
        return Err(Problem::WrongAnswer(what));
    }
    let part = Part::of(&answer.headers)?;
    let expected = part.range.end - part.range.start;
    match answer.len() {
        Some(len) if len == expected => Ok(part),
        Some(len) => Err(Problem::WrongAnswer(format!("206 of {expected} bytes with a body of {len}"))),
        None => Err(Problem::WrongAnswer("206 without Content-Length".into())),
    }
}

/// Reads a body to its place.
fn body(
    client: &Client,
    answer: Answer,
    target: &mut [u8],
    filled: &mut usize,
    waiting: &Waiting<'_>,
) -> Result<(), Fault> {
    let mut came = 0;
    let result = answer.read_into(target, &mut came, waiting);
    *filled += came;
    client.keep(result.map_err(|error| client.fault(error, came > 0, waiting))?);
    Ok(())
}

/// What a refusal means for an object that was there.
fn as_change(fault: Fault) -> Fault {
    match fault {
        Fault::Final(Problem::NotFound { said }) => Problem::Changed(format!("it is gone ({said})")).into(),
        Fault::Final(Problem::Refused { status: 412, said }) => {
            Problem::Changed(format!("the server holds another version ({said})")).into()
        }
        Fault::Final(Problem::Refused { status: 416, said }) => {
            Problem::Changed(format!("it has become shorter ({said})")).into()
        }
        fault => fault,
    }
}

/// A variable of the environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
