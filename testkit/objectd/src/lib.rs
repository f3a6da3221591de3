//! An object store in memory, for tests: ranges, ETags, preconditions and listings as S3, Google or Azure have them, by path
//! style, and models as the hub of Hugging Face has them. It fails on demand. Signatures are recorded, not checked.
#![forbid(unsafe_code)]

mod blocks;
mod checksums;
mod faults;
mod hub;
mod listing;
mod request;
mod stream;
mod uploads;

pub use checksums::Checksums;
pub use faults::{Fault, Faults};
pub use request::Request;
pub use uploads::{Step, WriteFault};

use checksums::Digests;
use percent_encoding::percent_decode_str;
use rustls::ServerConfig;
use std::{
    collections::BTreeMap,
    io::{self, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use stream::Stream;

/// A server on a free port of this machine. It stops when it is dropped.
#[derive(Debug)]
pub struct Server {
    state: Arc<State>,
    scheme: &'static str,
    port: u16,
}

#[derive(Debug, Default)]
struct State {
    objects: Mutex<BTreeMap<String, Arc<Object>>>,
    /// What goes wrong, and how many requests might have.
    faults: Mutex<(Faults, usize)>,
    requests: Mutex<Vec<Request>>,
    connections: Mutex<Vec<TcpStream>>,
    opened: AtomicUsize,
    most_in_flight: AtomicUsize,
    in_flight: AtomicUsize,
    is_over: AtomicBool,
    /// Answers with longer bodies wait.
    longest_answer: Mutex<Option<usize>>,
    /// How often connections were forgotten. Older ones are dead: what comes on them is not answered.
    forgotten: AtomicUsize,
    /// Requests that came on dead connections.
    to_the_dead: AtomicUsize,
    /// Whether it closes every connection at once, as while a program restarts behind a balancer.
    is_away: AtomicBool,
    dialect: Mutex<Dialect>,
    checksums: Mutex<Checksums>,
    heads: Mutex<Heads>,
    /// The key that is refused.
    refused_key: Mutex<Option<String>>,
    heads_answered: AtomicUsize,
    generations: AtomicUsize,
    models: Mutex<BTreeMap<String, hub::Model>>,
    /// The new names of models.
    renamed: Mutex<BTreeMap<String, String>>,
    /// Where the hub leads to, and the token that it demands.
    leads_to: Mutex<Option<(String, Arc<State>)>>,
    token: Mutex<Option<String>>,
    /// Where requests for a path are redirected to: a server and a path.
    redirects: Mutex<BTreeMap<String, Redirect>>,
    /// The region of all buckets, and how requests are refused that are signed for another one.
    region: Mutex<Option<(String, WrongRegion)>>,
    /// How many signatures have expired of those by which a hub leads here.
    expired: AtomicUsize,
    /// The date that answers have, if any.
    date: Mutex<Option<String>>,
    uploads: Mutex<uploads::Uploads>,
}

/// Where a redirect leads: the URL of a server, a path there, and that server.
type Redirect = (String, String, Arc<State>);

/// Whose headers and listings a server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Those of S3.
    #[default]
    S3,
    /// Those of Google Cloud Storage: objects have generations.
    Google,
    /// Those of Azure: the first part of a path is the account.
    Azure,
}

/// What becomes of a HEAD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Heads {
    /// An answer.
    #[default]
    Answer,
    /// A refusal with this status.
    Refuse(u16),
    /// No answer.
    Hang,
    /// No answer until they are answered in another way.
    Hold,
}

/// What a server says to requests that are signed for another region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrongRegion {
    /// A redirect that leads nowhere, with the region in a header, as AWS does.
    Redirect,
    /// That the signature is wrong, with the region in a header, as AWS does.
    Malformed,
    /// The same with the region in the text of the error alone, as MinIO does.
    InText,
}

#[derive(Debug)]
struct Object {
    bytes: Vec<u8>,
    etag: String,
    generation: usize,
    /// The commit of a file of a hub.
    commit: Option<String>,
    /// Whether it was made of blocks: Azure has no checksum of it then.
    is_of_blocks: bool,
    digests: Digests,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// The system's.
    pub fn start() -> io::Result<Self> {
        Self::serving(None)
    }

