//! One request and its answer.

use super::{Connection, Waiting};
use ::http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use std::io;

/// Longest head of an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most headers of an answer.
const MAX_HEADERS: usize = 100;
/// Bytes that are read at once of a head: what comes of the body with it is copied.
const HEAD_READ: usize = 4 << 10;

/// The answer to a request. Its body has not been read.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    connection: Connection,
    /// What came with the head, from `early_start` on.
    early: Vec<u8>,
    early_start: usize,
    framing: Framing,
    stays_open: bool,
}

/// How the end of a body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Bytes that are left.
    Length(u64),
    Chunked,
    Close,
}

/// Sends a request and reads the head of its answer.
///
/// # Errors
/// The system's. [`io::ErrorKind::InvalidData`] if the answer is no HTTP/1.1.
pub(crate) fn send(
    mut connection: Connection,
    request: &Parts,
    body: &[u8],
    waiting: &Waiting<'_>,
) -> io::Result<Answer> {
    connection.write_all(&head_of(request, body), waiting)?;
    let mut early = Vec::new();
    loop {
        let before = early.len();
        if before >= MAX_HEAD_BYTES {
            return Err(invalid("the head of the answer is too long"));
        }
        early.resize(before + HEAD_READ, 0);
        let count = connection.read(&mut early[before..], waiting)?;
        early.truncate(before + count);
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
        }
        while let Some((status, headers, end)) = parsed(&early)? {
            if status < 200 {
                early.drain(..end);
                continue;
            }
            let framing = framing(status, &headers)?;
            let closes =
                headers.get(CONNECTION).is_some_and(|own| own.as_bytes().eq_ignore_ascii_case(b"close"));
            let stays_open = !closes && framing != Framing::Close;
            return Ok(Answer { status, headers, connection, early, early_start: end, framing, stays_open });
        }
    }
}

fn head_of(request: &Parts, body: &[u8]) -> Vec<u8> {
    let target = request.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut text = format!("{} {target} HTTP/1.1\r\n", request.method).into_bytes();
    if let (None, Some(authority)) = (request.headers.get(HOST), request.uri.authority()) {
        text.extend_from_slice(format!("host: {authority}\r\n").as_bytes());
    }
    for (name, value) in &request.headers {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            text.extend_from_slice(part);
        }
    }
    if !body.is_empty() {
        text.extend_from_slice(format!("content-length: {}\r\n", body.len()).as_bytes());
    }
    text.extend_from_slice(b"\r\n");
    text.extend_from_slice(body);
    text
}

/// Status, headers and length of a head, if all of it is there.
fn parsed(bytes: &[u8]) -> io::Result<Option<(u16, HeaderMap, usize)>> {
    let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut parsed);
    let end = match response
        .parse(bytes)
        .map_err(|error| invalid(&format!("the answer is no HTTP/1.1: {error}")))?
    {
        httparse::Status::Complete(end) => end,
        httparse::Status::Partial => return Ok(None),
    };
    let mut headers = HeaderMap::with_capacity(response.headers.len());
    for header in response.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(io::Error::other)?;
        headers.append(name, HeaderValue::from_bytes(header.value).map_err(io::Error::other)?);
    }
    Ok(response.code.map(|status| (status, headers, end)))
}

fn framing(status: u16, headers: &HeaderMap) -> io::Result<Framing> {
    if matches!(status, 204 | 304) {
        return Ok(Framing::Length(0));
    }
    if let Some(encoding) = headers.get(TRANSFER_ENCODING) {
        let is_chunked = encoding.as_bytes().eq_ignore_ascii_case(b"chunked");
        return if is_chunked {
            Ok(Framing::Chunked)
        } else {
            Err(invalid("its Transfer-Encoding is not chunked"))
        };
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let Some(length) = lengths.next() else { return Ok(Framing::Close) };
    if lengths.any(|other| other != length) {
        return Err(invalid("the answer has two lengths"));
    }
    let length = length.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let length = length
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| invalid("its Content-Length is no number"))?;
    Ok(Framing::Length(length))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Answer {
    /// The length that the head gives the body.
    pub(crate) fn len(&self) -> Option<u64> {
        match self.framing {
            Framing::Length(length) => Some(length),
            Framing::Chunked | Framing::Close => None,
        }
    }

    /// Fills `target` with the body, whose length is that of `target`, and gives the connection back if it can be used
    /// again. `filled` counts the bytes that came, also of a body that ends early.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::UnexpectedEof`] if the body ends early.
    pub(crate) fn read_into(
        mut self,
        target: &mut [u8],
        filled: &mut usize,
        waiting: &Waiting<'_>,
    ) -> io::Result<Option<Connection>> {
        while *filled < target.len() {
            *filled += self.read(&mut target[*filled..], waiting)?;
        }
        let is_whole = self.early_start == self.early.len() && self.stays_open;
        Ok(is_whole.then_some(self.connection).map(reused))
    }

    /// The whole body, if it has no more than `most` bytes, and the connection if it can be used again.
    ///
    /// # Errors
    /// Those of [`Answer::read_into`]; [`io::ErrorKind::InvalidData`] if the body is longer.
    pub(crate) fn into_body(
        mut self,
        most: usize,
        waiting: &Waiting<'_>,
    ) -> io::Result<(Vec<u8>, Option<Connection>)> {
        let mut body = Vec::new();
        match self.framing {
            Framing::Length(length) => {
                let length = usize::try_from(length).ok().filter(|&length| length <= most);
                body = vec![0; length.ok_or_else(|| invalid("the body is too long"))?];
                let connection = self.read_into(&mut body, &mut 0, waiting)?;
                return Ok((body, connection));
            }
            Framing::Chunked => loop {
                let line = self.line(waiting)?;
                let digits = line.split(';').next().unwrap_or_default().trim();
                let length =
                    usize::from_str_radix(digits, 16).map_err(|_| invalid("a chunk has no length"))?;
                if length > most - body.len() {
                    return Err(invalid("the body is too long"));
                }
                if length == 0 {
                    while !self.line(waiting)?.is_empty() {}
                    break;
                }
                let start = body.len();
                body.resize(start + length, 0);
                let mut filled = start;
                while filled < body.len() {
                    filled += self.read(&mut body[filled..], waiting)?;
                }
                self.line(waiting)?;
            },
            Framing::Close => loop {
                let start = body.len();
                if start > most {
                    return Err(invalid("the body is too long"));
                }
                body.resize(start + HEAD_READ, 0);
                let count = self.read_some(&mut body[start..], waiting)?;
                body.truncate(start + count);
                if count == 0 {
                    break;
                }
            },
        }
        let is_whole = self.early_start == self.early.len() && self.stays_open;
        Ok((body, is_whole.then_some(self.connection).map(reused)))
    }

    /// A line of a chunked body, without its end.
    fn line(&mut self, waiting: &Waiting<'_>) -> io::Result<String> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            if line.len() > HEAD_READ {
                return Err(invalid("a line of the chunked body is too long"));
            }
            let mut byte = [0];
            self.read(&mut byte, waiting)?;
            line.push(byte[0]);
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    /// Reads at least one byte of the body.
    fn read(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        match self.read_some(target, waiting)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the body ended early")),
            count => Ok(count),
        }
    }

    fn read_some(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        let early = &self.early[self.early_start..];
        if early.is_empty() {
            return self.connection.read(target, waiting);
        }
        let count = early.len().min(target.len());
        target[..count].copy_from_slice(&early[..count]);
        self.early_start += count;
        Ok(count)
    }
}

fn reused(mut connection: Connection) -> Connection {
    connection.is_reused = true;
    connection
}
