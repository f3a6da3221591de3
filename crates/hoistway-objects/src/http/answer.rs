//! One request and its answer.

use super::{Connection, Waiting};
use crate::policy::{MeanSpeed, Speed};
use ::http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING},
    request::Parts,
};
use std::{io, net::SocketAddr, time::Instant};

/// Longest head of an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most headers of an answer.
const MAX_HEADERS: usize = 100;
/// Longest trailer of a chunked body, in lines.
const MAX_TRAILERS: usize = 100;
/// Bytes that are read at once of a head: what comes of the body with it is copied.
const HEAD_READ: usize = 4 << 10;
/// Bytes that are read at once of a chunked body, unless more of the chunk are left.
const CHUNK_READ: usize = 32 << 10;
/// Bytes of a body that are written between two looks at its speed.
const BODY_WRITE: usize = 256 << 10;

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
    /// Whether the end of the body has come.
    is_complete: bool,
    stays_open: bool,
    sent: Instant,
    speed: Speed,
    /// Whether the body may come at any speed.
    may_be_slow: bool,
    /// Why the body is given up: told once the bytes that came are counted.
    too_slow: Option<TooSlow>,
}

/// How the end of a body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Bytes that are left.
    Length(u64),
    /// Bytes that are left of a chunk, and whether it is the first.
    Chunked {
        left: u64,
        is_first: bool,
    },
    Close,
}

/// A request whose answer has not come.
#[derive(Debug)]
pub(crate) struct Pending {
    connection: Connection,
    /// Whether the answer has a head alone, whatever that says of a body.
    is_head: bool,
    early: Vec<u8>,
    has_begun: bool,
    sent: Instant,
    /// When the last byte came.
    last: Instant,
}

/// Sends a request and reads the head of its answer.
///
/// # Errors
/// The system's. [`io::ErrorKind::InvalidData`] if the answer is no HTTP/1.1; [`io::ErrorKind::TimedOut`] if its head is
/// not complete in the time that the caller has.
pub(crate) fn send(
    connection: Connection,
    request: &Parts,
    body: &[u8],
    waiting: &Waiting<'_>,
) -> io::Result<Answer> {
    let mut pending = Pending::send(connection, request, body, waiting)?;
    loop {
        pending = match pending.advance(waiting)? {
            Ok(answer) => return Ok(answer),
            Err(pending) => pending,
        };
    }
}

impl Pending {
    /// Sends a request.
    pub(crate) fn send(
        mut connection: Connection,
        request: &Parts,
        body: &[u8],
        waiting: &Waiting<'_>,
    ) -> io::Result<Self> {
        let mut head = head_of(request, body.len() as u64);
        head.extend_from_slice(body);
        connection.write_all(&head, waiting)?;
        Ok(Self::sent_on(connection, request))
    }

    fn sent_on(connection: Connection, request: &Parts) -> Self {
        let sent = Instant::now();
        let is_head = request.method == Method::HEAD;
        Self { connection, is_head, early: Vec::new(), has_begun: false, sent, last: sent }
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether some of the answer has come. The rest may be there too, decrypted.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// When it was sent.
    pub(crate) fn sent(&self) -> Instant {
        self.sent
    }

    /// Reads what has come of the answer, or waits a tick for it. Returns itself if the head is not complete.
    ///
    /// # Errors
    /// Those of [`send`].
    pub(crate) fn advance(mut self, waiting: &Waiting<'_>) -> io::Result<Result<Answer, Self>> {
        if waiting.is_stopped() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let before = self.early.len();
        // A head that comes byte by byte, or after any number of provisional ones, has no more time than another.
        if self.has_begun && self.sent.elapsed() >= waiting.patience {
            return Err(timed_out(format!(
                "the answer's head was not complete after {:.1} s",
                self.sent.elapsed().as_secs_f64()
            )));
        }
        if before >= MAX_HEAD_BYTES {
            return Err(invalid("the head of the answer is too long"));
        }
        self.early.resize(before + HEAD_READ, 0);
        let count = self.connection.read_soon(&mut self.early[before..])?;
        self.early.truncate(before + count.unwrap_or_default());
        match count {
            None if self.last.elapsed() >= waiting.patience => {
                let waited = waiting.patience.as_secs_f64();
                return Err(timed_out(format!("no byte came in {waited:.1} s")));
            }
            None => return Ok(Err(self)),
            Some(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
            }
            Some(_) => (self.has_begun, self.last) = (true, Instant::now()),
        }
        while let Some((status, headers, end)) = parsed(&self.early)? {
            if status < 200 {
                self.early.drain(..end);
                continue;
            }
            let framing = if self.is_head { Framing::Length(0) } else { framing(status, &headers)? };
            let closes =
                headers.get(CONNECTION).is_some_and(|own| own.as_bytes().eq_ignore_ascii_case(b"close"));
            let stays_open = !closes && framing != Framing::Close;
            let Self { connection, early, sent, .. } = self;
            let (speed, early_start) = (Speed::new(Instant::now()), end);
            return Ok(Ok(Answer {
                status,
                headers,
                connection,
                early,
                early_start,
                framing,
                is_complete: framing == Framing::Length(0),
                stays_open,
                sent,
                speed,
                may_be_slow: false,
                too_slow: None,
            }));
        }
        Ok(Err(self))
    }
}

fn timed_out(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, reason)
}