    /// Starts a server that encrypts, with a certificate whose root is [`Server::ROOT`].
    ///
    /// # Errors
    /// The system's.
    pub fn start_tls() -> io::Result<Self> {
        Self::serving(Some(stream::config()?))
    }

    /// The file of the root that the certificate of [`Server::start_tls`] has.
    pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/certificates/root.pem");

    fn serving(tls: Option<Arc<ServerConfig>>) -> io::Result<Self> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let state = Arc::new(State::default());
        let shared = state.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                if shared.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(socket), shared, tls) = (socket, shared.clone(), tls.clone()) else { continue };
                if shared.is_away.load(Ordering::Relaxed) {
                    continue;
                }
                shared.opened.fetch_add(1, Ordering::Relaxed);
                // Without a thread the connection is closed; those that are open go on.
                let _ = thread::Builder::new().spawn(move || shared.serve(socket, tls.as_ref()));
            }
        });
        Ok(Self { state, scheme, port })
    }

    /// Its URL, such as `http://127.0.0.1:9000`.
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    /// Has it speak so from now on.
    pub fn speak(&self, dialect: Dialect) {
        *lock(&self.state.dialect) = dialect;
    }

    /// Says what checksums it has from now on.
    pub fn say_checksums(&self, checksums: Checksums) {
        *lock(&self.state.checksums) = checksums;
    }

    /// Says what becomes of a HEAD from now on.
    pub fn answer_heads(&self, heads: Heads) {
        *lock(&self.state.heads) = heads;
    }

    /// Refuses requests that are signed with this key from now on.
    pub fn refuse_key(&self, id: &str) {
        *lock(&self.state.refused_key) = Some(id.to_owned());
    }

    /// How many HEADs were answered.
    pub fn heads_answered(&self) -> usize {
        self.state.heads_answered.load(Ordering::Relaxed)
    }

    /// Puts an object at a path, such as `bucket/key`, in place of what was there.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        let etag = format!("\"{}\"", &blake3::hash(bytes).to_hex()[..32]);
        self.state.put(path, bytes.to_vec(), etag);
    }

    /// Puts an object with an ETag of the caller's. A path with a query, such as `get?file=1`, is of requests with that query
    /// alone.
    pub fn put_tagged(&self, path: &str, bytes: impl Into<Vec<u8>>, etag: &str) {
        self.state.put(path, bytes.into(), etag.to_owned());
    }

    /// Says which region its buckets are in, and what becomes of requests for another one.
    pub fn lie_in(&self, region: &str, otherwise: WrongRegion) {
        *lock(&self.state.region) = Some((region.to_owned(), otherwise));
    }

    /// Has answers say this date that are objects, parts of them, or denials.
    pub fn say_date(&self, date: &str) {
        *lock(&self.state.date) = Some(date.to_owned());
    }

    /// The bytes of the object at a path.
    pub fn object(&self, path: &str) -> Option<Vec<u8>> {
        lock(&self.state.objects).get(path).map(|object| object.bytes.clone())
    }

    /// The paths of the uploads that were begun, and neither completed nor aborted; those of blobs with blocks that no list has.
    pub fn open_uploads(&self) -> Vec<String> {
        lock(&self.state.uploads).open_paths()
    }

    /// Has the next `count` requests of a step of an upload fail, from now on; no step else.
    pub fn fail_writes(&self, step: Step, count: usize, fault: WriteFault) {
        lock(&self.state.uploads).fail(step, count, fault);
    }

    /// The same after the failures that were asked for before.
    pub fn then_fail_writes(&self, step: Step, count: usize, fault: WriteFault) {
        lock(&self.state.uploads).then_fail(step, count, fault);
    }

    /// How many requests of a step came whole so far, with their bodies.
    pub fn received(&self, step: Step) -> usize {
        lock(&self.state.uploads).received(step)
    }

    /// Removes an object.
    pub fn remove(&self, path: &str) {
        lock(&self.state.objects).remove(path);
    }

    /// Has it fail so from now on.
    pub fn fail(&self, faults: Faults) {
        *lock(&self.state.faults) = (faults, 0);
    }

    /// The requests since this was asked last.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut *lock(&self.state.requests))
    }

    /// How many connections were made to it.
    pub fn connections(&self) -> usize {
        self.state.opened.load(Ordering::Relaxed)
    }

    /// The most requests that it answered at the same time.
    pub fn most_in_flight(&self) -> usize {
        self.state.most_in_flight.load(Ordering::Relaxed)
    }

    /// Has it redirect requests for a path to an object of another server's. [`Server::expire`] of that one has the URL that it
    /// gave expire.
    pub fn redirect(&self, path: &str, elsewhere: &Server, target: &str) {
        let to = (elsewhere.url(), target.to_owned(), elsewhere.state.clone());
        lock(&self.state.redirects).insert(path.to_owned(), to);
    }

    /// Has the network forget the connections that are open: they stay so, and nothing comes on them any more.
    pub fn forget_connections(&self) {
        self.state.forgotten.fetch_add(1, Ordering::Relaxed);
    }

    /// How many requests came on connections that were forgotten.
    pub fn requests_to_the_dead(&self) -> usize {
        self.state.to_the_dead.load(Ordering::Relaxed)
    }

    /// Goes away, or comes back. What is open is closed, and so is what is opened while it is away.
    pub fn go_away(&self, is_away: bool) {
        self.state.is_away.store(is_away, Ordering::Relaxed);
        if is_away {
            for socket in lock(&self.state.connections).iter() {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    /// Has answers to requests for ranges wait that have more bytes, until it says another bound.
    pub fn hold_longer_answers(&self, than: Option<usize>) {
        *lock(&self.state.longest_answer) = than;
    }

    /// Connections that are open.
    pub fn open_connections(&self) -> usize {
        lock(&self.state.connections).len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        for socket in lock(&self.state.connections).drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn serve(&self, socket: TcpStream, tls: Option<&Arc<ServerConfig>>) {
        let Ok(peer) = socket.peer_addr() else { return };
        let _ = socket.set_nodelay(true);
        if let Ok(connection) = socket.try_clone() {
            lock(&self.connections).push(connection);
        }
        let Ok(mut socket) = Stream::new(socket, tls) else { return };
        let (mut buffer, forgotten) = (Vec::new(), self.forgotten.load(Ordering::Relaxed));
        while let Ok(Some(request)) = Request::read(&mut socket, &mut buffer) {
            if self.forgotten.load(Ordering::Relaxed) != forgotten {
                self.to_the_dead.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_in_flight.fetch_max(now, Ordering::Relaxed);
            let answered = match uploads::step_of(&request) {
                Some(step) => self.write(&mut socket, &mut buffer, &request, step),
                None => self.answer(&mut socket, &request),
            };
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            if answered.is_err() {
                break;
            }
        }
        let _ = socket.shutdown();
        lock(&self.connections)
            .retain(|connection| connection.peer_addr().is_ok_and(|address| address != peer));
    }

    fn put(&self, path: &str, bytes: Vec<u8>, etag: String) {
        self.put_as(path, bytes, etag, false);
    }

    fn put_as(&self, path: &str, bytes: Vec<u8>, etag: String, is_of_blocks: bool) {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let digests = Digests::default();
        let object = Object { bytes, etag, generation, commit: None, is_of_blocks, digests };
        lock(&self.objects).insert(path.to_owned(), Arc::new(object));
    }

    /// Refuses a request that is signed for another region. `None` if it is not.
    fn refuse_region(&self, socket: &mut Stream, request: &Request) -> Option<io::Result<()>> {
        let region = lock(&self.region);
        let (region, otherwise) = region.as_ref()?;
        if request.authorization.as_ref().is_none_or(|own| own.contains(&format!("/{region}/s3/"))) {
            return None;
        }
        let header = format!("x-amz-bucket-region: {region}\r\n");
        Some(match otherwise {
            WrongRegion::Redirect => refuse(socket, "301 Moved Permanently", "PermanentRedirect", &header),
            WrongRegion::Malformed => {
                refuse(socket, "400 Bad Request", "AuthorizationHeaderMalformed", &header)
            }
            WrongRegion::InText => {
                let code = format!("AuthorizationHeaderMalformed</Code><Region>{region}</Region><Code>");
                refuse(socket, "400 Bad Request", &code, "")
            }
        })
    }

    /// Answers a request. An error closes the connection.
    fn answer(&self, socket: &mut Stream, request: &Request) -> io::Result<()> {
        lock(&self.requests).push(request.clone());
        let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let path = decoded(path.trim_start_matches('/'));
        let (faults, _) = *lock(&self.faults);
        thread::sleep(faults.latency);
        if request.method == "HEAD" {
            while *lock(&self.heads) == Heads::Hold && !self.is_over.load(Ordering::Relaxed) {
                self.wait(Duration::from_millis(20));
            }
            let heads = *lock(&self.heads);
            if heads == Heads::Hang {
                self.wait(Duration::from_secs(600));
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.heads_answered.fetch_add(1, Ordering::Relaxed);
            if let Heads::Refuse(status) = heads {
                return write!(socket, "HTTP/1.1 {status} Refused\r\nContent-Length: 99\r\n\r\n");
            }
        }
        let is_of = |key: &String| {
            request.authorization.as_ref().is_some_and(|own| own.contains(&format!("Credential={key}/")))
        };
        if lock(&self.refused_key).as_ref().is_some_and(is_of) {
            return match &*request.method {
                // Such an answer has no body, and so no code.
                "HEAD" => write!(socket, "HTTP/1.1 403 Forbidden\r\nContent-Length: 99\r\n\r\n"),
                _ => refuse(socket, "403 Forbidden", "InvalidAccessKeyId", ""),
            };
        }
        if let Some(refused) = self.refuse_region(socket, request) {
            return refused;
        }
        if query.contains("comp=blocklist") {
            return self.list_blocks(socket, &path);
        }
        if query == "uploads" || query == "uploads=" {
            return self.list_uploads(socket, path.trim_end_matches('/'));
        }
        if query.contains("list-type=2") || query.contains("comp=list") {
            return self.list(socket, path.trim_end_matches('/'), query);
        }
        if self.is_hub() {
            return self.answer_as_hub(socket, request, &path);
        }
        if !self.accepts(query) {
            return match faults.expired_status {
                Some(400) => refuse(socket, "400 Bad Request", "ExpiredToken", ""),
                _ => refuse(socket, "403 Forbidden", "AccessDenied", ""),
            };
        }
        if let Some((url, target, state)) = lock(&self.redirects).get(&path) {
            let number = state.expired.load(Ordering::Relaxed);
            let to = format!("Location: {url}/{target}?sig=canary&number={number}\r\n");
            return refuse(socket, "302 Found", "Found", &to);
        }
        let fault = faults.next(request.range, &mut lock(&self.faults).1);
        if let Some(Fault::Swap) = fault {
            // Held until the object is swapped: once `fail` has said something else, no object changes any more.
            let now = lock(&self.faults);
            let objects = lock(&self.objects);
            // Once: it stays another.
            let is_first = |object: &&Arc<Object>| !object.etag.starts_with("\"swapped-");
            let swapped = objects.get(&path).filter(is_first).filter(|_| now.0.fault == fault);
            let swapped: Option<Vec<u8>> =
                swapped.map(|object| object.bytes.iter().map(|byte| !byte).collect());
            drop(objects);
            if let Some(bytes) = swapped {
                let etag = format!("\"swapped-{}\"", bytes.len());
                self.put(&path, bytes, etag);
            }
        }
        let object = {
            let objects = lock(&self.objects);
            objects.get(&format!("{path}?{query}")).or_else(|| objects.get(&path)).cloned()
        };
        let Some(object) = object else { return refuse(socket, "404 Not Found", "NoSuchKey", "") };
        let is_other = request.if_match.as_ref().is_some_and(|wanted| *wanted != object.etag)
            || request
                .if_generation_match
                .as_ref()
                .is_some_and(|wanted| *wanted != object.generation.to_string());
        if is_other && !faults.ignores_preconditions {
            return refuse(socket, "412 Precondition Failed", "PreconditionFailed", "");
        }
        self.send(socket, request, &object, fault)
    }

    /// The header with the date that answers say, if they do.
    fn dated(&self) -> String {
        lock(&self.date).as_ref().map_or_else(String::new, |date| format!("Date: {date}\r\n"))
    }

    fn send(
        &self,
        socket: &mut Stream,
        request: &Request,
        object: &Object,
        fault: Option<Fault>,
    ) -> io::Result<()> {
        let whole = object.bytes.len();
        let checksums = *lock(&self.checksums);
        let number = request.target.split_once("partNumber=").and_then(|(_, number)| number.parse().ok());
        let part = number.and_then(|number| checksums.range(number, &object.bytes));
        let range = request.range.or(part);
        let (mut start, mut end) = range.map_or((0, whole), |(first, last)| (first, whole.min(last + 1)));
        if start >= end {
            return refuse(socket, "416 Range Not Satisfiable", "InvalidRange", "");
        }
        if request.wants_range_crc && matches!(checksums, Checksums::None | Checksums::BlobMd5) {
            return refuse(socket, "500 Internal Server Error", "FeatureNotSupported", "");
        }
        if let (true, Some(status)) = (request.wants_range_crc, lock(&self.faults).0.range_crc_status) {
            return match status {
                400 => refuse(socket, "400 Bad Request", "InvalidHeaderValue", ""),
                _ => refuse(socket, "501 Not Implemented", "NotImplemented", ""),
            };
        }
        if request.wants_range_crc && (range.is_none() || end - start > 4 << 20) {
            return refuse(socket, "400 Bad Request", "OutOfRangeQueryParameterValue", "");
        }
        while range.is_some() && lock(&self.longest_answer).is_some_and(|most| end - start > most) {
            if self.is_over.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let mut status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
        let mut etag = format!("ETag: {}\r\n", object.etag);
        let (mut length, mut extra) = (None, String::new());
        let asked = (start, end);
        match fault {
            Some(Fault::Status(503)) => {
                return refuse(socket, "503 Slow Down", "SlowDown", "Retry-After: 0\r\n");
            }
            Some(Fault::Status(429)) => {
                return refuse(socket, "429 Too Many Requests", "TooManyRequests", "");
            }
            Some(Fault::Status(500)) => {
                return refuse(socket, "500 Internal Server Error", "InternalError", "");
            }
            // That of a proxy.
            Some(Fault::Status(501)) => return refuse(socket, "501 Not Implemented", "", ""),
            Some(Fault::Status(403)) => {
                return refuse(socket, "403 Forbidden", "AccessDenied", &self.dated());
            }
            Some(Fault::Status(_)) | Some(Fault::Redirect) => {
                let to = "Location: https://elsewhere.example/a?X-Amz-Signature=canary\r\n";
                return refuse(socket, "307 Temporary Redirect", "TemporaryRedirect", to);
            }
            Some(Fault::RedirectWithin) => {
                let to = "Location: /elsewhere/a?X-Amz-Signature=canary\r\n";
                return refuse(socket, "302 Found", "Found", to);
            }
            Some(Fault::Short) => end = start + (end - start).div_ceil(2),
            Some(Fault::Shift) if start > 0 => (start, end) = (start - 1, end - 1),
            Some(Fault::Shift) => end -= 1,
            Some(Fault::Whole) => {
                status = "200 OK";
                (start, end) = (0, whole);
            }
            Some(Fault::LongBody) => length = Some(end - start + 1),
            Some(Fault::ShortBody) => length = Some(end - start - 1),
            Some(Fault::NoETag) => etag = String::new(),
            Some(Fault::WeakETag) => etag = format!("ETag: W/{}\r\n", object.etag),
            Some(Fault::OtherETag) => etag = "ETag: \"another\"\r\n".into(),
            Some(Fault::Encoded) => extra = "Content-Encoding: gzip\r\n".into(),
            Some(Fault::NoRange) => extra = "X-Hoistway: none\r\n".into(),
            Some(Fault::Garbage) => return socket.write_all(b"\x00\x01garbage\r\n\r\n"),
            Some(Fault::LongHead) => extra = format!("X-Long: {}\r\n", "a".repeat(200_000)),
            Some(Fault::Stall(time)) => self.wait(time),
            _ => {}
        }
        if *lock(&self.dialect) == Dialect::Google {
            extra += &format!("x-goog-generation: {}\r\n", object.generation);
        }
        extra += &checksums.headers(*lock(&self.dialect), request, object);
        if request.method != "HEAD" {
            extra += &checksums.of_content(request, &object.bytes[start..end]);
        }
        extra += &self.dated();
        if let Some(commit) = &object.commit {
            let is_wrong = lock(&self.faults).0.wrong_commit;
            extra += &format!("X-Repo-Commit: {}\r\n", if is_wrong { hub::OTHER_COMMIT } else { commit });
        }
        let length = length.unwrap_or(end - start);
        let framing = match fault {
            Some(Fault::Chunked | Fault::LongChunks) => "Transfer-Encoding: chunked\r\n".to_owned(),
            Some(Fault::UntilClose) => "Connection: close\r\n".into(),
            _ => format!("Content-Length: {length}\r\n"),
        };
        let mut head = format!(
            "HTTP/1.1 {status}\r\n{framing}{etag}{extra}Last-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\n"
        );
        if status.starts_with("206") && !matches!(fault, Some(Fault::NoRange)) {
            let shown =
                if let Some(Fault::LyingRange) = fault { (asked.0 + 1, asked.1) } else { (start, end) };
            head += &format!("Content-Range: bytes {}-{}/{whole}\r\n", shown.0, shown.1.max(shown.0 + 1) - 1);
        }
        socket.write_all((head + "\r\n").as_bytes())?;
        if request.method == "HEAD" {
            return Ok(());
        }
        let middle = start + (end - start).div_ceil(2);
        match fault {
            Some(Fault::Truncate) => {
                socket.write_all(&object.bytes[start..middle])?;
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Some(Fault::TruncateAfter(most)) if most < end - start => {
                socket.write_all(&object.bytes[start..start + most])?;
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Some(Fault::Reset) => {
                socket.write_all(&object.bytes[start..middle])?;
                // What was sent and not read makes the system send a reset.
                socket.shutdown()?;
                Err(io::ErrorKind::ConnectionReset.into())
            }
            Some(Fault::Chunked | Fault::LongChunks) => {
                for part in object.bytes[start..end].chunks(50_001) {
                    write!(socket, "{:x}\r\n", part.len())?;
                    socket.write_all(part)?;
                    socket.write_all(b"\r\n")?;
                }
                let more: &[u8] = if fault == Some(Fault::LongChunks) { b"1\r\nx\r\n" } else { b"" };
                socket.write_all(&[more, b"0\r\n\r\n"].concat())
            }
            Some(Fault::UntilClose) => {
                socket.write_all(&object.bytes[start..end])?;
                // Ends after what was sent has arrived: the client closes, too.
                Err(io::ErrorKind::ConnectionAborted.into())
            }
            Some(Fault::Flip) => {
                let mut body = object.bytes[start..end].to_vec();
                body[middle - start] ^= 1;
                socket.write_all(&body)
            }
            Some(Fault::Trickle) => object.bytes[start..end].iter().try_for_each(|byte| {
                self.wait(Duration::from_millis(20));
                socket.write_all(&[*byte])
            }),
            Some(Fault::StallInside(time)) => {
                socket.write_all(&object.bytes[start..middle])?;
                self.wait(time);
                socket.write_all(&object.bytes[middle..end])
            }
            _ => {
                let rate = lock(&self.faults).0.bytes_per_second;
                paced(socket, &object.bytes[start..end.min(start + length)], rate)
            }
        }
    }

    /// Waits, unless the server stops.
    fn wait(&self, time: Duration) {
        let tick = Duration::from_millis(20);
        for _ in 0..time.as_millis() / tick.as_millis() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            thread::sleep(tick);
        }
    }
}

/// Writes no more bytes a second than a connection may.
fn paced(socket: &mut Stream, bytes: &[u8], bytes_per_second: Option<u64>) -> io::Result<()> {
    let Some(rate) = bytes_per_second.filter(|rate| *rate > 0) else { return socket.write_all(bytes) };
    let (begun, mut sent) = (Instant::now(), 0);
    for part in bytes.chunks(256 << 10) {
        socket.write_all(part)?;
        sent += part.len();
        let due = Duration::from_secs_f64(sent as f64 / rate as f64);
        thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

fn refuse(socket: &mut Stream, status: &str, code: &str, headers: &str) -> io::Result<()> {
    let text = format!("<Error><Code>{code}</Code><Message>signed canary</Message></Error>");
    write!(socket, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{text}", text.len())
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
