//! One request and its answer.

use super::{Connection, Waiting};
use ::http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use std::{
    io,
    time::{Duration, Instant},
};

/// Longest head of an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most headers of an answer.
const MAX_HEADERS: usize = 100;
/// Longest trailer of a chunked body, in lines.
const MAX_TRAILERS: usize = 100;
/// What brings fewer bytes in this long is given up: another connection may be faster.
const LEAST_BYTES: usize = 16 << 10;
const LEAST_BYTES_IN: Duration = Duration::from_secs(20);
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
    speed: Speed,
}

/// Bytes that came since a time, of a body that must not trickle.
#[derive(Debug)]
struct Speed {
    bytes: usize,
    since: Instant,
}

impl Speed {
    /// Notes that bytes came by `now`.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] if too few have come for too long.
    fn note(&mut self, bytes: usize, now: Instant) -> io::Result<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= LEAST_BYTES {
            *self = Self { bytes: 0, since: now };
            return Ok(());
        }
        let passed = now.saturating_duration_since(self.since);
        if passed < LEAST_BYTES_IN {
            return Ok(());
        }
        let reason = format!("only {} bytes came in {:.0} s", self.bytes, passed.as_secs_f64());
        Err(io::Error::new(io::ErrorKind::TimedOut, reason))
    }
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
/// The system's. [`io::ErrorKind::InvalidData`] if the answer is no HTTP/1.1; [`io::ErrorKind::TimedOut`] if its head is
/// not complete in the time that the caller has.
pub(crate) fn send(
    mut connection: Connection,
    request: &Parts,
    body: &[u8],
    waiting: &Waiting<'_>,
) -> io::Result<Answer> {
    connection.write_all(&head_of(request, body), waiting)?;
    let mut early = Vec::new();
    let (sent, mut has_begun) = (Instant::now(), false);
    loop {
        // A head that comes byte by byte, or after any number of provisional ones, has no more time than another.
        if has_begun && sent.elapsed() >= waiting.patience {
            let reason =
                format!("the answer's head was not complete after {:.1} s", sent.elapsed().as_secs_f64());
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
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
        has_begun = true;
        while let Some((status, headers, end)) = parsed(&early)? {
            if status < 200 {
                early.drain(..end);
                continue;
            }
            let framing = framing(status, &headers)?;
            let closes =
                headers.get(CONNECTION).is_some_and(|own| own.as_bytes().eq_ignore_ascii_case(b"close"));
            let stays_open = !closes && framing != Framing::Close;
            let speed = Speed { bytes: 0, since: Instant::now() };
            let early_start = end;
            return Ok(Answer {
                status,
                headers,
                connection,
                early,
                early_start,
                framing,
                stays_open,
                speed,
            });
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

/// Parses bytes as the head of an answer, as far as the length of its body.
#[cfg(any(test, fuzzing))]
pub(crate) fn head(bytes: &[u8]) -> io::Result<()> {
    parsed(bytes)?.map_or(Ok(()), |(status, headers, _)| framing(status, &headers).map(drop))
}

fn framing(status: u16, headers: &HeaderMap) -> io::Result<Framing> {
    if matches!(status, 204 | 304) {
        return Ok(Framing::Length(0));
    }
    if let Some(encoding) = headers.get(TRANSFER_ENCODING) {
        // Two ends of one body: what reads the other one takes the rest for the next answer.
        if headers.contains_key(CONTENT_LENGTH) {
            return Err(invalid("the answer has a length and chunks"));
        }
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
            Framing::Chunked => 'chunks: loop {
                let line = self.line(waiting)?;
                let digits = line.split(';').next().unwrap_or_default().trim();
                let length =
                    usize::from_str_radix(digits, 16).map_err(|_| invalid("a chunk has no length"))?;
                if length > most - body.len() {
                    return Err(invalid("the body is too long"));
                }
                if length == 0 {
                    for _ in 0..MAX_TRAILERS {
                        if self.line(waiting)?.is_empty() {
                            break 'chunks;
                        }
                    }
                    return Err(invalid("the chunked body has too long a trailer"));
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
            let count = self.connection.read(target, waiting)?;
            self.speed.note(count, Instant::now())?;
            return Ok(count);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Origin;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        sync::atomic::AtomicBool,
        thread,
    };

    /// What is made of an answer with these bytes, after which the server keeps the connection open.
    fn body_of(answer: &'static [u8]) -> io::Result<(Vec<u8>, bool)> {
        body_within(Duration::from_secs(60), answer)
    }

    fn body_within(patience: Duration, answer: &'static [u8]) -> io::Result<(Vec<u8>, bool)> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin =
            Origin { is_tls: false, host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let server = thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            let _ = socket.read(&mut [0; 4096]);
            let _ = socket.write_all(answer);
            let _ = socket.read(&mut [0]);
        });
        let stop = AtomicBool::new(false);
        let waiting = Waiting { stop: &stop, patience };
        let connection = Connection::open(&origin, Duration::from_secs(60), &stop).unwrap();
        let request = ::http::Request::get("http://127.0.0.1/").body(()).unwrap().into_parts().0;
        let body = send(connection, &request, &[], &waiting).and_then(|own| own.into_body(100, &waiting));
        let body = body.map(|(body, connection)| (body, connection.is_some()));
        server.join().unwrap();
        body
    }

    #[test]
    fn a_body_ends_where_its_head_says_or_is_an_error() {
        let whole = body_of(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab").unwrap();
        assert_eq!(whole, (b"ab".to_vec(), true));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n";
        assert_eq!(body_of(chunked).unwrap(), (b"a".to_vec(), true));
        // What follows a body is no answer to the next request.
        let longer =
            body_of(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\n\r\n").unwrap();
        assert_eq!(longer, (b"ab".to_vec(), false));
        for wrong in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n",
        ] {
            assert_eq!(body_of(wrong).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn trailers_and_provisional_answers_without_end_end() {
        let mut trailers = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n".to_vec();
        trailers.extend(b"X: y\r\n".repeat(MAX_TRAILERS + 1));
        assert_eq!(body_of(trailers.leak()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let provisional = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(1000).leak();
        let begun = Instant::now();
        let error = body_within(Duration::from_secs(2), provisional).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_body_that_trickles_is_given_up() {
        let begun = Instant::now();
        let mut speed = Speed { bytes: 0, since: begun };
        let after = |seconds| begun + Duration::from_secs(seconds);
        speed.note(LEAST_BYTES, after(30)).unwrap();
        speed.note(LEAST_BYTES - 1, after(49)).unwrap();
        speed.note(1, after(51)).unwrap();
        speed.note(LEAST_BYTES - 1, after(70)).unwrap();
        assert_eq!(speed.note(0, after(71)).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