/// What was sent of a request with a body.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    /// Bytes of the body that the system has taken.
    pub(crate) bytes: u64,
    /// Whether the server may have all of it, so that it may do what it was asked.
    pub(crate) may_be_whole: bool,
}

/// Sends a request whose body lies in several pieces of memory, and reads the head of its answer. Waits in the first way until
/// the server may have the whole request, and in the second one from then on.
///
/// # Errors
/// Those of [`send`]; [`io::ErrorKind::TimedOut`] also if the server takes the body too slowly.
pub(crate) fn send_pieces(
    mut connection: Connection,
    request: &Parts,
    body: &[&[u8]],
    sent: &mut Sent,
    (sending, waiting): (&Waiting<'_>, &Waiting<'_>),
) -> io::Result<Answer> {
    let written = write_request(&mut connection, request, body, sent, (sending, waiting));
    let mut pending = Pending::sent_on(connection, request);
    if let Err(error) = written {
        let has_left = matches!(
            error.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted
        );
        // A server that refuses a request may leave, or read no more, before it has the body, and its answer may have come.
        return match pending.advance(waiting) {
            Ok(Ok(answer)) if has_left || answer.status >= 300 => Ok(Answer { stays_open: false, ..answer }),
            _ => Err(error),
        };
    }
    loop {
        pending = match pending.advance(waiting)? {
            Ok(answer) => return Ok(answer),
            Err(pending) => pending,
        };
    }
}

fn write_request(
    connection: &mut Connection,
    request: &Parts,
    body: &[&[u8]],
    sent: &mut Sent,
    (sending, waiting): (&Waiting<'_>, &Waiting<'_>),
) -> io::Result<()> {
    let len = body.iter().map(|piece| piece.len() as u64).sum();
    let begun = Instant::now();
    let mut speed = Speed::new(begun);
    sent.may_be_whole = len == 0;
    connection.write_all(&head_of(request, len), if sent.may_be_whole { waiting } else { sending })?;
    for part in body.iter().flat_map(|piece| piece.chunks(BODY_WRITE)) {
        if sending.is_stopped() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        sent.may_be_whole = sent.bytes + part.len() as u64 == len;
        connection.write_all(part, if sent.may_be_whole { waiting } else { sending })?;
        sent.bytes += part.len() as u64;
        // How fast other bodies come or go says nothing of this one: only one that hardly moves is given up.
        if speed.came(part.len() as u64, Instant::now(), &MeanSpeed::default()).is_err() {
            let seconds = begun.elapsed().as_secs_f64();
            let sent = sent.bytes;
            return Err(timed_out(format!(
                "the server takes too little: {sent} of {len} bytes in {seconds:.0} s"
            )));
        }
    }
    Ok(())
}

fn head_of(request: &Parts, body_len: u64) -> Vec<u8> {
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
    // A method that may have a body says so also of an empty one.
    let is_said = request.headers.contains_key(CONTENT_LENGTH);
    if !is_said && (body_len > 0 || matches!(request.method, Method::POST | Method::PUT)) {
        text.extend_from_slice(format!("content-length: {body_len}\r\n").as_bytes());
    }
    text.extend_from_slice(b"\r\n");
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
            Ok(Framing::Chunked { left: 0, is_first: true })
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
    /// The address that answers: that of the proxy, if there is one.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.connection.peer()
    }

    /// The length that the head gives the body.
    pub(crate) fn len(&self) -> Option<u64> {
        match self.framing {
            Framing::Length(length) => Some(length),
            Framing::Chunked { .. } | Framing::Close => None,
        }
    }

    /// Whether the end of the body is that of the connection.
    pub(crate) fn ends_with_connection(&self) -> bool {
        self.framing == Framing::Close
    }

    /// Has its body come at any speed: what sends it works meanwhile.
    pub(crate) fn at_any_speed(self) -> Self {
        Self { may_be_slow: true, ..self }
    }

    /// Whether the answer came on a connection that had carried another.
    pub(crate) fn was_reused(&self) -> bool {
        self.connection.is_reused
    }

    /// Fills `target` with the body, whose length is that of `target`, and gives the connection back if it can be used
    /// again. `filled` counts the bytes that came, also of a body that ends early, and `came` is called with them, in their order.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::UnexpectedEof`] if the body ends early; [`io::ErrorKind::TimedOut`] if it comes too
    /// slowly; [`io::ErrorKind::InvalidData`] if it is longer.
    pub(crate) fn read_into(
        mut self,
        target: &mut [u8],
        filled: &mut usize,
        came: &mut dyn FnMut(&[u8]),
        waiting: &Waiting<'_>,
    ) -> io::Result<Option<Connection>> {
        while *filled < target.len() {
            match self.read(&mut target[*filled..], waiting)? {
                0 => return Err(ended_early()),
                count => {
                    came(&target[*filled..][..count]);
                    *filled += count;
                }
            }
        }
        self.speed.ended(*filled as u64, self.sent, Instant::now(), waiting.mean_speed);
        if let Framing::Chunked { .. } = self.framing
            && self.read(&mut [0], waiting)? > 0
        {
            return Err(invalid("the chunked body is longer than its range"));
        }
        Ok(self.into_connection())
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
        let too_long = || invalid("the body is too long");
        if self.len().is_some_and(|len| len > most as u64) {
            return Err(too_long());
        }
        let mut body = Vec::new();
        while !self.is_complete {
            let start = body.len();
            let next = self.len().map_or(HEAD_READ, |left| left as usize);
            body.resize(start + next, 0);
            let count = self.read(&mut body[start..], waiting)?;
            body.truncate(start + count);
            if body.len() > most {
                return Err(too_long());
            }
        }
        Ok((body, self.into_connection()))
    }

    /// The connection, if it can carry another request.
    fn into_connection(self) -> Option<Connection> {
        let is_whole = self.is_complete && self.early_start == self.early.len() && self.stays_open;
        is_whole.then_some(self.connection).map(reused)
    }

    /// Reads some of the body. Returns 0 at its end.
    fn read(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        if self.is_complete || target.is_empty() {
            return Ok(0);
        }
        match self.framing {
            Framing::Close => {
                let count = self.read_raw(target, waiting)?;
                self.is_complete = count == 0;
                Ok(count)
            }
            Framing::Length(left) => {
                let most = usize::try_from(left).map_or(target.len(), |left| left.min(target.len()));
                let count = self.read_raw(&mut target[..most], waiting)?;
                if count == 0 {
                    return Err(ended_early());
                }
                self.framing = Framing::Length(left - count as u64);
                self.is_complete = left == count as u64;
                Ok(count)
            }
            Framing::Chunked { left: 0, is_first } => {
                if !is_first && !self.line(waiting)?.is_empty() {
                    return Err(invalid("a chunk is longer than it says"));
                }
                let line = self.line(waiting)?;
                let digits = line.split(';').next().unwrap_or_default().trim();
                let left = u64::from_str_radix(digits, 16).map_err(|_| invalid("a chunk has no length"))?;
                self.framing = Framing::Chunked { left, is_first: false };
                if left > 0 {
                    return self.read(target, waiting);
                }
                for _ in 0..MAX_TRAILERS {
                    if self.line(waiting)?.is_empty() {
                        self.is_complete = true;
                        return Ok(0);
                    }
                }
                Err(invalid("the chunked body has too long a trailer"))
            }
            Framing::Chunked { left, is_first } => {
                let most = usize::try_from(left).map_or(target.len(), |left| left.min(target.len()));
                if most < CHUNK_READ {
                    self.refill(waiting)?;
                }
                let count = self.read_raw(&mut target[..most], waiting)?;
                if count == 0 {
                    return Err(ended_early());
                }
                self.framing = Framing::Chunked { left: left - count as u64, is_first };
                Ok(count)
            }
        }
    }

    /// A line of a chunked body, without its end.
    fn line(&mut self, waiting: &Waiting<'_>) -> io::Result<String> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            if line.len() > HEAD_READ {
                return Err(invalid("a line of the chunked body is too long"));
            }
            self.refill(waiting)?;
            let byte = self.early.get(self.early_start).ok_or_else(ended_early)?;
            line.push(*byte);
            self.early_start += 1;
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    /// Has bytes that were read ahead, unless the connection ended.
    fn refill(&mut self, waiting: &Waiting<'_>) -> io::Result<()> {
        if self.early_start < self.early.len() {
            return Ok(());
        }
        let mut bytes = std::mem::take(&mut self.early);
        bytes.resize(CHUNK_READ, 0);
        self.early_start = 0;
        let count = self.receive(&mut bytes, waiting)?;
        bytes.truncate(count);
        self.early = bytes;
        Ok(())
    }

    /// Reads what was read ahead, or else from the connection. Returns 0 at its end.
    fn read_raw(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        let early = &self.early[self.early_start..];
        if early.is_empty() {
            return self.receive(target, waiting);
        }
        let count = early.len().min(target.len());
        target[..count].copy_from_slice(&early[..count]);
        self.early_start += count;
        Ok(count)
    }

    fn receive(&mut self, target: &mut [u8], waiting: &Waiting<'_>) -> io::Result<usize> {
        if let Some(reason) = self.too_slow.take() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        let count = self.connection.read(target, waiting)?;
        if !self.may_be_slow {
            let noted = self.speed.came(count as u64, Instant::now(), waiting.mean_speed);
            self.too_slow = noted.err().map(TooSlow);
        }
        Ok(count)
    }
}

/// Why a body is given up that comes too slowly.
#[derive(Debug)]
pub(crate) struct TooSlow(String);

impl std::fmt::Display for TooSlow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TooSlow {}

fn ended_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the body ended early")
}

fn reused(mut connection: Connection) -> Connection {
    connection.is_reused = true;
    connection
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{End, Network, Origin};
    use std::{
        io::{Read, Write},
        net::TcpListener,
        sync::atomic::AtomicBool,
        thread,
        time::Duration,
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
        let mean_speed = MeanSpeed::default();
        let waiting =
            Waiting { stop: &stop, patience, is_new: false, mean_speed: &mean_speed, end: End::default() };
        let connection =
            Connection::open(&origin, &Network::default(), Duration::from_secs(60), &stop).unwrap();
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
    fn provisional_answers_that_keep_coming_are_waited_for_no_longer_than_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let origin = Origin { is_tls: false, host: "127.0.0.1".into(), port };
        let server = thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            let _ = socket.read(&mut [0; 4096]);
            // Until the client has left.
            while socket.write_all(b"HTTP/1.1 102 Processing\r\n\r\n").is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let (stop, mean_speed) = (AtomicBool::new(false), MeanSpeed::default());
        let patience = Duration::from_secs(1);
        let waiting =
            Waiting { stop: &stop, patience, is_new: false, mean_speed: &mean_speed, end: End::default() };
        let connection =
            Connection::open(&origin, &Network::default(), Duration::from_secs(60), &stop).unwrap();
        let request = ::http::Request::get("http://127.0.0.1/").body(()).unwrap().into_parts().0;
        let error = send(connection, &request, &[], &waiting).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        server.join().unwrap();
    }

    #[test]
    fn a_refusal_is_taken_from_a_server_that_reads_no_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin =
            Origin { is_tls: false, host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let (stop, mean_speed) = (AtomicBool::new(false), MeanSpeed::default());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut socket = listener.accept().unwrap().0;
                socket.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n").unwrap();
                // Open until the client, which sends more than the system holds, has its answer.
                let _ = ended.recv();
            });
            let patience = Duration::from_secs(1);
            let waiting = Waiting {
                stop: &stop,
                patience,
                is_new: false,
                mean_speed: &mean_speed,
                end: End::default(),
            };
            let connection =
                Connection::open(&origin, &Network::default(), Duration::from_secs(60), &stop).unwrap();
            let request = ::http::Request::put("http://127.0.0.1/").body(()).unwrap().into_parts().0;
            let body = vec![0; 64 << 20];
            let mut sent = Sent::default();
            let answer = send_pieces(connection, &request, &[&body], &mut sent, (&waiting, &waiting));
            drop(end);
            assert_eq!(answer.unwrap().status, 403);
            assert!(!sent.may_be_whole);
        });
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
}
